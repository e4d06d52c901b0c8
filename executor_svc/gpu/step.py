"""Steps on a GPU: each is enqueued at once; its sampled tokens stay on the device for the next step.

The host schedules with a mirror of the slots, which may be steps behind: a slot that has stopped in the meantime is
padding on the device, and reported as idle. Beam candidates are chosen on the host, with the CPU's code: a step with
candidates, forks or given tokens waits for all earlier steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from executor_svc.batch.mirror_slots import MirrorSlots, ReportedTokens
from executor_svc.batch.prompt_rows import prompt_rows
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.step_result import Computed, RowCandidates, SampledTokens, make_result
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.gpu.device_slots import DeviceSlots, PendingTokens
from executor_svc.gpu.kernels.slots.slots import StepInputs, StepSizes
from executor_svc.gpu.prompt_logprobs import GpuPromptLogprobs, PendingPrompts
from executor_svc.gpu.runner import GpuRunner
from executor_svc.gpu.sampling import GpuSampler, PendingLogprobs, SamplingMetadata
from executor_svc.gpu.sampling_state import SlotSamplingState
from executor_svc.gpu.staging import sent
from executor_svc.gpu.timing import StepClock
from executor_svc.models.loading import LoadedModel
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.plan import Limits, StepPlan, StepResult, StepTimings
from executor_svc.sampling.row_math import argmax
from executor_svc.sampling.sample_step import choose
from executor_svc.worker.block_moves import move_blocks
from executor_svc.worker.device_errors import is_device_lost, is_out_of_memory
from executor_svc.worker.profiling import Spans


@dataclass(frozen=True, slots=True)
class _Enqueued:
    """The pending results of a step."""

    tokens: PendingTokens
    logprobs: PendingLogprobs | None
    prompts: PendingPrompts | None
    candidates: RowCandidates | None


class GpuStep:
    """An enqueued step."""

    def __init__(
        self,
        owner: GpuStepExecutor,
        plan: StepPlan,
        scheduled: Scheduled,
        enqueued: _Enqueued | None,
        generations: IntArray,
        clock: StepClock,
        timings: StepTimings,
    ) -> None:
        self._owner = owner
        self._plan = plan
        self._scheduled = scheduled
        self._enqueued = enqueued
        self._generations = generations
        self._clock = clock
        self._timings = timings
        self._launched = time.monotonic_ns()
        self._result: StepResult | None = None

    def is_done(self) -> bool:
        """Return whether `result` would return at once."""
        return self._result is not None or self._enqueued is None or self._enqueued.tokens.is_done()

    def result(self) -> StepResult:
        """Wait for the step and all earlier ones. Raises any error of the device."""
        if self._result is None:
            self._owner.settle_until(self)
        assert self._result is not None
        return self._result

    def settle(self, slots: MirrorSlots) -> None:
        """Wait for the step, update the mirror, and build the result. All earlier steps must be settled."""
        none = self._scheduled.slots[:0]
        scheduled, computed = self._scheduled, Computed(SampledTokens(none, none, None), none)
        if self._enqueued is not None:
            scheduled, computed = self._settle(slots, self._enqueued)
        digest = slots.digest() if self._plan.debug_digest else b""
        total_ns = self._timings.total_ns + time.monotonic_ns() - self._launched
        timings = replace(self._timings, device_ns=computed.device_ns, sample_ns=computed.sample_ns, total_ns=total_ns)
        self._result = make_result(self._plan.step_id, scheduled, computed, timings, digest)

    def _settle(self, slots: MirrorSlots, enqueued: _Enqueued) -> tuple[Scheduled, Computed]:
        """Return the scheduled work without the slots that had stopped before, and its results."""
        committed = enqueued.tokens.wait()
        idle, scheduled = committed.idle, self._scheduled
        taken = ReportedTokens(committed.token_ids, np.where(idle, 0, committed.errors), idle)
        slots.settle(scheduled, self._generations, committed.positions, taken)
        logprobs = None if enqueued.logprobs is None else enqueued.logprobs.wait(~idle)
        prompts = () if enqueued.prompts is None else enqueued.prompts.wait()
        if idle.any():
            scheduled, committed = _without_idle(scheduled, idle), committed.of_rows(~idle)
        sampled = SampledTokens(committed.token_ids, committed.errors, logprobs, enqueued.candidates)
        device_ns, sample_ns = self._clock.between()
        return scheduled, Computed(sampled, committed.positions, prompts, device_ns, sample_ns)


class GpuStepExecutor:
    """Implements `worker.Executor` on a GPU."""

    adapters = None
    """Plans may name none yet."""

    def __init__(
        self, loaded: LoadedModel, device: Device, pools: KVCache, limits: Limits, *, enforce_eager: bool = False
    ) -> None:
        """Allocate the slots, record the model, and capture its graphs, unless enforce_eager is set."""
        torch_device = device.torch_device
        self.limits = limits
        self.slots = MirrorSlots(limits)
        self._pools = pools
        self._device = torch_device
        self._functions = device.functions
        self._span = Spans(torch_device.type == "cuda")
        self._device_slots = DeviceSlots(limits, torch_device, extra_words=SlotSamplingState.extra_words(limits))
        self._runner = GpuRunner(loaded, device, pools, limits, self._device_slots, captures=not enforce_eager)
        self._sampling = SlotSamplingState(limits, self._device_slots)
        self._sampler = GpuSampler(limits, self._sampling)
        self._prompts = GpuPromptLogprobs(
            self._runner.logits, self._sampler.workspace, self._device_slots.state.prompt_failed
        )
        self._pending: deque[GpuStep] = deque()
        self._metadata: SamplingMetadata | None = None
        pools.warm_up()
        self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        self._sampler.warm_up(self._device_slots.inputs(StepSizes.decode(1)))

    def clear(self) -> None:
        """Free all slots, after the enqueued steps; KV stays."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._pending.clear()
        self.slots.clear()
        self._sampling.clear()

    def is_out_of_memory(self, exc: Exception) -> bool:
        """As in `worker.Executor`."""
        return is_out_of_memory(exc)

    def is_lost(self, exc: Exception) -> bool:
        """As in `worker.Executor`."""
        return is_device_lost(exc)

    def start_trace(self) -> Callable[[], bytes]:
        """As in `worker.Executor`."""
        return self._span.record()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, received_ns: int) -> GpuStep:
        """Enqueue one step; received_ns is the plan's arrival on the monotonic clock.

        Raises InvalidPlan before anything is enqueued or moved, and any error of the device.
        """
        started = time.monotonic_ns()
        with self._span("plan"):
            plan = self.slots.apply(plan)
            if self._needs_settled_mirror(plan):
                self.settle_until(None)
            scheduled = self.slots.schedule(plan)
        moves_ns = move_blocks(self._pools, plan)
        self._sampling.apply(plan, self._device_slots.apply(plan))
        if plan.admitted:
            self._metadata = None
        clock = StepClock(self._device)
        enqueued = self._compute(scheduled, clock)
        generations = self.slots.advance(scheduled)
        timings = StepTimings(started - received_ns, 0, 0, time.monotonic_ns() - started, moves_ns)
        step = GpuStep(self, plan, scheduled, enqueued, generations, clock, timings)
        self._pending.append(step)
        return step

    def settle_until(self, last: GpuStep | None) -> None:
        """Settle the enqueued steps in order, up to `last`; None: all."""
        while self._pending:
            step = self._pending.popleft()
            step.settle(self.slots)
            if step is last:
                return

    def _needs_settled_mirror(self, plan: StepPlan) -> bool:
        """Return whether the plan needs a mirror with all tokens."""
        on_host = self.slots.admitted & (self._sampling.lists_on_host | (self.slots.sampling["num_candidates"] > 0))
        return bool(on_host.any()) or bool(len(plan.forks.slots) or len(plan.given.slots) or plan.debug_digest)

    def _metadata_of(self, slots: IntArray) -> SamplingMetadata:
        """Return the sampling metadata of these slots.

        Reuses the metadata of the last step for the same slots without admissions since.
        """
        if self._metadata is None or not np.array_equal(self._metadata.slots, slots):
            self._metadata = SamplingMetadata.of_slots(
                slots, self.slots.sampling, self._sampling.lists_on_host, self.limits.vocab_size
            )
        return self._metadata

    def _compute(self, scheduled: Scheduled, clock: StepClock) -> _Enqueued | None:
        """Enqueue the scheduled work; return None if there is none."""
        if not len(scheduled.slots):
            self._device_slots.flush()
            self._sampling.count_admitted()
            return None
        clock.mark()
        sizes = self._runner.sizes_of(scheduled)
        longest = int((self.slots.num_computed_tokens[scheduled.slots] + scheduled.num_tokens).max())
        with self._span("forward"):
            logits, best = self._runner.forward(scheduled, sizes, longest)
        self._sampling.count_admitted()
        clock.mark()
        with self._span("sample"):
            enqueued = self._sample(scheduled, sizes, logits, best)
        clock.mark()
        return enqueued

    def _sample(self, scheduled: Scheduled, sizes: StepSizes, logits: Tensor, best: Tensor) -> _Enqueued:
        """Enqueue sampling from a step's logits [L, vocab] and their most likely tokens [L]."""
        inputs, metadata = self._device_slots.inputs(sizes), self._metadata_of(scheduled.sampling_slots)
        wanted_prompts = prompt_rows(self.slots, scheduled)
        # Logits of prompts have their own memory; those of sampling rows stay.
        prompts = None if wanted_prompts is None else self._prompts.compute(wanted_prompts)
        self._sampler.choose(logits, best, inputs, metadata)
        on_host = metadata.host_rows
        candidates = self._choose_on_host(scheduled, on_host, inputs, logits) if len(on_host) else None
        logprobs = self._sampler.compute_logprobs(logits, inputs, metadata)
        pending = self._device_slots.commit(scheduled, sizes, *self._sampler.rows(inputs))
        if metadata.counted:
            self._sampling.count_taken(inputs)
        return _Enqueued(pending, logprobs, prompts, candidates)

    def _choose_on_host(
        self, scheduled: Scheduled, rows: IntArray, inputs: StepInputs, logits: Tensor
    ) -> RowCandidates | None:
        """Choose tokens of these rows with the CPU's code, and overwrite the device's.

        The mirror must have all tokens.
        """
        sources = np.arange(len(scheduled.sampling_slots)) if scheduled.sources is None else scheduled.sources
        needed, sources = np.unique(sources[rows], return_inverse=True)
        these = replace(
            scheduled,
            sampling_slots=scheduled.sampling_slots[rows],
            sources=sources,
            candidates=np.flatnonzero(np.isin(rows, scheduled.candidates)),
        )
        here = logits.index_select(0, sent(needed, self._device)).cpu()
        sampled = choose(here, argmax(here), self.slots, these, self._functions)
        places, (tokens, errors) = sent(rows, self._device), self._sampler.rows(inputs)
        tokens.index_copy_(0, places, sent(sampled.token_ids, self._device))
        errors.index_copy_(0, places, sent(sampled.errors.astype(np.int32), self._device))
        return sampled.candidates


def _without_idle(scheduled: Scheduled, idle: np.ndarray) -> Scheduled:
    """Return the scheduled work with some sampling slots made idle; idle: [R]. It has neither forks nor candidates."""
    slots = scheduled.sampling_slots
    return replace(
        scheduled, sampling_slots=slots[~idle], idle_slots=np.sort(np.concatenate((scheduled.idle_slots, slots[idle])))
    )
