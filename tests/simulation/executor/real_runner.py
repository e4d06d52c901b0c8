"""The service's simulated executor as the runner of a process, through the wire's conversions."""

from __future__ import annotations

from dataclasses import replace

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import SlotError, StepResult
from scheduler_svc.core.types import ExecutorSpec
from scheduler_svc.plan_loop.ports import ModelDescription
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.core.known import adapter_hash


class RealRunner:
    """A Runner. A plan that contradicts earlier plans raises InvalidPlan."""

    def __init__(self, model: ModelDescription, acceptance: float = 0.0) -> None:
        """acceptance: the share of drafts that are right."""
        self._executor = CoreExecutor(
            ExecutorSpec(
                block_size=model.block_size,
                num_blocks=model.num_device_blocks,
                num_slots=model.num_slots,
                max_num_seqs=model.max_num_seqs,
                max_num_batched_tokens=model.max_num_batched_tokens,
                max_model_len=model.max_model_len,
                num_host_blocks=model.num_host_blocks,
                max_drafts=model.max_drafts,
                max_loras=model.max_loras,
                max_cpu_loras=model.max_cpu_loras,
                kv_groups=model.kv_groups,
                pages_per_state=model.pages_per_state,
            ),
            model.vocab_size,
            acceptance=acceptance,
        )

    def clear(self) -> None:
        """Free all slots."""
        self._executor.clear()

    def load_adapter(self, index: int, content: int) -> None:
        """Later plans may name an adapter."""
        self._executor.load(index, adapter_hash(content))

    def unload_adapter(self, index: int) -> None:
        """No later plan names an adapter."""
        self._executor.adapters.unload(index)

    @property
    def num_slots_used(self) -> int:
        """Slots that hold a sequence."""
        return len(self._executor.slots)

    @property
    def computed_seeds(self) -> frozenset[int]:
        """Not known."""
        return frozenset()

    def run(self, plan: StepPlan, non_finite: int | None = None) -> StepResult:
        """Run one plan. The non_finite-th slot with a token gets an error in its place."""
        result = self._executor.run(plan)
        counts = list(result.num_tokens) or [1] * len(result.slots)
        if non_finite is None or 0 in counts or result.candidates or non_finite >= len(counts):
            return result
        slot, token_ids, accepted = result.slots[non_finite], list(result.token_ids), list(result.num_accepted)
        start = sum(counts[:non_finite])
        del token_ids[start : start + counts[non_finite]]
        counts[non_finite] = 0
        if accepted:
            accepted[non_finite] = 0
        logprobs = {each: value for each, value in result.logprobs.items() if each != slot}
        return replace(
            result,
            num_tokens=counts,
            token_ids=token_ids,
            num_accepted=accepted,
            logprobs=logprobs,
            error_slots=[*result.error_slots, slot],
            errors=[*result.errors, SlotError.NON_FINITE_LOGITS],
        )

    def spoil_pages(self, pages: list[int]) -> None:
        """Leave garbage in device pages."""
        if pages:
            self._executor.spoil(pages)

    def spoil(self, plan: StepPlan) -> None:
        """Fail in the middle of a plan: some of it is done, and nobody learns what."""
        self._executor.run(plan)
