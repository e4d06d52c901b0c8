"""What follows a step's model: its masks, the sampled tokens and their logprobs, and the copies for the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.prompt_rows import PromptRows
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import RowCandidates
from executor_svc.device.interface import Device
from executor_svc.gpu.kernels.gpu_kernels import GpuKernels
from executor_svc.gpu.kernels.sampling.logprobs import row_logprobs
from executor_svc.gpu.kernels.slots.slots import StepInputs, StepSizes
from executor_svc.gpu.measuring import StepClock
from executor_svc.gpu.runner import GpuRunner
from executor_svc.gpu.sampling.logprobs_by_torch import row_logprobs_by_torch
from executor_svc.gpu.sampling.prompt_logprobs import GpuPromptLogprobs, PendingPrompts
from executor_svc.gpu.sampling.rounds import SamplingRounds
from executor_svc.gpu.sampling.sampler import GpuSampler, PendingLogprobs, SamplingMetadata
from executor_svc.gpu.sampling.state import SlotSamplingState
from executor_svc.gpu.slots.device_slots import DeviceSlots, PendingTokens
from executor_svc.gpu.slots.staging import sent
from executor_svc.gpu.step_ranks import GpuStepRanks
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.plan.limits import Limits
from executor_svc.sampling.row_math import argmax
from executor_svc.sampling.sample_step import choose
from executor_svc.structured.device_masks import DeviceMasks, StepMasks
from executor_svc.structured.slot_grammars import IsLate, SlotGrammars


@dataclass(frozen=True, slots=True)
class Forward:
    """The enqueued model of a step, from whose logits [L, vocab] it is to sample."""

    scheduled: Scheduled
    """Without drafts."""
    laid_out: Scheduled
    """With places for drafts."""
    sizes: StepSizes
    prompts: PromptRows | None
    logits: Tensor
    clock: StepClock
    is_late: IsLate | None
    """Says which rows are late, for a replay."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The pending results of a step."""

    tokens: PendingTokens
    logprobs: PendingLogprobs | None
    prompts: PendingPrompts | None
    candidates: RowCandidates | None
    masks: StepMasks | None


