"""A core and a simulated executor with the plans between them, moved on by hand."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ids
from contextlib import suppress
from typing import Any

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import LogprobColumns, StepResult
from executor_svc.simulated.costs import StepCosts
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.outputs import BeamOutput, StepOutputs
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.beams import Hypothesis
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.steps.results import context_lens
from scheduler_svc.core.types import BeamSpec, ExecutorSpec, FinishDetail, RequestSpec, SessionEnd
from tests.helpers.core.core_executor import COSTS, CoreExecutor
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.core.deltas import deltas
from tests.helpers.core.known import VOCAB_SIZE, known_beams, known_sample


class Bench:
    """Request ids are all of one tenant's making: no two tenants use the same here."""

    def __init__(self, policies: Policies | None = None, *, costs: StepCosts = COSTS, **changes: int | float) -> None:
        limits = {
            "block_size": 4,
            "num_blocks": 64,
            "num_slots": 8,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 128,
            "watermark": 0.0,
        }
        self.spec = ExecutorSpec(**{**limits, **changes})  # type: ignore[arg-type]
        self.costs = costs
        self.core = Scheduler(policies)
        self.core.add_executor(0, self.spec)
        self.executor = CoreExecutor(self.spec, VOCAB_SIZE, costs)
        self.plans: deque[StepPlan] = deque()
        self.specs: dict[str, RequestSpec] = {}
        self.samples: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        """Tokens by request and sample."""
        self.ends: dict[tuple[str, int], FinishDetail] = {}
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        """Of each request's first sample."""
        self.details: dict[str, FinishDetail] = {}
        """How that ended."""
        self.hypotheses: list[BeamOutput] = []
        self.prompt_logprobs: dict[str, list[LogprobColumns]] = {}
        self.order: list[str] = []
        """Who was admitted, one after the other."""
        self.poisons: dict[str, int] = {}
        """Requests that kill their executor, each with the position at which it does."""
        self.num_deaths = 0
        self.num_computed_tokens = 0
        """What all steps planned so far compute."""
        self.now = 0.0
        """The virtual clock, in seconds; `run` lets every step take one."""

    @property
    def lane(self) -> Lane:
        """The only one."""
        return self.core.lanes[0]

    def add_all(self, requests: Iterable[Mapping[str, Any]]) -> None:
        """Queue requests of such fields of `add`, named r0, r1 and so on; those that no pool can hold are left out."""
        for index, fields in enumerate(requests):
            request = dict(fields)
            prompt, max_tokens, stops = request.pop("prompt"), request.pop("max_tokens"), tuple(request["eos"])
            with suppress(RequestRejectedError):
                self.add(f"r{index}", prompt, max_tokens, stop_token_ids=stops, **request)

    def add(
        self,
        request_id: str,
        prompt: int | Ids[int],
        max_tokens: int | None = 5,
        *,
        n: int = 1,
        beams: BeamSpec | None = None,
        eos: Ids[int] = (),
        priority: int = 0,
        tenant: str = "",
        expected: int | None = None,
        salt: bytes = b"",
        max_drafts: int | None = None,
        uses_prefix_cache: bool = True,
        **sampling: object,
    ) -> RequestSpec:
        """Queue a request; a prompt that is a number has so many tokens, 1, 2, 3 and so on."""
        if isinstance(prompt, int):
            prompt = [index % VOCAB_SIZE for index in range(1, prompt + 1)]
        spec = RequestSpec(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=core_sampling(**{"temperature": 1.0, **sampling}),  # type: ignore[arg-type]
            max_tokens=max_tokens,
            eos_token_ids=frozenset(eos),
            num_samples=n,
            beams=beams,
            cache_salt=salt,
            max_drafts=max_drafts,
            uses_prefix_cache=uses_prefix_cache,
            priority=priority,
            tenant=tenant,
            expected_output_tokens=expected,
        )
        self.core.add_request(spec, self.now)
        self.specs[request_id] = spec
        self.tokens[request_id] = []
        return spec

    def known(self, request_id: str, sample_index: int = 0) -> list[int]:
        """The tokens that a sample must get if nothing ends it early."""
        return known_sample(self.specs[request_id], self.spec.max_model_len, sample_index)[0]

    def known_beams(self, request_id: str) -> list[Hypothesis]:
        """What a beam search must find if nothing cuts it short."""
        return known_beams(self.specs[request_id], self.spec.max_model_len)

    def found(self, request_id: str) -> list[Hypothesis]:
        """What it found."""
        return [
            Hypothesis(output.token_ids, output.score, output.cumulative_logprob, output.finish)
            for output in self.hypotheses
            if output.group.spec.request_id == request_id
        ]

    def sequences(self, request_id: str, tenant: str = "") -> list[Sequence]:
        """Of a request that has not ended."""
        return self.core.groups[tenant, request_id].sequences

    def plan(self) -> StepPlan | None:
        plan = self.core.plan_step(0, self.now)
        self.take(self.core.take_outputs())
        self.core.check_integrity()
        if plan is not None:
            self.plans.append(plan)
            step = self.lane.inflight[-1]
            self.order += dict.fromkeys(sequence.group.spec.request_id for sequence in step.joined)
            self.num_computed_tokens += step.total_tokens
        return plan

    def apply(self) -> StepResult:
        result = self.executor.run(self.plans.popleft())
        self.now += 1.0
        self.take(self.core.apply_result(0, result, self.now)[1])
        self.core.check_integrity()
        return result

    def lose_executor(self) -> None:
        """Its process dies with all plans in flight; the next one knows nothing."""
        self.plans.clear()
        self.take(self.core.executor_lost(0, self.now))
        self.core.check_integrity()
        self.executor = CoreExecutor(self.lane.spec, VOCAB_SIZE, self.costs)

    def cut_session(self) -> None:
        """The session breaks, and the same process opens the next one; what its plans in flight wrote is garbage."""
        self.executor.run_in_part(list(self.plans))
        self.executor.clear()
        self.plans.clear()
        self.take(self.core.executor_lost(0, self.now, SessionEnd()))
        self.core.check_integrity()
        self.take(self.core.session_opened(0, same_incarnation=True, keeps_kv=True))
        self.core.check_integrity()

    def die(self, *, is_known: bool = True, told_to_stop: bool = False) -> None:
        """The process dies in the oldest step, or stops; `is_known`: it is known to have begun it. Another follows."""
        begun = self.plans[0].step_id if is_known and self.plans else 0
        end = SessionEnd(begun, executor_stopped=told_to_stop)
        self.num_deaths += 1
        self.plans.clear()
        self.executor = CoreExecutor(self.lane.spec, VOCAB_SIZE, self.costs)
        self.take(self.core.executor_lost(0, self.now, end))
        self.core.check_integrity()
        self.take(self.core.session_opened(0))
        self.core.check_integrity()

    def fail_step(self) -> None:
        """The oldest step fails in an executor that lives on."""
        failed = self.plans[0].step_id
        self.num_deaths += 1
        self.executor.run_in_part(list(self.plans)[:1])
        self.executor.clear()
        self.plans.clear()
        self.take(self.core.executor_lost(0, self.now, SessionEnd(failed, failed)))
        self.core.check_integrity()
        self.take(self.core.session_opened(0, same_incarnation=True, keeps_kv=True))
        self.core.check_integrity()

    def is_fatal(self) -> bool:
        """Whether the oldest plan in flight computes a position of `poisons`."""
        step = self.lane.inflight[0]
        num_tokens = {chunk.sequence: chunk.num_tokens for chunk in step.chunks}
        most = step.plan.max_drafts
        return any(
            context_len
            <= self.poisons[sequence.group.spec.request_id]
            < context_len + num_tokens.get(sequence, 1 + min(most, sequence.max_drafts))
            for sequence, context_len in context_lens(self.lane, step).items()
            if sequence.group.spec.request_id in self.poisons
        )

    def take(self, outputs: StepOutputs) -> None:
        self.hypotheses += outputs.hypotheses
        for delta in deltas(outputs):
            request_id, place = delta.key[1], (delta.key[1], delta.sample_index)
            assert place not in self.ends, "outputs of a sample that has ended"
            self.samples[place] += delta.token_ids
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs.setdefault(request_id, []).append(delta.prompt_logprobs)
            if delta.finish is not None:
                self.ends[place] = delta.finish.detail
            if delta.sample_index == 0:
                self.tokens[request_id] += delta.token_ids
                if delta.finish is not None:
                    self.details[request_id] = delta.finish.detail

    def step(self, depth: int = 2) -> None:
        """Plan as far as may be, then let one step pass."""
        while len(self.plans) < depth and self.plan() is not None:
            pass
        if self.plans:
            self.apply()
        else:
            self.now += 1.0

    def run(self, depth: int = 2, *, fails: bool = False) -> None:
        """Run to the end. The steps of `poisons` kill the executor, or, with `fails`, fail."""
        while True:
            while len(self.plans) < depth and self.plan() is not None:
                pass
            if not self.plans:
                return
            if self.poisons and self.is_fatal():
                self.fail_step() if fails else self.die()
            else:
                self.apply()
