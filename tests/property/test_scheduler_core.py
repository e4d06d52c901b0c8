"""The whole core under a hypothesis state machine, against a simulated executor whose KV cache is real bookkeeping."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from scheduler_svc.core.batching import BatchingPolicy, ContinuousBatching, StaticBatching
from scheduler_svc.core.policy import FairOrder, FcfsOrder, OrderPolicy, PriorityOrder, ShortestFirstOrder
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
)
from tests.helpers.simulated_executor import (
    VOCAB_SIZE,
    SimulatedExecutor,
    expected_prompt_logprobs,
    expected_tokens,
)

MAX_MODEL_LEN = 60


class CoreMachine(RuleBasedStateMachine):
    requests: Bundle[RequestSpec] = Bundle("requests")

    @initialize(
        block_size=st.sampled_from([1, 4, 8]),
        num_blocks=st.integers(2, 12),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 20),
        depth=st.integers(1, 3),
        spare=st.integers(0, 3),
        watermark=st.sampled_from([0.0, 0.1]),
        order=st.sampled_from([FcfsOrder, PriorityOrder, ShortestFirstOrder, FairOrder]),
        batching=st.one_of(
            st.builds(ContinuousBatching, st.sampled_from([0.0, 1.0]), st.integers(0, 5)),
            st.builds(StaticBatching, st.integers(1, 4), st.none() | st.floats(0, 9)),
        ),
        max_wait_s=st.none() | st.floats(0, 60),
        threshold=st.sampled_from([0, 0, 3]),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        extra_budget: int,
        depth: int,
        spare: int,
        watermark: float,
        order: type[OrderPolicy],
        batching: BatchingPolicy,
        max_wait_s: float | None,
        threshold: int,
    ) -> None:
        self.spec = ExecutorSpec(
            block_size=block_size,
            num_blocks=num_blocks,
            num_slots=max_num_seqs + spare,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_model_len=MAX_MODEL_LEN,
            watermark=watermark,
        )
        self.core = Scheduler(Rules(order(), batching, max_wait_s, threshold))
        self.core.add_executor(0, self.spec)
        self.executor = SimulatedExecutor(self.spec)
        self.depth = depth
        self.plans: deque[StepPlan] = deque()
        self.specs: dict[str, RequestSpec] = {}
        self.outputs: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[PromptLogprobs]] = {}
        self.finishes: dict[str, FinishDetail] = {}
        self.now = 0.0

    @rule(
        target=requests,
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30),
        max_tokens=st.none() | st.integers(1, 25),
        stop_ids=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=3),
        seed=st.integers(0, 2**64 - 1),
        priority=st.integers(-2, 2),
        tenant=st.sampled_from(["", "a", "b"]),
        expected=st.none() | st.integers(1, 30),
        num_prompt_logprobs=st.none() | st.integers(0, 3),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int | None,
        stop_ids: set[int],
        seed: int,
        priority: int,
        tenant: str,
        expected: int | None,
        num_prompt_logprobs: int | None,
    ) -> RequestSpec | None:
        spec = RequestSpec(
            request_id=f"r{len(self.specs)}",
            prompt_token_ids=tuple(prompt),
            sampling=Sampling(seed=seed, stop_token_ids=tuple(stop_ids), num_prompt_logprobs=num_prompt_logprobs),
            max_tokens=max_tokens,
            priority=priority,
            tenant=tenant,
            expected_output_tokens=expected,
        )
        fits = len(prompt) // self.spec.block_size + 1 <= self.spec.num_blocks
        if not fits:
            with pytest.raises(Exception, match="KV blocks"):
                self.core.add_request(spec, self.now)
            return spec
        self.core.add_request(spec, self.now)
        self.specs[spec.request_id] = spec
        self.outputs[spec.request_id] = []
        self.prompt_logprobs[spec.request_id] = []
        return spec

    @rule()
    @precondition(lambda self: len(self.plans) < self.depth)
    def plan(self) -> None:
        self.now += 1
        plan = self.core.plan_step(0, self.now)
        self.take(self.core.take_news())
        if plan is not None:
            self.plans.append(plan)

    @rule()
    @precondition(lambda self: self.plans)
    def apply(self) -> None:
        result = self.executor.run(self.plans.popleft())
        _, deltas = self.core.apply_result(0, result, self.now)
        self.take(deltas)

    @rule(steps=st.integers(1, 12))
    def run_full(self, steps: int) -> None:
        """Keep the pipeline as full as its depth allows."""
        for _ in range(steps):
            while len(self.plans) < self.depth:
                before = len(self.plans)
                self.plan()
                self.core.check_integrity()
                if len(self.plans) == before:
                    break
            if self.plans:
                self.apply()

    @rule(spec=consumes(requests))
    def abort(self, spec: RequestSpec) -> None:
        self.take(self.core.abort(spec.key, FinishDetail.ABORTED))

    @rule()
    def lose_executor(self) -> None:
        """The process dies with plans in flight, and a new one has empty memory."""
        self.executor = SimulatedExecutor(self.spec)
        self.plans.clear()
        self.take(self.core.executor_lost(0, self.now))

    def take(self, deltas: list[SampleDelta]) -> None:
        for delta in deltas:
            request_id = delta.key[1]
            assert request_id not in self.finishes, "news of a request that has ended"
            self.outputs[request_id] += delta.token_ids
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs[request_id].append(delta.prompt_logprobs)
            if delta.finish is not None:
                self.finishes[request_id] = delta.finish.detail

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity()

    def teardown(self) -> None:
        """Run dry: every request ends, its tokens are the ones it would get alone, and nothing is left held."""
        if not hasattr(self, "core"):
            return
        self.core.drain(True)
        for _ in range(2_000):
            self.run_full(1)
            if not self.plans and not self.core.groups:
                break
        self.run_full(1)  # what ended last is still to be released
        assert set(self.finishes) == set(self.specs)
        for request_id, spec in self.specs.items():
            self.check_output(spec, self.outputs[request_id], self.finishes[request_id])
            self.check_prompt_logprobs(spec, self.outputs[request_id])
        lane = self.core.lanes[0]
        assert lane.blocks.pool.num_free == self.spec.num_blocks
        assert not self.executor.slots
        assert lane.slots.num_free == self.spec.num_slots

    def check_output(self, spec: RequestSpec, output: list[int], detail: FinishDetail) -> None:
        prompt = spec.prompt_token_ids
        stop_ids = frozenset(spec.sampling.stop_token_ids)
        limit = min(spec.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(prompt))
        full = expected_tokens(prompt, spec.sampling.seed, limit, stop_ids)
        assert output == full[: len(output)]
        if detail is FinishDetail.KV_CAPACITY:
            assert len(prompt) + len(output) == self.spec.num_blocks * self.spec.block_size + 1
        elif detail not in (FinishDetail.ABORTED, FinishDetail.EXECUTOR_ERROR):
            assert output == full
            stopped = bool(full) and full[-1] in stop_ids
            by_length = (
                FinishDetail.MAX_TOKENS
                if spec.max_tokens is not None and len(prompt) + spec.max_tokens <= MAX_MODEL_LEN
                else FinishDetail.MAX_MODEL_LEN
            )
            assert detail is (FinishDetail.STOP_TOKEN if stopped else by_length)

    def check_prompt_logprobs(self, spec: RequestSpec, output: list[int]) -> None:
        """Each row once and in order; all of them if there is any output."""
        end, num_top = 1, spec.sampling.num_prompt_logprobs
        for part in self.prompt_logprobs[spec.request_id]:
            assert part.start == end
            assert num_top is not None
            end = part.end
            assert part == expected_prompt_logprobs(spec.prompt_token_ids[:end], num_top, part.start)
        if output and num_top is not None:
            assert end == len(spec.prompt_token_ids)


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