class StepSampling:
    """Samples from the logits of the step whose model was enqueued last."""

    def __init__(
        self,
        slots: Slots,
        device_slots: DeviceSlots,
        runner: GpuRunner,
        device: Device,
        limits: Limits,
        ranks: GpuStepRanks,
        grammars: SlotGrammars | None,
    ) -> None:
        """Allocate the state of all slots, and capture the graphs of `SamplingRounds`. slots: the host's mirror."""
        self._slots, self._device_slots, self._limits, self._ranks = slots, device_slots, limits, ranks
        self._device, self._functions = device.torch_device, device.functions
        assert isinstance(device.kernels, GpuKernels)
        ways = device.kernels.step_ways
        logprobs = row_logprobs_by_torch if ways.logprobs_by_torch else row_logprobs
        self.state = SlotSamplingState(limits, device_slots, draws_on_host=ways.draws_on_host)
        self.sampler = GpuSampler(limits, self.state, logprobs)
        self.masks = DeviceMasks(
            grammars, limits.num_slots, self.state.state.allowed_bits, device_slots.state.num_computed_tokens,
            partial(sent, device=self._device),
        )  # fmt: skip
        self._prompts = GpuPromptLogprobs(
            runner.logits, self.sampler.workspace, device_slots.state.prompt_failed, ranks, logprobs
        )
        self._rounds = SamplingRounds(runner, device_slots, self.state, self.sampler, ranks)
        self._metadata: SamplingMetadata | None = None
        self._on_host: BoolArray | None = None
        """None: an admission has changed it."""
        self._any_on_host = False

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile what the first steps need."""
        self.sampler.warm_up(self._device_slots.inputs(StepSizes.decode(1)))

    def clear(self) -> None:
        """Forget all sequences."""
        self.state.clear()
        self.masks.clear()
        self.forget()

    def forget(self) -> None:
        """Let what is kept of the slots' parameters be found anew: a plan has admitted some."""
        self._metadata = self._on_host = None

    def apply(self, plan: StepPlan) -> None:
        """Collect the changes of a plan, which the slots and the masks have followed."""
        self.state.apply(plan, self._device_slots.apply(plan), self.masks.has)
        if plan.admitted:
            self.forget()

    def chooses_on_host(self, slots: BoolArray) -> bool:
        """Return whether any of these slots [num_slots] is among those of `on_host`."""
        on_host = self.on_host
        return self._any_on_host and bool((slots & on_host).any())

    @property
    def on_host(self) -> BoolArray:
        """[num_slots]: whether the host chooses a slot's tokens or candidates, which needs all earlier tokens."""
        if self._on_host is None:
            self._on_host = self.state.lists_on_host | (self._slots.sampling["num_candidates"] > 0)
            self._any_on_host = bool(self._on_host.any())
        return self._on_host

    def waits_for_masks(self, slots: IntArray) -> bool:
        """Return whether sampling of these slots should wait until the step before is settled, and masks are made."""
        if not self.masks.in_use or not (self._ranks.samples and self.masks.has[slots].any()):
            return False
        return not self.on_host[slots].any()

    def metadata_of(self, slots: IntArray) -> SamplingMetadata:
        """Return the sampling metadata of these slots.

        Reuses the metadata of the last step for the same slots without admissions since.
        """
        last = self._metadata
        if last is None or not (last.slots is slots or np.array_equal(last.slots, slots)):
            found = SamplingMetadata.of_slots(
                slots, self._slots.sampling, self.state.lists_on_host, self._limits.vocab_size
            )
            masked = self.masks.has[slots] & ~self.state.lists_on_host[slots]
            self._metadata = last = replace(found, edited=found.edited or bool(masked.any()))
        return last

    @torch.inference_mode()
    def sample(self, forward: Forward) -> Enqueued:
        """Enqueue the sampling of a step whose model is enqueued last; all earlier ones are settled if it has masks."""
        masks = self.masks.send(forward.scheduled, forward.clock, forward.is_late) if self._ranks.samples else None
        enqueued = self._sample(forward, masks)
        forward.clock.mark()
        return enqueued

    def _sample(self, forward: Forward, masks: StepMasks | None) -> Enqueued:
        """Enqueue sampling from a step's logits, and what the host gets."""
        scheduled, sizes = forward.scheduled, forward.sizes
        inputs, metadata = self._device_slots.inputs(sizes), self.metadata_of(scheduled.sampling_slots)
        # Logits of prompts have their own memory; those of sampling rows stay.
        prompts = None if forward.prompts is None else self._prompts.compute(forward.prompts)
        samples, logprobs, on_host = self._ranks.samples, None, None
        if samples:
            logprobs = self.sampler.new_logprobs(inputs, metadata)
        if samples and (len(metadata.host_rows) or (masks is not None and masks.any_errors)):
            on_host = partial(self._choose_on_host, forward.laid_out, metadata.host_rows, inputs, forward.logits, masks)
        candidates = self._rounds.enqueue(sizes, metadata, logprobs, on_host)
        if masks is not None:
            self.masks.take_back(masks)
        pending = self._device_slots.fetch(scheduled, sizes)
        fetched = None if logprobs is None else self.sampler.fetch_logprobs(logprobs, metadata)
        return Enqueued(pending, fetched, prompts, candidates, masks)

    def _choose_on_host(
        self, scheduled: Scheduled, rows: IntArray, inputs: StepInputs, logits: Tensor, masks: StepMasks | None
    ) -> RowCandidates | None:
        """Choose tokens of these sampling slots with the CPU's code, and overwrite the device's: they have no drafts.

        The mirror must have all tokens. masks: of the step; rows that are late, or have failed, get their errors.
        """
        tokens, errors = self.sampler.rows(inputs)
        if masks is not None:
            self.masks.mark(masks, errors)
        if not len(rows):
            return None
        sources = np.arange(len(scheduled.sampling_slots)) if scheduled.sources is None else scheduled.sources
        needed, sources = np.unique(sources[rows], return_inverse=True)
        these = replace(
            scheduled,
            sampling_slots=scheduled.sampling_slots[rows],
            sources=sources,
            candidates=np.flatnonzero(np.isin(rows, scheduled.candidates)),
            num_drafts=None,
            drafted=None,
        )
        here = logits.index_select(0, sent(needed, self._device)).cpu()
        of_rows = None if masks is None else masks.of_host_rows(rows)
        sampled = choose(here, argmax(here), self._slots, these, self._functions, of_rows)
        places = sent(rows, self._device)
        tokens.index_copy_(0, places, sent(sampled.token_ids, self._device))
        errors.index_copy_(0, places, sent(sampled.errors.astype(np.int32), self._device))
        return sampled.candidates
