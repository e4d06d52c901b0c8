"""Runs one step: from a plan to its result. Everything here runs on the thread that owns the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import LogprobColumns, SlotError, StepResult, StepTimings
from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.batch.prompt_rows import prompt_rows
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slot_digest import digest_of
from executor_svc.batch.slots import Slots
from executor_svc.batch.state_steps import check_admitted_states, states_of_step
from executor_svc.batch.step_batches import StepBatches
from executor_svc.batch.step_result import Computed, Finished, SampledTokens, make_result
from executor_svc.device.interface import is_device_lost, is_out_of_memory
from executor_svc.device.state_layout import StateHeaders
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits
from executor_svc.sampling.functions import RowFunctions
from executor_svc.sampling.logprobs import prompt_logprobs
from executor_svc.sampling.masks import RowMasks
from executor_svc.sampling.sample_step import choose
from executor_svc.speculation.drafting import Drafting
from executor_svc.speculation.drafts import DraftSource
from executor_svc.speculation.verification import accept_drafts
from executor_svc.structured.slot_grammars import SlotGrammars
from executor_svc.worker.model_adapters import ModelAdapterLoader
from executor_svc.worker.profiling import Spans
from executor_svc.worker.step_ranks import Alone, StepRanks


class Runner(Protocol):
    """Runs a model's forward pass, as `cpu.runner.ModelRunner` does."""

    functions: RowFunctions
    """The device's functions for sampling."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Write the batch's KV and return hidden states [T or more, hidden]."""
        ...

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [R, vocab] float32 of rows [R] int64 of hidden states."""
        ...

    def argmax(self, logits: Tensor) -> IntArray:
        """Return the most likely token [R] of each row of the last logits, -1 for a row that cannot be sampled."""
        ...


class StepExecutor:
    """Executes plans on the slots, with a runner. Implements `worker.Executor`."""

    def __init__(
        self,
        runner: Runner,
        pools: BlockPools,
        limits: Limits,
        on_gpu: bool = False,
        drafts: DraftSource | None = None,
        adapters: ModelAdapterLoader | None = None,
        ranks: StepRanks | None = None,
        grammars: SlotGrammars | None = None,
    ) -> None:
        """drafts: makes drafts, as many as the plans allow; None: there are none. adapters: those that plans may name,
        in the places of the runner's model. ranks: what the ranks of a divided model do together. grammars: makes their
        masks, where this rank samples."""
        self.limits = limits
        self.adapters = adapters
        self.grammars = grammars
        self._span = Spans(on_gpu)
        self.slots = Slots(limits, compared=ranks is not None)
        self._batches = StepBatches(self.slots)
        self._drafting = Drafting(self.slots, drafts)
        self._runner = runner
        self._pools = pools
        self._headers = pools.state_headers
        self._ranks: StepRanks = ranks or Alone()

    def clear(self) -> None:
        """Free all slots; KV stays."""
        self.slots.clear()
        self._drafting.clear()
        if self.grammars is not None:
            self.grammars.clear()
        self._ranks.clear()

    def settle(self, num_steps: int) -> None:
        """As in `startup.member.Follower`: a step is done when `launch` returns."""

    def is_out_of_memory(self, exc: Exception) -> bool:
        """Return whether a step failed for lack of memory."""
        return is_out_of_memory(exc)

    def is_lost(self, exc: Exception) -> bool:
        """Return whether this process has lost the device, as after an illegal access on a GPU."""
        return is_device_lost(exc)

    def start_trace(self) -> Callable[[], bytes]:
        """Start to trace steps; return a function that stops and returns the trace: Chrome's format, gzip."""
        return self._span.record()

    def launch(self, plan: StepPlan, received_ns: int) -> Finished:
        """As in `worker.Executor`; the step is done when this returns."""
        return Finished(self.execute(plan, received_ns))

    @torch.inference_mode()
    def execute(self, plan: StepPlan, received_ns: int) -> StepResult:
        """Run one step; received_ns is the plan's arrival on the monotonic clock.

        Raises InvalidPlan before anything is computed, and before anything is moved but for states that do not stand
        where the plan says; and any error of the device.
        """
        try:
            return self._execute(plan, received_ns)
        except Exception as error:
            self._ranks.failed(error)
            raise

    def _execute(self, plan: StepPlan, received_ns: int) -> StepResult:
        started = time.monotonic_ns()
        with self._span("plan"):
            scheduled = self._ranks.agreed(plan, self.slots, lambda: self._apply(plan))
        with self._span("move blocks"):
            moves_ns = move_blocks(self._pools, plan)
            if self._headers is not None:
                check_admitted_states(self.slots, plan, self._headers)
        with self._span("draft"):
            # Only now: a draft model writes to blocks.
            self._drafting.follow(plan)
            if self.grammars is not None and plan.max_drafts:
                self.grammars.wait_for_drafts(self.slots, scheduled)
            scheduled = self._drafting.add(plan, scheduled)
        if self.grammars is not None:
            self.grammars.look_ahead(self.slots, scheduled)
        starts = self.slots.num_computed_tokens[scheduled.slots]
        computed = self._compute(scheduled)
        sampled = computed.sampled
        with self._span("commit"):
            late = None if self.grammars is None else sampled.late
            self.slots.commit(scheduled, sampled.token_ids, sampled.valid, late)
            if self._headers is not None:
                states = self.slots.states
                states.made(scheduled.slots, states.ends(starts, scheduled.num_tokens))
            if self.grammars is not None:
                self.grammars.committed(self.slots, scheduled, sampled)
            digest = digest_of(self.slots) if plan.debug_digest else b""
        with self._span("draft"):
            self._drafting.committed(scheduled, starts)
        ended = time.monotonic_ns()
        timings = StepTimings(started - received_ns, computed.device_ns, computed.sample_ns, ended - started, moves_ns)
        return make_result(plan.step_id, scheduled, computed, timings, digest)

    def _apply(self, plan: StepPlan) -> Scheduled:
        if self.adapters is not None:
            self.adapters.check(plan)
        self.slots.apply(plan)
        if self.grammars is not None:
            self.grammars.follow(plan, self.slots)
        return self.slots.schedule(plan)

    def _compute(self, scheduled: Scheduled) -> Computed:
        """Run the model over the scheduled tokens, then compute prompt logprobs and sample."""
        with self._span("inputs"):
            places = None if self.adapters is None else self.adapters.places_of(self.slots)
            states = None if self._headers is None else states_of_step(self.slots, scheduled, self._headers)
            batch = self._batches.build(scheduled, places, states)
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
        if len(scheduled.sampling_slots):
            masks = None
            if self.grammars is not None:
                masks = self.grammars.masks(scheduled, forward_done - began, self.grammars.recorded)
            with self._span("sample"):
                rows = scheduled.rows
                positions = self.slots.num_tokens[rows.slots] + (0 if rows.ahead is None else rows.ahead)
                sampled = self._ranks.sampled(lambda: self._sample(logits, best, scheduled, masks))
        sample_ns = time.monotonic_ns() - forward_done
        saved = None if states is None else states.saved
        return Computed(sampled, positions, prompts, forward_done - began, sample_ns, saved)

    def _sample(self, logits: Tensor, best: IntArray, scheduled: Scheduled, masks: RowMasks | None) -> SampledTokens:
        sampled = choose(logits, best, self.slots, scheduled, self._runner.functions, masks)
        sampled = self._without_failed_prompts(scheduled, sampled)
        return accept_drafts(self.slots, scheduled, sampled)

    def _prompt_logprobs(self, scheduled: Scheduled, hidden: Tensor) -> dict[int, LogprobColumns]:
        wanted = prompt_rows(self.slots, scheduled)
        if wanted is None:
            return {}
        found, failed = prompt_logprobs(
            wanted,
            self.limits.vocab_size,
            lambda rows: self._runner.logits(hidden, torch.from_numpy(rows)),
            self._runner.functions,
        )
        self.slots.prompt_failed[failed] = True
        return found

    def _without_failed_prompts(self, scheduled: Scheduled, sampled: SampledTokens) -> SampledTokens:
        """Fail slots whose prompt logits were not finite.

        Results have errors of sampling slots only, so not earlier.
        """
        if not self.slots.prompt_failed.any():
            return sampled
        failed = self.slots.prompt_failed[scheduled.rows.slots] & sampled.valid
        errors = np.where(failed, int(SlotError.NON_FINITE_LOGITS), sampled.errors)
        return replace(sampled, errors=errors)


class BlockPools(Protocol):
    """Moves blocks, as `device.kv_cache.KVCache` does. Ids are lists or int64 tensors."""

    @property
    def state_headers(self) -> StateHeaders | None:
        """Where the recurrent states in its pages stand; None without such."""
        ...

    def copy(self, sources: list[int], destinations: list[int]) -> None: ...
    def swap_out(self, device_ids: list[int], host_ids: list[int]) -> None: ...
    def swap_in(self, host_ids: list[int], device_ids: list[int]) -> None: ...


def move_blocks(pools: BlockPools, plan: StepPlan) -> int:
    """Swap out, copy, swap in, in this order; return the nanoseconds that this took, 0 without moves."""
    moves_ns = 0
    for moves, move in ((plan.swap_out, pools.swap_out), (plan.copies, pools.copy), (plan.swap_in, pools.swap_in)):
        if moves:
            began = time.monotonic_ns()
            move(list(moves.sources), list(moves.destinations))
            moves_ns += time.monotonic_ns() - began
    return moves_ns
