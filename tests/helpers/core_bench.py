"""A core and a simulated executor with the plans between them, moved on by hand."""

from __future__ import annotations

from collections import deque

from scheduler_svc.core.rules import Rules
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import (
    ExecutorSpec,
    FinishDetail,
    PromptLogprobs,
    RequestSpec,
    SampleDelta,
    Sampling,
    StepPlan,
    StepResult,
)
from tests.helpers.simulated_executor import SimulatedExecutor


class Bench:
    def __init__(self, rules: Rules | None = None, **changes: int | float) -> None:
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
        self.core = Scheduler(rules)
        self.core.add_executor(0, self.spec)
        self.executor = SimulatedExecutor(self.spec)
        self.plans: deque[StepPlan] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.details: dict[str, FinishDetail] = {}
        self.prompt_logprobs: dict[str, list[PromptLogprobs]] = {}
        self.order: list[str] = []
        """Who was admitted, one after the other."""
        self.now = 0.0
        """The virtual clock, in seconds; `run` lets every step take one."""

    def add(
        self,
        request_id: str,
        num_prompt: int,
        max_tokens: int | None = 5,
        *,
        priority: int = 0,
        tenant: str = "",
        expected: int | None = None,
        **sampling: object,
    ) -> RequestSpec:
        spec = RequestSpec(
            request_id=request_id,
            prompt_token_ids=tuple(range(1, num_prompt + 1)),
            sampling=Sampling(**sampling),  # type: ignore[arg-type]
            max_tokens=max_tokens,
            priority=priority,
            tenant=tenant,
            expected_output_tokens=expected,
        )
        self.core.add_request(spec, self.now)
        self.tokens[request_id] = []
        return spec

    def plan(self) -> StepPlan | None:
        plan = self.core.plan_step(0, self.now)
        self.take(self.core.take_news())
        self.core.check_integrity()
        if plan is not None:
            self.plans.append(plan)
            self.order += [sequence.group.spec.request_id for sequence in self.core.lanes[0].inflight[-1].joined]
        return plan

    def apply(self) -> StepResult:
        result = self.executor.run(self.plans.popleft())
        self.now += 1.0
        self.take(self.core.apply_result(0, result, self.now)[1])
        self.core.check_integrity()
        return result

    def take(self, deltas: list[SampleDelta]) -> None:
        for delta in deltas:
            assert delta.key[1] not in self.details, "news of a request that has ended"
            self.tokens[delta.key[1]] += delta.token_ids
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs.setdefault(delta.key[1], []).append(delta.prompt_logprobs)
            if delta.finish is not None:
                self.details[delta.key[1]] = delta.finish.detail

    def step(self, depth: int = 2) -> None:
        """Plan as far as may be, then let one step pass."""
        while len(self.plans) < depth and self.plan() is not None:
            pass
        if self.plans:
            self.apply()
        else:
            self.now += 1.0

    def run(self, depth: int = 2) -> None:
        while True:
            while len(self.plans) < depth and self.plan() is not None:
                pass
            if not self.plans:
                return
            self.apply()
