"""One step: a plan in, a result out. Everything here runs on the thread that owns the device."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from executor_svc.choosing import choose
from executor_svc.input_batch import ForwardBatch, build_batch
from executor_svc.plan import IntArray, Limits, SlotError, SlotLogprobs, StepPlan, StepResult, StepTimings
from executor_svc.prompt_logprobs import prompt_logprobs
from executor_svc.prompt_rows import prompt_rows
from executor_svc.slots import Scheduled, Slots
from executor_svc.step_result import Computed, SampledTokens, make_result


class Runner(Protocol):
    """What computes: `model_runner.ModelRunner`."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the batch's KV; returns hidden states [T or more, hidden]."""
        ...

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """[R, vocab] float32 logits of rows [R] int64 of hidden states."""
        ...

    def argmax(self, logits: Tensor) -> IntArray:
        """[R] the most likely token of each row of what `logits` returned last, -1 where it can not be sampled."""
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

    def is_out_of_memory(self, exc: Exception) -> bool:
        """Did a step fail for want of memory. On the CPU torch raises a plain RuntimeError from its allocator."""
        return isinstance(exc, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(exc)

    def is_lost(self, exc: Exception) -> bool:
        """Is the device lost for this process, as after an illegal access on a GPU."""
        return isinstance(exc, torch.AcceleratorError)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, received_ns: int) -> StepResult:
        """Run one step; received_ns is the plan's arrival on the monotonic clock.

        Raises InvalidPlan before anything is computed or moved, and whatever the device raises.
        """
        started = time.monotonic_ns()
        self.slots.apply(plan)
        scheduled = self.slots.schedule(plan)
        moves_ns = self._move_blocks(plan)
        computed = self._compute(scheduled)
        sampled = computed.sampled
        self.slots.commit(scheduled, sampled.token_ids, sampled.valid)
        digest = self.slots.digest() if plan.debug_digest else b""
        ended = time.monotonic_ns()
        timings = StepTimings(started - received_ns, computed.device_ns, computed.sample_ns, ended - started, moves_ns)
        return make_result(plan.step_id, scheduled, computed, timings, digest)

    def _compute(self, scheduled: Scheduled) -> Computed:
        """Run the model over what is scheduled, then tell prompt logprobs and sample."""
        batch = build_batch(self.slots, scheduled)
        none = scheduled.slots[:0]
        sampled, positions = SampledTokens(none, none, None), none
        if batch is None:
            return Computed(sampled, positions)
        began = time.monotonic_ns()
        hidden = self._runner.forward(batch)
        logits = self._runner.logits(hidden, batch.logits_rows)
        best = self._runner.argmax(logits)
        forward_done = time.monotonic_ns()
        prompts = self._prompt_logprobs(scheduled, hidden)
        if len(batch.logits_rows):
            positions = self.slots.num_tokens[scheduled.sampling_slots]
            sampled = choose(logits.contiguous(), best, self.slots, scheduled)
            sampled = self._without_failed_prompts(scheduled, sampled)
        return Computed(sampled, positions, prompts, forward_done - began, time.monotonic_ns() - forward_done)

    def _prompt_logprobs(self, scheduled: Scheduled, hidden: Tensor) -> tuple[SlotLogprobs, ...]:
        asked = prompt_rows(self.slots, scheduled)
        if asked is None:
            return ()
        found, failed = prompt_logprobs(
            asked, self.limits.vocab_size, lambda rows: self._runner.logits(hidden, torch.from_numpy(rows))
        )
        self.slots.prompt_failed[failed] = True
        return found

    def _without_failed_prompts(self, scheduled: Scheduled, sampled: SampledTokens) -> SampledTokens:
        """Fail slots whose prompt logits were not finite: only now, as results have errors of sampling slots alone."""
        if not self.slots.prompt_failed.any():
            return sampled
        failed = self.slots.prompt_failed[scheduled.sampling_slots] & sampled.valid
        errors = np.where(failed, int(SlotError.NON_FINITE_LOGITS), sampled.errors)
        return replace(sampled, errors=errors)

    def _move_blocks(self, plan: StepPlan) -> int:
        """Swap-out, copy, swap-in, in this order; returns the nanoseconds that took, 0 if there was nothing to move."""
        taken_ns = 0
        for moves, move in (
            (plan.swap_out, self._pools.swap_out),
            (plan.copies, self._pools.copy),
            (plan.swap_in, self._pools.swap_in),
        ):
            if len(moves.sources):
                began = time.monotonic_ns()
                move(moves.sources.tolist(), moves.destinations.tolist())
                taken_ns += time.monotonic_ns() - began
        return taken_ns
