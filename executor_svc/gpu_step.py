"""Steps on a GPU: each is enqueued at once, and its sampled tokens feed the next without visiting the host.

The host schedules by a mirror of the slots, which may be steps behind: a slot that has stopped meanwhile is padding on
the device, and told to be idle. What samples by edited logits, candidates or logprobs is chosen on the host, by the
code of the CPU: such a step waits for those before it and is waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from executor_svc.choosing import choose
from executor_svc.device import Device
from executor_svc.gpu_runner import GpuRunner
from executor_svc.gpu_slots import DeviceSlots, PendingTokens
from executor_svc.kernels.gpu.sampling import sample
from executor_svc.kernels.gpu.sampling_state import (
    RECORD_WORDS,
    SamplingLists,
    SamplingState,
    SamplingWorkspace,
    pack_record,
)
from executor_svc.kv_cache import KVCache
from executor_svc.loader import LoadedModel
from executor_svc.mirror_slots import MirrorSlots, Taken
from executor_svc.plan import IntArray, Limits, SlotError, SlotLogprobs, StepPlan, StepResult, StepTimings
from executor_svc.prompt_logprobs import prompt_logprobs
from executor_svc.prompt_rows import PromptRows, prompt_rows
from executor_svc.row_math import argmax
from executor_svc.slots import Scheduled
from executor_svc.step_result import Computed, SampledTokens, make_result
from executor_svc.step_work import is_device_lost, is_out_of_memory, move_blocks
from executor_svc.trace import Spans


@dataclass(frozen=True, slots=True)
class _OnHost:
    """What was chosen on the host, with all that the device does not tell."""

    sampled: SampledTokens
    prompts: tuple[SlotLogprobs, ...]


class GpuStep:
    """A step that has been enqueued."""

    def __init__(
        self,
        owner: GpuStepExecutor,
        plan: StepPlan,
        scheduled: Scheduled,
        tokens: PendingTokens | None,
        on_host: _OnHost,
        owners: IntArray,
        timings: StepTimings,
    ) -> None:
        self._owner = owner
        self._plan = plan
        self._scheduled = scheduled
        self._tokens = tokens
        self._on_host = on_host
        self._owners = owners
        self._timings = timings
        self._launched = time.monotonic_ns()
        self._result: StepResult | None = None

    def is_done(self) -> bool:
        """Would `result` return at once."""
        return self._result is not None or self._tokens is None or self._tokens.is_done()

    def result(self) -> StepResult:
        """Wait for the step, after those before it. Raises what the device raises."""
        if self._result is None:
            self._owner.settle_until(self)
        assert self._result is not None
        return self._result

    def settle(self, slots: MirrorSlots) -> None:
        """Wait, bring the mirror up to date, and make the result; all steps before this one are settled."""
        scheduled, sampled = self._scheduled, self._on_host.sampled
        positions = scheduled.sampling_slots[:0]
        if self._tokens is not None:
            told = self._tokens.wait()
            positions = told.positions
            taken = Taken(told.token_ids, np.where(told.idle, 0, told.errors), told.idle)
            slots.settle(scheduled, self._owners, positions, taken)
            if told.idle.any():
                scheduled, kept = _without_idle(scheduled, told.idle), ~told.idle
                sampled = SampledTokens(told.token_ids[kept], told.errors[kept], None)
                positions = positions[kept]
            else:
                # Logprobs and candidates are the host's own; tokens and errors are as the device has taken them.
                sampled = replace(sampled, token_ids=told.token_ids, errors=told.errors)
        digest = slots.digest() if self._plan.debug_digest else b""
        ended = time.monotonic_ns()
        timings = replace(
            self._timings, device_ns=ended - self._launched, total_ns=self._timings.total_ns + ended - self._launched
        )
        computed = Computed(sampled, positions, self._on_host.prompts, timings.device_ns, timings.sample_ns)
        self._result = make_result(self._plan.step_id, scheduled, computed, timings, digest)


class GpuStepExecutor:
    """Implements `worker.Executor` on a GPU."""

    def __init__(self, loaded: LoadedModel, device: Device, pools: KVCache, limits: Limits) -> None:
        """Make the slots, record the model, and capture its graphs."""
        torch_device, n, vocab = device.torch_device, limits.num_slots, limits.vocab_size
        self.limits = limits
        self.slots = MirrorSlots(limits)
        self._pools = pools
        self._device = torch_device
        self._span = Spans(torch_device.type == "cuda")
        self._device_slots = DeviceSlots(limits, torch_device, extra_words=n * RECORD_WORDS)
        self._records = self._device_slots.extra[: n * RECORD_WORDS].view(n, RECORD_WORDS)
        self._runner = GpuRunner(loaded, device, pools, limits, self._device_slots)
        self._sampling = self._sampling_state()
        self._workspace = SamplingWorkspace.empty(limits.max_num_seqs, vocab, torch_device, edits=False)
        self._tokens = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=torch_device)
        self._errors = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=torch_device)
        self._pending: deque[GpuStep] = deque()
        pools.warm_up()
        self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Compile what draws: no step waits for that."""
        logits = torch.zeros(1, self.limits.vocab_size, device=self._device)
        nobody = torch.full((1,), -1, dtype=torch.int32, device=self._device)
        for drawn, filtered in ((False, False), (True, False), (True, True)):
            sample(
                logits, nobody, torch.zeros_like(nobody), self._sampling, self._workspace, self._tokens[:1],
                self._errors[:1], edited=False, drawn=drawn, filtered=filtered,
            )  # fmt: skip

    def _sampling_state(self) -> SamplingState:
        """Return what draws read: rows with lists or penalties are the host's."""
        state, nothing = self._device_slots.state, torch.zeros(0, dtype=torch.int32, device=self._device)
        return SamplingState(
            self._records, state.token_ids, state.num_tokens, state.num_prompt_tokens, nothing, nothing,
            SamplingLists.empty(0, self._device),
        )  # fmt: skip

    def clear(self) -> None:
        """Free all slots, after what is enqueued; KV stays."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._pending.clear()
        self.slots.clear()

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

        Raises InvalidPlan before anything is enqueued or moved, and whatever the device raises.
        """
        started = time.monotonic_ns()
        with self._span("plan"):
            self.slots.apply(plan)
            if self._wants_host(plan):
                self.settle_until(None)
            scheduled = self.slots.schedule(plan)
        moves_ns = move_blocks(self._pools, plan)
        self._apply(plan)
        tokens, on_host = self._compute(scheduled)
        owners = self.slots.advance(scheduled)
        timings = StepTimings(started - received_ns, 0, 0, time.monotonic_ns() - started, moves_ns)
        step = GpuStep(self, plan, scheduled, tokens, on_host, owners, timings)
        self._pending.append(step)
        return step

    def settle_until(self, last: GpuStep | None) -> None:
        """Settle the enqueued steps in their order up to this one, or all of them."""
        while self._pending:
            step = self._pending.popleft()
            step.settle(self.slots)
            if step is last:
                return

    def _wants_host(self, plan: StepPlan) -> bool:
        """Does the plan need a mirror that knows all tokens."""
        sampling, there = self.slots.sampling, self.slots.admitted
        chosen_there = (there & ~(sampling.on_device & (sampling.num_prompt_logprobs < 0))).any()
        return bool(chosen_there or len(plan.forks.slots) or len(plan.given.slots) or plan.debug_digest)

    def _apply(self, plan: StepPlan) -> None:
        self._device_slots.apply(plan)
        for sequence in plan.admitted:
            record = pack_record(sequence.sampling).view(np.int32)
            self._device_slots.write(self._records[sequence.slot], record)

    def _compute(self, scheduled: Scheduled) -> tuple[PendingTokens | None, _OnHost]:
        """Enqueue what is scheduled; returns the tokens to come, or None if nothing is computed."""
        none = scheduled.slots[:0]
        on_host = _OnHost(SampledTokens(none, none, None), ())
        if not len(scheduled.slots):
            self._device_slots.flush()
            return None, on_host
        sizes = self._runner.sizes_of(scheduled)
        longest = int((self.slots.num_computed_tokens[scheduled.slots] + scheduled.num_tokens).max())
        with self._span("forward"):
            logits = self._runner.forward(scheduled, sizes, longest)
        inputs = self._device_slots.inputs(sizes)
        tokens, errors = self._tokens[: sizes.num_rows], self._errors[: sizes.num_rows]
        with self._span("sample"):
            asked = prompt_rows(self.slots, scheduled)
            rows, sampling = scheduled.sampling_slots, self.slots.sampling
            if asked is not None or not sampling.on_device[rows].all():
                on_host = self._choose_on_host(scheduled, asked, logits, tokens, errors)
            elif len(rows):
                drawn = sampling.temperature[rows] > 0
                filtered = drawn & ((sampling.top_k[rows] > 0) | (sampling.top_p[rows] < 1))
                sample(
                    logits, inputs.rows, inputs.sources, self._sampling, self._workspace, tokens, errors,
                    edited=False, drawn=bool(drawn.any()), filtered=bool(filtered.any()),
                )  # fmt: skip
        return self._device_slots.commit(scheduled, sizes, tokens, errors), on_host

    def _choose_on_host(
        self, scheduled: Scheduled, asked: PromptRows | None, logits: Tensor, tokens: Tensor, errors: Tensor
    ) -> _OnHost:
        """Choose as the CPU does, into tokens and errors [R]; the mirror knows all tokens."""
        num_rows = len(scheduled.sampling_slots)
        prompts: tuple[SlotLogprobs, ...] = ()
        if asked is not None:
            # The logits of sampled rows lie elsewhere and stay.
            prompts, failed = prompt_logprobs(
                asked, self.limits.vocab_size, lambda rows: self._runner.logits(torch.from_numpy(rows)).cpu()
            )
            self.slots.prompt_failed[failed] = True
        here = logits[: int(scheduled.samples.sum())].cpu()
        sampled = choose(here, argmax(here), self.slots, scheduled)
        lost = self.slots.prompt_failed[scheduled.sampling_slots] & sampled.valid
        sampled = replace(sampled, errors=np.where(lost, int(SlotError.NON_FINITE_LOGITS), sampled.errors))
        tokens[:num_rows].copy_(torch.from_numpy(np.ascontiguousarray(sampled.token_ids)))
        errors[:num_rows].copy_(torch.from_numpy(sampled.errors.astype(np.int32)))
        return _OnHost(sampled, prompts)


def _without_idle(scheduled: Scheduled, idle: np.ndarray) -> Scheduled:
    """The same where these of the sampling slots [R] are idle ones; such steps have neither forks nor candidates."""
    slots = scheduled.sampling_slots
    return replace(
        scheduled, sampling_slots=slots[~idle], idle_slots=np.sort(np.concatenate((scheduled.idle_slots, slots[idle])))
    )
