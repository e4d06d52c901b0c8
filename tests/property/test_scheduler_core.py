"""The whole core under a hypothesis state machine, against the simulated executor.

The executor keeps track of KV contents: a wrong table, copy or swap gives wrong tokens, and a plan that contradicts
earlier ones is rejected. At depth 1 the executor's slots are compared with the core's state after each step.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core import kv_groups
from scheduler_svc.core.adapters.events import AdapterDue, AdapterRegistered, AdapterRemoved
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, RequestSpec, SequenceState, SessionEnd
from tests.helpers.core.core_checks import check_adapters, check_prompt_logprobs
from tests.helpers.core.core_histories import MAX_MODEL_LEN, executors, policies, prompts, requests
from tests.helpers.core.core_reports import CoreReports, Sample
from tests.helpers.core.known import known_sample
from tests.helpers.core.lane_rig import BROKEN, LaneRig, fits_one

MANY_STEPS = 5_000
"""More than all requests together may need."""
MOST_DEATHS = 8
"""Of each poisonous request: one among others, one for each halving of 15 others at most, two alone."""
PICK = st.integers(0, 99)
MAX_LANES = 4


class CoreMachine(CoreReports, RuleBasedStateMachine):
    """Executor 0 holds the longest requests and is never removed, so what each request must give is known."""

    @initialize(
        spec=executors(),
        others=st.lists(executors(), max_size=MAX_LANES - 1),
        policies=policies(),
        depth=st.sampled_from([1, 2, 3, 4, 1]),
        tick=st.sampled_from([1.0, 0.1]),
        interval=st.sampled_from([8, 16, 256]),
    )
    def start(
        self, spec: ExecutorSpec, others: list[ExecutorSpec], policies: Policies, depth: int, tick: float, interval: int
    ) -> None:
        names = ("_LEAST_INTERVAL", "_MOST_INTERVAL", "_INTERVAL_WITHOUT_FULL")
        # Tokens between states that are saved: the texts here are short.
        self.patch = patch.multiple(kv_groups, **dict.fromkeys(names, interval))
        self.patch.start()
        self.core = Scheduler(policies)
        self.clear_reports()
        self.num_adapters = 0
        self.depth, self.tick = depth, tick
        self.rigs: dict[int, LaneRig] = {}
        self.num_joined = 0
        for each in (spec, *others):
            self.join(each)
        self.stopped: set[Sample] = set()
        self.num_deaths = 0
        self.num_cuts = 0
        self.now = 0.0
        self.intact = True
        """Has every step so far gone well: after one that has not there is nothing left to say."""

    def join(self, spec: ExecutorSpec) -> None:
        self.rigs[self.num_joined] = LaneRig(self.core, self.num_joined, spec, self.depth)
        self.pools.append(spec)
        self.num_joined += 1

    def rig(self, pick: int) -> LaneRig:
        return list(self.rigs.values())[pick % len(self.rigs)]

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
        named = [index for index, each in self.core.adapters.adapters.items() if each.has_name]
        if any(rig.spec.max_loras for rig in self.rigs.values()) and named:
            spec = replace(spec, adapter_index=data.draw(st.sampled_from([0, *named])))
        fits = fits_one(self.rigs.values(), prompt, spec.num_sequences)
        try:
            self.core.add_request(spec, self.now)
        except RequestRejectedError:
            assert not fits
        else:
            assert fits
            self.specs[spec.key] = spec
            if poisonous:
                self.poisons[spec.key] = len(prompt) + data.draw(st.sampled_from([0, -1, 3, -len(prompt) // 2]))
            self.outputs |= {(spec.key, index): [] for index in range(spec.num_samples)}
            self.prompt_logprobs[spec.key] = []

    @rule(count=st.integers(1, 3))
    @precondition(lambda self: self.num_adapters < 12)
    def register(self, count: int) -> None:
        """Adapters come, now and then one that cannot be loaded."""
        for _ in range(count):
            self.num_adapters += 1
            path = BROKEN if self.num_adapters % 7 == 6 else "/adapter"
            self.core.adapter_event(AdapterRegistered(self.num_adapters, f"a{self.num_adapters}", path))

    @rule(pick=PICK)
    @precondition(lambda self: self.core.adapters.adapters)
    def remove_adapter(self, pick: int) -> None:
        """An adapter loses its name; its requests go on."""
        indexes = list(self.core.adapters.adapters)
        self.core.adapter_event(AdapterRemoved(indexes[pick % len(indexes)]))

    @rule(pick=PICK)
    @precondition(lambda self: self.core.adapters.users)
    def adapter_is_due(self, pick: int) -> None:
        """A request has waited long for its adapter, as the engine says, or it is loaded already."""
        indexes = list(self.core.adapters.users)
        self.core.adapter_event(AdapterDue(indexes[pick % len(indexes)]))

    @rule(pick=PICK)
    def answer(self, pick: int) -> None:
        """A load or an unload is done."""
        rig = self.rig(pick)
        if rig.is_open:
            self.answer_one(rig)

    def answer_one(self, rig: LaneRig) -> None:
        self.intact = False
        rig.answer()
        self.end_refused()
        self.core.check_integrity()
        self.intact = True

    def end_refused(self) -> None:
        """As the engine does: what no executor can load ends."""
        for key, group in list(self.core.groups.items()):
            if self.core.adapter_refusal(group.spec.adapter_index) is not None:
                self.aborted.add(key)
                self.take(self.core.abort(key, FinishDetail.ABORTED))

    @rule(pick=PICK)
    def plan(self, pick: int) -> None:
        rig = self.rig(pick)
        if rig.is_open and len(rig.plans) < self.depth:
            self.plan_one(rig)

    def plan_one(self, rig: LaneRig) -> bool:
        self.now, self.intact = self.now + self.tick, False
        planned = rig.plan(self.now)
        check_adapters(self.core, rig)
        self.take(self.core.take_outputs())
        self.core.check_integrity()
        self.intact = True
        return planned

    @rule(pick=PICK)
    def apply(self, pick: int) -> None:
        rig = self.rig(pick)
        if rig.plans:
            self.apply_one(rig)

    def apply_one(self, rig: LaneRig) -> None:
        self.intact = False
        if rig.dies_in_next_step(self.poisons):
            self.num_deaths += 1
            end = SessionEnd(begun_step_id=rig.plans[0].step_id)
            self.lose_executor(rig, "process", len(rig.plans), end)
            return
        self.take(rig.apply(self.now))
        self.core.check_integrity()
        self.intact = True

    @rule(steps=st.integers(1, 20))
    def run_full(self, steps: int) -> None:
        """Keep the pipelines as full as their depth allows."""
        for _ in range(steps):
            for rig in list(self.rigs.values()):
                while rig.is_open and len(rig.plans) < self.depth and self.plan_one(rig):
                    pass
                if rig.plans:
                    self.apply_one(rig)
                elif rig.is_open:
                    self.answer_one(rig)

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
            rig = self.rig(pick // 16)
            if rig.is_open:
                self.lose_executor(rig, how, pick // 4 % 4, stays_away=pick % 3 == 0)
        else:
            self.core.drain(pick % 2 == 0)

    @rule(what=st.sampled_from(["join", "drain", "resume", "remove", "return", "give up"]), spec=executors(), pick=PICK)
    def change_executors(self, what: str, spec: ExecutorSpec, pick: int) -> None:
        """Executors join, drain, leave and come back."""
        rig, executor_id = self.rig(pick), self.rig(pick).executor_id
        self.intact = False
        if what == "join" and len(self.rigs) < MAX_LANES:
            self.join(spec)
        elif what in ("drain", "resume"):
            self.core.drain_executor(executor_id, what == "drain", self.now)
        elif what == "remove" and executor_id:
            self.take(self.core.remove_executor(executor_id, self.now))
            del self.rigs[executor_id]
        elif what == "return" and not rig.is_open:
            self.come_back(rig, spec if executor_id and pick % 2 else rig.spec)
        elif what == "give up" and not rig.is_open:
            self.take(self.core.give_up_executor(executor_id, self.now))
        self.end_misfits()
        self.end_refused()
        self.core.check_integrity()
        self.intact = True

    def end_misfits(self) -> None:
        """As the engine does: what no executor that is left can ever run ends."""
        for key in [key for key in self.core.groups if self.core.misfit(key) is not None]:
            self.aborted.add(key)
            self.take(self.core.abort(key, FinishDetail.ABORTED))

    def come_back(self, rig: LaneRig, spec: ExecutorSpec) -> None:
        if spec != rig.spec:
            rig.change(spec)
            self.pools.append(spec)
        self.take(rig.open_again())

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

    def lose_executor(
        self, rig: LaneRig, how: str, num_run: int, end: SessionEnd | None = None, *, stays_away: bool = False
    ) -> None:
        """A session ends, and another one begins unless the executor stays away."""
        self.intact = False
        self.num_cuts += end is None
        self.take(rig.lose(how, num_run, self.now, end))
        self.core.check_integrity()
        self.cut_short()
        if not stays_away:
            self.take(rig.open_again())
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

    def teardown(self) -> None:
        """Run dry: every request ends, and nothing is left held."""
        try:
            if hasattr(self, "core") and self.intact:
                self.run_dry()
        finally:
            if hasattr(self, "patch"):
                self.patch.stop()

    def run_dry(self) -> None:
        self.core.drain(True)
        for rig in self.rigs.values():
            self.core.drain_executor(rig.executor_id, False, self.now)
            if not rig.is_open:
                self.take(rig.open_again())
        for _ in range(MANY_STEPS):
            if not self.core.groups and not any(rig.plans for rig in self.rigs.values()):
                break
            self.run_full(1)
        self.run_full(2)  # What ended last is still to be released.
        assert not self.core.groups
        assert self.num_deaths <= MOST_DEATHS * self.num_joined * (len(self.poisons) + self.num_cuts)
        assert set(self.finishes) == set(self.outputs)
        for spec in self.specs.values():
            has_output = any(self.outputs[spec.key, index] for index in range(spec.num_samples))
            check_prompt_logprobs(spec, self.prompt_logprobs[spec.key], has_output=has_output)
        for key, index in self.stopped:
            output = self.outputs[key, index]
            assert output == known_sample(self.specs[key], MAX_MODEL_LEN, index)[0][: len(output)]
        for rig in self.rigs.values():
            rig.check_empty()


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


@pytest.mark.long
@pytest.mark.timeout(600)
class TestManyMore(CoreMachine.TestCase):
    """Other histories, and more."""

    settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
