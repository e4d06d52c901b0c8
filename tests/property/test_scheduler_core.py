"""The whole core under a hypothesis state machine, against the simulated executor.

The executor keeps track of KV contents: a wrong table, copy or swap gives wrong tokens, and a plan that contradicts
earlier ones is rejected. At depth 1 the executor's slots are compared with the core's state after each step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.beams import Hypothesis
from scheduler_svc.core.steps.results import context_lens
from scheduler_svc.core.types import (
    ExecutorSpec,
    FinishDetail,
    PromptLogprobs,
    RequestKey,
    RequestSpec,
    SequenceState,
    SessionEnd,
    StepPlan,
)
from tests.helpers.core_executor import CoreExecutor
from tests.helpers.core_histories import MAX_MODEL_LEN, executors, policies, prompts, requests
from tests.helpers.digest import check_mirror
from tests.helpers.known import VOCAB_SIZE, as_lists, known_beams, known_cuts, known_prompt_logprobs, known_sample

ENDED_EARLY = (FinishDetail.ABORTED, FinishDetail.EXECUTOR_ERROR)
MANY_STEPS = 5_000
"""More than all requests together may need."""
MOST_DEATHS = 8
"""Of each poisonous request: one among others, one for each halving of 15 others at most, two alone."""
PICK = st.integers(0, 99)

Sample = tuple[RequestKey, int]


class CoreMachine(RuleBasedStateMachine):
    @initialize(spec=executors(), policies=policies(), depth=st.sampled_from([1, 2, 3, 4, 1]))
    def start(self, spec: ExecutorSpec, policies: Policies, depth: int) -> None:
        self.spec = spec
        self.core = Scheduler(policies)
        self.core.add_executor(0, spec)
        self.executor = CoreExecutor(spec, VOCAB_SIZE)
        self.depth = depth
        self.plans: deque[StepPlan] = deque()
        self.specs: dict[RequestKey, RequestSpec] = {}
        self.outputs: dict[Sample, list[int]] = {}
        self.finishes: dict[Sample, FinishDetail] = {}
        self.aborted: set[RequestKey] = set()
        self.stopped: set[Sample] = set()
        self.prompt_logprobs: dict[RequestKey, list[PromptLogprobs]] = {}
        self.hypotheses: dict[RequestKey, list[Hypothesis]] = {}
        self.poisons: dict[RequestKey, int] = {}
        """Requests that kill their executor, each at a position."""
        self.num_deaths = 0
        self.num_cuts = 0
        self.now = 0.0
        self.intact = True
        """Has every step so far gone well: after one that has not there is nothing left to say."""

    # --- what may happen ---------------------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 3))
    @precondition(lambda self: len(self.core.groups) < 12)
    def add(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.add_one(data, data.draw(prompts()))

    @rule(data=st.data())
    @precondition(lambda self: len(self.core.groups) < 12 and len(self.poisons) < 2)
    def add_poison(self, data: st.DataObject) -> None:
        self.add_one(data, data.draw(prompts()), poisonous=True)

    @rule(data=st.data(), pick=PICK, is_same=st.booleans())
    @precondition(lambda self: self.finishes and len(self.core.groups) < 12)
    def add_a_turn(self, data: st.DataObject, pick: int, is_same: bool) -> None:
        """The same prompt as before, or one that goes on where another request's output ended."""
        key, index = list(self.finishes)[pick % len(self.finishes)]
        former = self.specs[key]
        talk = (*former.prompt_token_ids, *self.outputs[key, index], *data.draw(prompts()))[: MAX_MODEL_LEN - 5]
        self.add_one(data, former.prompt_token_ids if is_same else talk, former)

    def add_one(
        self,
        data: st.DataObject,
        prompt: tuple[int, ...],
        former: RequestSpec | None = None,
        *,
        poisonous: bool = False,
    ) -> None:
        spec = data.draw(requests(f"r{len(self.specs)}", prompt))
        if former is not None:
            spec = replace(spec, tenant=former.tenant, cache_salt=former.cache_salt)
        fits = len(prompt) // self.spec.block_size + spec.num_sequences <= self.spec.num_blocks
        try:
            self.core.add_request(spec, self.now)
        except RequestRejectedError:
            assert not fits or spec.num_sequences > self.spec.max_num_seqs
        else:
            assert fits
            self.specs[spec.key] = spec
            if poisonous:
                self.poisons[spec.key] = len(prompt) + data.draw(st.sampled_from([0, -1, 3, -len(prompt) // 2]))
            self.outputs |= {(spec.key, index): [] for index in range(spec.num_samples)}
            self.prompt_logprobs[spec.key] = []

    @rule()
    @precondition(lambda self: len(self.plans) < self.depth)
    def plan(self) -> None:
        self.plan_one()

    def plan_one(self) -> bool:
        self.now, self.intact = self.now + 1, False
        plan = self.core.plan_step(0, self.now)
        self.take(self.core.take_outputs())
        self.core.check_integrity()
        self.intact = True
        if plan is None:
            return False
        plan.debug_digest = self.depth == 1
        self.plans.append(plan)
        return True

    @rule()
    @precondition(lambda self: self.plans)
    def apply(self) -> None:
        self.intact = False
        if self.dies_in_next_step():
            self.num_deaths += 1
            end = SessionEnd(begun_step_id=self.plans[0].step_id)
            self.lose_executor("process", len(self.plans), end)
            return
        result = self.executor.run(self.plans.popleft())
        _, outputs = self.core.apply_result(0, result, self.now)
        self.take(outputs)
        self.core.check_integrity()
        if result.debug_digest:
            check_mirror(self.core.lanes[0], self.executor.inner.slots, result.debug_digest)
        self.intact = True

    @rule(steps=st.integers(1, 20))
    def run_full(self, steps: int) -> None:
        """Keep the pipeline as full as its depth allows."""
        for _ in range(steps):
            while len(self.plans) < self.depth and self.plan_one():
                pass
            if self.plans:
                self.apply()

    @rule(what=st.sampled_from(["abort", "stop", "lose", "lose", "drain"]), pick=PICK)
    @precondition(lambda self: self.core.groups)
    def disturb(self, what: str, pick: int) -> None:
        if what == "abort":
            key = list(self.core.groups)[pick % len(self.core.groups)]
            self.aborted.add(key)
            self.take(self.core.abort(key, FinishDetail.ABORTED))
        elif what == "stop":
            self.stop_sample(pick)
        elif what == "lose":
            how = ("session", "session, steps run", "process", "session, nothing known")[pick % 4]
            self.lose_executor(how, pick // 4 % 4)
        else:
            self.core.drain(pick % 2 == 0)

    def stop_sample(self, pick: int) -> None:
        """The engine has found a stop string in a sample's text: it hears no more of it."""
        running = [
            (group.key, sequence.sample_index)
            for group in self.core.groups.values()
            for sequence in group.sequences
            if sequence.num_output_tokens and not sequence.is_beam and sequence.state is not SequenceState.FINISHED
        ]
        if running:
            key, index = running[pick % len(running)]
            self.core.stop_sample(key, index)
            self.stopped.add((key, index))
            self.finishes[key, index] = FinishDetail.STOP_STRING

    def dies_in_next_step(self) -> bool:
        """Whether the oldest plan computes the position at which a poisonous request kills its executor."""
        lane = self.core.lanes[0]
        step = lane.inflight[0]
        num_tokens = {chunk.sequence: chunk.num_tokens for chunk in step.chunks}
        return any(
            context_len <= self.poisons[sequence.group.key] < context_len + num_tokens.get(sequence, 1)
            for sequence, context_len in context_lens(lane, step).items()
            if sequence.group.key in self.poisons
        )

    def lose_executor(self, how: str, num_run: int, end: SessionEnd | None = None) -> None:
        """A session ends with plans in flight, some of which were run: KV is kept, or memory is empty, or full of what
        nobody should read."""
        self.intact = False
        self.num_cuts += end is None
        if how == "session":
            self.executor.run_in_part(list(self.plans))
        else:
            for plan in list(self.plans)[:num_run]:
                self.executor.run(plan)
        self.plans.clear()
        if how == "process":
            self.executor = CoreExecutor(self.spec, VOCAB_SIZE)
        else:
            self.executor.clear()
        if how == "session, nothing known":
            self.take(self.core.executor_lost(0, self.now))
        else:
            self.take(self.core.executor_lost(0, self.now, end or SessionEnd()))
            self.core.check_integrity()
            self.cut_short()
            same = how.startswith("session")
            self.take(self.core.session_opened(0, same_incarnation=same, keeps_kv=same))
        self.core.check_integrity()
        self.intact = True

    def cut_short(self) -> None:
        """A request may be aborted while no executor is there."""
        if len(self.core.groups) > 4:
            key = next(iter(self.core.groups))
            self.aborted.add(key)
            self.take(self.core.abort(key, FinishDetail.ABORTED))
            self.core.check_integrity()

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity()

    def take(self, outputs: StepOutputs) -> None:
        for output in outputs.hypotheses:
            found = Hypothesis(output.token_ids, output.score, output.cumulative_logprob, output.finish)
            self.hypotheses.setdefault(output.group.key, []).append(found)
        for delta in outputs:
            sample = delta.key, delta.sample_index
            assert sample not in self.finishes, "outputs of a finished sample"
            self.outputs[sample] += delta.token_ids
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs[delta.key].append(delta.prompt_logprobs)
            if delta.finish is not None:
                self.finishes[sample] = delta.finish.detail
        for sample in dict.fromkeys((delta.key, delta.sample_index) for delta in outputs if delta.finish is not None):
            self.check_sample(*sample)

    def check_sample(self, key: RequestKey, index: int) -> None:
        """An ended sample has the tokens that it must have, and ends as it must."""
        spec, output, detail = self.specs[key], self.outputs[key, index], self.finishes[key, index]
        assert detail is not FinishDetail.EXECUTOR_ERROR or key in self.poisons, "an innocent request is ended"
        if spec.beams:
            if index == 0:
                self.check_beams(spec, detail)
            return
        tokens, known_detail = known_sample(spec, MAX_MODEL_LEN, index)
        assert output == tokens[: len(output)]
        if detail is FinishDetail.KV_CAPACITY:
            assert len(spec.prompt_token_ids) + len(output) == self.capacity + 1
        elif detail not in ENDED_EARLY:
            assert (output, detail) == (tokens, known_detail)

    def check_beams(self, spec: RequestSpec, detail: FinishDetail) -> None:
        """All of a search's results come at once, the best first."""
        found = self.hypotheses.get(spec.key)
        if found is None:
            assert detail in (*ENDED_EARLY, FinishDetail.KV_CAPACITY)
            return
        assert len(found) == spec.num_samples
        best = known_beams(spec, MAX_MODEL_LEN)
        missing = [one for one in found[len(best) :] if one.finish.detail is FinishDetail.NO_ALLOWED_TOKEN]
        if found != [*best, *missing]:
            assert spec.beams is not None
            by = FinishDetail.ABORTED if spec.key in self.aborted else FinishDetail.KV_CAPACITY
            assert spec.key in self.aborted or self.most_blocks(spec) > self.spec.num_blocks, "what fits is not cut"
            cuts = known_cuts(spec, MAX_MODEL_LEN, by)
            assert any(found[: len(cut)] == cut and not any(one.token_ids for one in found[len(cut) :]) for cut in cuts)

    def most_blocks(self, spec: RequestSpec) -> int:
        """Blocks that the group may hold at once, if it shares none but the prompt's: with one for each copy."""
        longest = min(len(spec.prompt_token_ids) + (spec.max_tokens or MAX_MODEL_LEN), MAX_MODEL_LEN)
        num_shared = len(spec.prompt_token_ids) // self.spec.block_size
        return num_shared + spec.num_sequences * (longest // self.spec.block_size + 2 - num_shared)

    @property
    def capacity(self) -> int:
        """Tokens whose KV the pool holds."""
        return self.spec.num_blocks * self.spec.block_size

    def check_prompt_logprobs(self, spec: RequestSpec) -> None:
        """Each row once and in order; all of them if there is any output."""
        end, num_top = 1, spec.sampling.num_prompt_logprobs
        for part in self.prompt_logprobs[spec.key]:
            assert part.start == end
            assert num_top is not None
            end = part.end
            assert as_lists(part) == known_prompt_logprobs(spec.prompt_token_ids[:end], num_top, part.start)
        if num_top is not None and any(self.outputs[spec.key, index] for index in range(spec.num_samples)):
            assert end == len(spec.prompt_token_ids)

    def teardown(self) -> None:
        """Run dry: every request ends, and nothing is left held."""
        if not (hasattr(self, "core") and self.intact):
            return
        self.core.drain(True)
        for _ in range(MANY_STEPS):
            if not self.plans and not self.core.groups:
                break
            self.run_full(1)
        self.run_full(2)  # What ended last is still to be released.
        assert not self.core.groups
        assert self.num_deaths <= MOST_DEATHS * (len(self.poisons) + self.num_cuts)
        assert set(self.finishes) == set(self.outputs)
        for spec in self.specs.values():
            self.check_prompt_logprobs(spec)
        for key, index in self.stopped:
            output = self.outputs[key, index]
            assert output == known_sample(self.specs[key], MAX_MODEL_LEN, index)[0][: len(output)]
        lane = self.core.lanes[0]
        assert lane.blocks.num_free == self.spec.num_blocks
        assert not lane.blocks.num_used_host
        assert not self.executor.slots
        assert lane.slots.num_free == self.spec.num_slots


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
