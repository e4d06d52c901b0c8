"""The simulated executor as the core's tests want it: the core's plans in, the core's results out, through the wire's
own conversions, so that what a plan says is said as in service."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cadenza.v1 import execution_pb2
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.plan import StepPlan as ExecutorPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.plan.result import StepResult as ExecutorResult
from cadenza_common.plan_wire.reading import plan_from_wire
from cadenza_common.plan_wire.results import result_from_wire, result_to_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.step_result import LATE, SampledTokens
from executor_svc.plan.limits import GroupShape, Limits
from executor_svc.simulated.adapters import SimulatedAdapters
from executor_svc.simulated.costs import StepCosts
from executor_svc.simulated.drafts import AcceptanceSource
from executor_svc.simulated.executor import SimulatedStepExecutor
from executor_svc.worker.adapters import LoadedAdapter
from scheduler_svc.core.types import ExecutorSpec


class LateSteps(SimulatedStepExecutor):
    """Of sequences with grammars about a third of the rows are late: which ones, the step and the slot say."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._with_grammar: set[int] = set()
        self._step_id = 0

    def execute(self, plan: ExecutorPlan, received_ns: int | None = None) -> ExecutorResult:
        self._step_id = plan.step_id
        self._with_grammar.difference_update(plan.released_slots)
        for sequence in plan.admitted:
            source = None if sequence.source is None else sequence.source.slot
            if sequence.grammar is not None or source in self._with_grammar:
                self._with_grammar.add(sequence.slot)
        return super().execute(plan, received_ns)

    def clear(self) -> None:
        super().clear()
        self._with_grammar.clear()

    def _choose(self, scheduled: Scheduled, hashes: Any) -> SampledTokens:
        sampled = super()._choose(scheduled, hashes)
        for row, slot in enumerate(scheduled.rows.slots.tolist()):
            if slot in self._with_grammar and self.is_late(slot):
                sampled.errors[row] = LATE
        return sampled

    def is_late(self, slot: int) -> bool:
        """Whether a row of this slot, which has a grammar, is late in this step."""
        return (self._step_id * 31 + slot * 17) % 97 < 32


COSTS = StepCosts(step_us=100, token_us=10, context_token_us=0.01, sample_us=2, moved_block_us=20)
ACCEPTANCE = 0.7
"""The share of drafts that are right, of an executor that has drafts."""
_EPOCH = 1
_GARBAGE = 0x5EED


class CoreExecutor:
    """An executor for one lane of the core. A plan that contradicts earlier plans raises InvalidPlan.

    Times in its results are modelled, and nothing waits for them: the same plans give the same results, so that a core
    that goes by measured rates can be run again.
    """

    def __init__(
        self, spec: ExecutorSpec, vocab_size: int, costs: StepCosts = COSTS, *, acceptance: float = ACCEPTANCE
    ) -> None:
        limits = Limits(
            num_slots=spec.num_slots,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_model_len=spec.max_model_len,
            vocab_size=vocab_size,
            max_logprobs=vocab_size,
            block_size=spec.block_size,
            num_device_blocks=spec.num_blocks,
            num_host_blocks=spec.num_host_blocks,
            max_inflight_plans=4,
            max_drafts=spec.max_drafts,
            max_loras=spec.max_loras,
            max_cpu_loras=spec.max_cpu_loras,
            has_grammars=bool(spec.grammar_engine),
            kv_groups=tuple(GroupShape(group.window or 0, group.pages_per_block) for group in spec.kv_groups),
            pages_per_state=spec.pages_per_state,
        )
        self.adapters = SimulatedAdapters(spec.max_cpu_loras)
        drafts = AcceptanceSource(vocab_size, acceptance, self.adapters.hash_of) if spec.max_drafts else None
        self.inner = LateSteps(limits, costs, wait=lambda moment_ns: None, drafts=drafts, adapters=self.adapters)

    def load(self, index: int, content_hash: bytes) -> None:
        """Load an adapter with this content; an executor that is full refuses it."""
        assert len(self.adapters.loaded) < self.inner.limits.max_cpu_loras, "more loads than places"
        self.adapters.add(LoadedAdapter(index, content_hash, 1, 1))

    @property
    def slots(self) -> list[int]:
        """The slots that are taken."""
        taken: list[int] = self.inner.slots.admitted.nonzero()[0].tolist()
        return taken

    def clear(self) -> None:
        """A new session: no slots; what is in the pools stays."""
        self.inner.clear()

    def run_in_part(self, plans: Iterable[StepPlan]) -> None:
        """Leave garbage wherever these plans write: nobody may read it before it is written again."""
        pools = self.inner.pools
        all_pools = pools.device, pools.host, pools.device_states, pools.host_states
        before = [pool.copy() for pool in all_pools]
        for plan in plans:
            self.run(plan)
        for pool, former in zip(all_pools, before, strict=True):
            pool[pool != former] = _GARBAGE

    def spoil(self, pages: list[int]) -> None:
        """Leave garbage in pages that nobody holds."""
        self.inner.pools.device[pages] = _GARBAGE
        self.inner.pools.device_states[pages] = _GARBAGE

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out a plan."""
        return result_from_wire(self.run_on_wire(plan_to_wire(plan, _EPOCH)))

    def run_on_wire(self, plan: execution_pb2.StepPlan) -> execution_pb2.StepResult:
        """Carry out a plan as it is sent; returns the result as it is sent."""
        return result_to_wire(self.inner.execute(plan_from_wire(plan), received_ns=0), _EPOCH, incarnation=1)
