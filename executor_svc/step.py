"""One step: a plan in, a result out. Everything here runs on the thread that owns the device."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
from torch import Tensor

from executor_svc.input_batch import ForwardBatch, build_batch, sampling_columns
from executor_svc.plan import IntArray, Limits, SlotError, SlotLogprobs, StepPlan, StepResult, StepStatus, StepTimings
from executor_svc.sampler import RowLogprobs, SampledTokens, sample
from executor_svc.slots import Scheduled, Slots


class Runner(Protocol):
    """What computes logits: `model_runner.ModelRunner`."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the batch's KV; returns [R, vocab] float32 logits of its logits rows."""
        ...


class BlockPools(Protocol):
    """What moves blocks: `kv_cache.KVCache`. Ids are lists or int64 tensors."""

    def copy(self, sources: list[int], destinations: list[int]) -> None: ...
    def swap_out(self, device_ids: list[int], host_ids: list[int]) -> None: ...
    def swap_in(self, host_ids: list[int], device_ids: list[int]) -> None: ...


class StepExecutor:
    """The slots, and what computes for them."""

    def __init__(self, runner: Runner, pools: BlockPools, limits: Limits) -> None:
        self.limits = limits
        self.slots = Slots(limits)
        self._runner = runner
        self._pools = pools

    def clear(self) -> None:
        """Free all slots; KV stays."""
        self.slots.clear()

    def execute(self, plan: StepPlan, received_ns: int) -> StepResult:
        """Run one step; received_ns is the plan's arrival on the monotonic clock.

        Raises InvalidPlan before anything is computed or moved, and whatever the device raises.
        """
        started = time.monotonic_ns()
        self.slots.apply(plan)
        scheduled = self.slots.schedule(plan)
        self._move_blocks(plan)
        batch = build_batch(self.slots, scheduled)
        forward_at = sample_at = sampled_at = time.monotonic_ns()
        sampled, positions = None, scheduled.slots[:0]
        if batch is not None:
            logits = self._runner.forward(batch)
            sample_at = sampled_at = time.monotonic_ns()
            if len(batch.logits_rows):
                columns = sampling_columns(self.slots, scheduled)
                positions = columns.position
                sampled = sample(logits.contiguous(), columns)
                sampled_at = time.monotonic_ns()
        if sampled is None:
            sampled = SampledTokens(positions, np.ones(0, np.bool_), None)
        self.slots.commit(scheduled, sampled.token_ids, sampled.finite)
        digest = self.slots.digest() if plan.debug_digest else b""
        ended = time.monotonic_ns()
        timings = StepTimings(started - received_ns, sample_at - forward_at, sampled_at - sample_at, ended - started)
        return _result(plan.step_id, scheduled, sampled, positions, timings, digest)

    def _move_blocks(self, plan: StepPlan) -> None:
        """Swap-out, copy, swap-in, in this order."""
        for moves, move in (
            (plan.swap_out, self._pools.swap_out),
            (plan.copies, self._pools.copy),
            (plan.swap_in, self._pools.swap_in),
        ):
            if len(moves.sources):
                move(moves.sources.tolist(), moves.destinations.tolist())


def _result(
    step_id: int,
    scheduled: Scheduled,
    sampled: SampledTokens,
    positions: IntArray,
    timings: StepTimings,
    digest: bytes,
) -> StepResult:
    rows = scheduled.slots[scheduled.samples]
    slots = np.concatenate((rows, scheduled.idle_slots))
    num_tokens = np.zeros(len(slots), np.int64)
    num_tokens[: len(rows)] = sampled.finite
    order = np.argsort(slots)
    failed = rows[~sampled.finite]
    return StepResult(
        step_id=step_id,
        status=StepStatus.OK,
        slots=slots[order],
        num_tokens=num_tokens[:0] if num_tokens.all() else num_tokens[order],
        token_ids=sampled.token_ids[sampled.finite],
        error_slots=failed,
        errors=(SlotError.NON_FINITE_LOGITS,) * len(failed),
        logprobs=_logprobs(sampled.logprobs, rows, positions) if sampled.logprobs is not None else (),
        timings=timings,
        debug_digest=digest,
    )


def _logprobs(
    logprobs: RowLogprobs,
    slots: IntArray,
    positions: IntArray,
) -> tuple[SlotLogprobs, ...]:
    """One entry for each slot that asked, in slot order."""
    return tuple(
        SlotLogprobs(
            slot=int(slots[row]),
            start=int(positions[row]),
            chosen_logprobs=logprobs.chosen[i : i + 1],
            chosen_ranks=logprobs.ranks[i : i + 1],
            num_top=int(logprobs.num_top[i]),
            top_token_ids=logprobs.top_ids[i, : logprobs.num_top[i]],
            top_logprobs=logprobs.top[i, : logprobs.num_top[i]],
        )
        for i, row in enumerate(logprobs.rows)
    )
