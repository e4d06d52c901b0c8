"""The service's simulated executor as the runner of a process, through the wire's conversions."""

from __future__ import annotations

from dataclasses import replace

from scheduler_svc.core.types import ExecutorSpec, SlotError, StepPlan, StepResult
from scheduler_svc.plan_loop.ports import ModelDescription
from tests.helpers.core_executor import CoreExecutor


class RealRunner:
    """A Runner. A plan that contradicts earlier plans raises InvalidPlan."""

    def __init__(self, model: ModelDescription) -> None:
        self._executor = CoreExecutor(
            ExecutorSpec(
                block_size=model.block_size,
                num_blocks=model.num_device_blocks,
                num_slots=model.num_slots,
                max_num_seqs=model.max_num_seqs,
                max_num_batched_tokens=model.max_num_batched_tokens,
                max_model_len=model.max_model_len,
                num_host_blocks=model.num_host_blocks,
            ),
            model.vocab_size,
        )

    def clear(self) -> None:
        """Free all slots."""
        self._executor.clear()

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
        if non_finite is None or result.num_tokens or result.candidates or non_finite >= len(result.slots):
            return result
        slot = result.slots[non_finite]
        counts, token_ids = [1] * len(result.slots), list(result.token_ids)
        counts[non_finite] = 0
        del token_ids[non_finite]
        logprobs = {each: value for each, value in result.logprobs.items() if each != slot}
        return replace(
            result,
            num_tokens=counts,
            token_ids=token_ids,
            logprobs=logprobs,
            error_slots=[*result.error_slots, slot],
            errors=[*result.errors, SlotError.NON_FINITE_LOGITS],
        )

    def spoil(self, plan: StepPlan) -> None:
        """Fail in the middle of a plan: some of it is done, and nobody learns what."""
        self._executor.run(plan)
