"""One step: a plan in, a result out. Everything here runs on the thread that owns the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from executor_svc.batch.forward_batch import ForwardBatch, build_batch
from executor_svc.batch.prompt_rows import prompt_rows
from executor_svc.batch.slots import Scheduled, Slots
from executor_svc.batch.step_result import Computed, Finished, SampledTokens, make_result
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.plan import Limits, SlotError, SlotLogprobs, StepPlan, StepResult, StepTimings
from executor_svc.sampling.prompt_logprobs import prompt_logprobs
from executor_svc.sampling.sample_step import choose
from executor_svc.worker.step_work import BlockPools, is_device_lost, is_out_of_memory, move_blocks
from executor_svc.worker.trace import Spans


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


class StepExecutor:
    """The slots, and what computes for them."""

    def __init__(self, runner: Runner, pools: BlockPools, limits: Limits, on_gpu: bool = False) -> None:
        self.limits = limits
        self._span = Spans(on_gpu)
        self.slots = Slots(limits)
        self._runner = runner
        self._pools = pools

    def clear(self) -> None:
        """Free all slots; KV stays."""
        self.slots.clear()

    def is_out_of_memory(self, exc: Exception) -> bool:
        """Did a step fail for want of memory."""
        return is_out_of_memory(exc)

    def is_lost(self, exc: Exception) -> bool:
        """Is the device lost for this process, as after an illegal access on a GPU."""
        return is_device_lost(exc)

    def start_trace(self) -> Callable[[], bytes]:
        """Record a trace of the steps from here on; returns what ends it and gives it: Chrome's format, gzip."""
        return self._span.record()

    def launch(self, plan: StepPlan, received_ns: int) -> Finished:
        """As in `worker.Executor`: the step has run when this returns."""
        return Finished(self.execute(plan, received_ns))

    @torch.inference_mode()
    def execute(self, plan: StepPlan, received_ns: int) -> StepResult:
        """Run one step; received_ns is the plan's arrival on the monotonic clock.

        Raises InvalidPlan before anything is computed or moved, and whatever the device raises.
        """
        started = time.monotonic_ns()
        with self._span("plan"):
            self.slots.apply(plan)
            scheduled = self.slots.schedule(plan)
        with self._span("move blocks"):
            moves_ns = move_blocks(self._pools, plan)
        computed = self._compute(scheduled)
        sampled = computed.sampled
        with self._span("commit"):
            self.slots.commit(scheduled, sampled.token_ids, sampled.valid)
            digest = self.slots.digest() if plan.debug_digest else b""
        ended = time.monotonic_ns()
        timings = StepTimings(started - received_ns, computed.device_ns, computed.sample_ns, ended - started, moves_ns)
        return make_result(plan.step_id, scheduled, computed, timings, digest)

    def _compute(self, scheduled: Scheduled) -> Computed:
        """Run the model over what is scheduled, then tell prompt logprobs and sample."""
        with self._span("inputs"):
            batch = build_batch(self.slots, scheduled)
        none = scheduled.slots[:0]
        sampled, positions = SampledTokens(none, none, None), none
        if batch is None:
            return Computed(sampled, positions)
        began = time.monotonic_ns()
        with self._span("forward"):
            hidden = self._runner.forward(batch)
            logits = self._runner.logits(hidden, batch.logits_rows)
            best = self._runner.argmax(logits)
        forward_done = time.monotonic_ns()
        prompts = self._prompt_logprobs(scheduled, hidden)
        if len(batch.logits_rows):
            with self._span("sample"):
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
