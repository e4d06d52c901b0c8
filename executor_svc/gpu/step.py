"""Steps on a GPU: each is enqueued at once; its sampled tokens stay on the device for the next step.

The host schedules with a mirror of the slots, which may be steps behind: a slot that has stopped in the meantime is
padding on the device, and reported as idle. Beam candidates are chosen on the host, with the CPU's code: a step with
candidates, forks or given tokens waits for all earlier steps, and so does one with drafts from a source on the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from executor_svc.batch.mirror_slots import MirrorSlots, ReportedTokens
from executor_svc.batch.prompt_rows import PromptRows, prompt_rows
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.step_result import Computed, RowCandidates, SampledTokens, make_result
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.gpu.device_slots import DeviceSlots, PendingTokens
from executor_svc.gpu.drafts.drafting import GpuDrafting, Layout, ngrams_of
from executor_svc.gpu.drafts.model import GpuDraftModel
from executor_svc.gpu.drafts.passes import DraftPasses
from executor_svc.gpu.kernels.slots.slots import StepInputs, StepSizes
from executor_svc.gpu.prompt_logprobs import GpuPromptLogprobs, PendingPrompts
from executor_svc.gpu.rounds import SamplingRounds
from executor_svc.gpu.runner import GpuRunner
from executor_svc.gpu.sampling import GpuSampler, PendingLogprobs, SamplingMetadata
from executor_svc.gpu.sampling_state import SlotSamplingState
from executor_svc.gpu.slot_adapters import SlotAdapters
from executor_svc.gpu.staging import sent
from executor_svc.gpu.step_ranks import GpuStepRanks
from executor_svc.gpu.timing import StepClock
from executor_svc.models.decoder import Decoder
from executor_svc.models.loading import LoadedModel
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.plan import Limits, StepPlan, StepResult, StepTimings
from executor_svc.sampling.row_math import argmax
from executor_svc.sampling.sample_step import choose
from executor_svc.speculation.drafts import DraftSource
from executor_svc.structured.device_masks import DeviceMasks, StepMasks
from executor_svc.structured.slot_grammars import SlotGrammars
from executor_svc.worker.block_moves import move_blocks
from executor_svc.worker.model_adapters import ModelAdapterLoader
from executor_svc.worker.profiling import Spans


@dataclass(frozen=True, slots=True)
class _Enqueued:
    """The pending results of a step."""

    tokens: PendingTokens
    logprobs: PendingLogprobs | None
    prompts: PendingPrompts | None
    candidates: RowCandidates | None
    masks: StepMasks | None


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
        most_drafts: int,
    ) -> None:
        """scheduled: without drafts, of which a slot has most_drafts at most."""
        self.most_drafts = most_drafts
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
        """Return the work with the drafts that were made, without slots that had stopped before, and its results."""
        committed = enqueued.tokens.wait()
        if enqueued.masks is not None:
            committed = replace(committed, errors=enqueued.masks.errors(committed.errors, committed.owners))
        idle, scheduled = committed.idle, committed.with_drafts(self._scheduled)
        errors = np.where(idle, 0, committed.errors)
        taken = ReportedTokens(committed.token_ids, errors, idle, committed.positions)
        slots.settle(scheduled, self._generations, taken)
        logprobs = None if enqueued.logprobs is None else enqueued.logprobs.wait(committed)
        prompts = () if enqueued.prompts is None else enqueued.prompts.wait()
        if idle.any():
            working = self._scheduled.with_idle(idle[committed.ahead == 0])
            committed = committed.of_rows(~idle)
            scheduled = committed.with_drafts(working)
        sampled = SampledTokens(committed.token_ids, committed.errors, logprobs, enqueued.candidates)
        self._owner.masks.committed(slots, scheduled, sampled)
        device_ns, sample_ns = self._clock.between()
        return scheduled, Computed(sampled, committed.positions, prompts, device_ns, sample_ns)


class GpuStepExecutor:
    """Implements `worker.Executor` on a GPU."""

    def __init__(
        self,
        loaded: LoadedModel,
        device: Device,
        pools: KVCache,
        limits: Limits,
        *,
        enforce_eager: bool = False,
        drafts: DraftSource | None = None,
        draft_model: Decoder | None = None,
        adapters: ModelAdapterLoader | None = None,
        grammars: SlotGrammars | None = None,
    ) -> None:
        """Allocate the slots, record the model, and capture its graphs, unless enforce_eager is set.

        drafts: makes drafts, as in `GpuDrafting`. draft_model: makes them instead; its layers are in `pools`. adapters:
        those that plans may name, in the places of the model. grammars: makes their masks; those slots have no drafts.
        """
        torch_device = device.torch_device
        self.ranks = GpuStepRanks(loaded.ranks)
        self.limits = limits
        self.adapters = adapters
        self._has_places = loaded.adapters is not None
        self.slots = MirrorSlots(limits)
        self._pools = pools
        self._device = torch_device
        self._functions = device.functions
        self._span = Spans(torch_device.type == "cuda")
        self._device_slots = DeviceSlots(
            limits, torch_device, extra_words=SlotSamplingState.extra_words(limits), ngrams=ngrams_of(drafts)
        )
        self._slot_adapters = SlotAdapters(adapters, self._device_slots)
        draft = None
        if draft_model is not None:
            draft = GpuDraftModel(draft_model, device, pools, limits, self._device_slots)
        self._runner = GpuRunner(
            loaded, device, pools, limits, self._device_slots, not enforce_eager, None if draft is None else draft.run
        )
        self._sampling = SlotSamplingState(limits, self._device_slots)
        self._sampler = GpuSampler(limits, self._sampling)
        self.grammars = grammars
        self.masks = DeviceMasks(
            grammars, limits.num_slots, self._sampling.state.allowed_bits, self._device_slots.state.num_computed_tokens,
            partial(sent, device=torch_device),
        )  # fmt: skip
        self._prompts = GpuPromptLogprobs(
            self._runner.logits, self._sampler.workspace, self._device_slots.state.prompt_failed, self.ranks
        )
        self._drafting = GpuDrafting(
            self.slots,
            self._device_slots,
            drafts,
            self._runner.sizes_of,
            self._runner.drafted,
            passes=draft is not None,
        )
        self._passes = None
        if draft is not None:
            self._passes = DraftPasses(draft, self._runner, self._device_slots, self._sampler)
        self._rounds = SamplingRounds(self._runner, self._device_slots, self._sampling, self._sampler, self.ranks)
        self._pending: deque[GpuStep] = deque()
        self._metadata: SamplingMetadata | None = None
        pools.warm_up()
        self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        self._sampler.warm_up(self._device_slots.inputs(StepSizes.decode(1)))

    def adapted(self) -> AbstractContextManager[None] | None:
        """Return a context in which all slots have the adapter of an empty place, for warm-up; None: it has none."""
        return self._slot_adapters.everywhere() if self._has_places else None

    def clear(self) -> None:
        """Free all slots, after the enqueued steps; KV stays."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._pending.clear()
        self.slots.clear()
        self._sampling.clear()
        self.masks.clear()
        self._drafting.clear()
        self.ranks.clear()

    def is_out_of_memory(self, exc: Exception) -> bool:
        """As in `worker.Executor`."""
        return self.ranks.is_out_of_memory(exc)

    def is_lost(self, exc: Exception) -> bool:
        """As in `worker.Executor`."""
        return self.ranks.is_lost(exc)

    def start_trace(self) -> Callable[[], bytes]:
        """As in `worker.Executor`."""
        return self._span.record()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, received_ns: int) -> GpuStep:
        """Enqueue one step; received_ns is the plan's arrival on the monotonic clock.

        Raises InvalidPlan before anything is enqueued or moved, and any error of the device.
        """
        try:
            started = time.monotonic_ns()
            with self._span("plan"):
                plan, scheduled = self._agreed(plan)
            with self.ranks.together():
                return self._enqueue(plan, scheduled, started, received_ns)
        except Exception as error:
            self.ranks.failed(error)
            raise

    def _agreed(self, plan: StepPlan) -> tuple[StepPlan, Scheduled]:
        """Apply the plan to the mirror, on all ranks; return it with complete admissions, and its work."""
        applied = plan

        def apply() -> Scheduled:
            nonlocal applied
            if self.adapters is not None:
                self.adapters.check(plan)
            applied = self.slots.apply(plan)
            if self._needs_settled_mirror(applied):
                self.settle_until(None)
            self.masks.follow(plan, self.slots, self.limits.vocab_size)
            return self.slots.schedule(applied)

        scheduled = self.ranks.agreed(plan, self.slots, apply)
        return applied, scheduled

    def _enqueue(self, plan: StepPlan, scheduled: Scheduled, started: int, received_ns: int) -> GpuStep:
        moves_ns = move_blocks(self._pools, plan)
        self._sampling.apply(plan, self._device_slots.apply(plan), self.masks.has)
        self._drafting.follow(plan)
        if plan.admitted:
            self._metadata = None
        clock = StepClock(self._device)
        enqueued, most_drafts = self._compute(plan, scheduled, clock)
        generations = self.slots.advance(scheduled)
        timings = StepTimings(started - received_ns, 0, 0, time.monotonic_ns() - started, moves_ns)
        step = GpuStep(self, plan, scheduled, enqueued, generations, clock, timings, most_drafts)
        self._pending.append(step)
        return step

    def settle_until(self, last: GpuStep | None) -> None:
        """Settle the enqueued steps in order, up to `last`; None: all."""
        while self._pending:
            step = self._pending.popleft()
            step.settle(self.slots)
            self.ranks.count_settled()
            if step is last:
                return

    def settle(self, num_steps: int) -> None:
        """As in `startup.member.Follower`."""
        while self._pending and self.ranks.num_settled < num_steps:
            self.settle_until(self._pending[0])

    def _needs_settled_mirror(self, plan: StepPlan) -> bool:
        """Return whether the plan needs a mirror with all tokens."""
        on_host = self.slots.admitted & (self._sampling.lists_on_host | (self.slots.sampling["num_candidates"] > 0))
        if self._drafting.reads_tokens(plan) or bool(on_host.any()):
            return True
        return bool(self.masks.has.any() or len(plan.forks.slots) or len(plan.given.slots) or plan.debug_digest)

    def _metadata_of(self, slots: IntArray) -> SamplingMetadata:
        """Return the sampling metadata of these slots.

        Reuses the metadata of the last step for the same slots without admissions since.
        """
        if self._metadata is None or not np.array_equal(self._metadata.slots, slots):
            found = SamplingMetadata.of_slots(
                slots, self.slots.sampling, self._sampling.lists_on_host, self.limits.vocab_size
            )
            self._metadata = replace(found, edited=found.edited or bool(self.masks.has[slots].any()))
        return self._metadata

    def _compute(self, plan: StepPlan, scheduled: Scheduled, clock: StepClock) -> tuple[_Enqueued | None, int]:
        """Enqueue the scheduled work; return its pending results, None without work, and the most drafts of a slot."""
        if not len(scheduled.slots):
            self._device_slots.flush()
            self._sampling.count_admitted()
            return None, 0
        clock.mark()
        self._runner.use_adapters(self._slot_adapters.choose(self.slots, scheduled))
        # Rows of prompts are found by their place in the step, which drafts before them would change.
        prompts = prompt_rows(self.slots, scheduled)
        on_host = self._sampling.lists_on_host | (self.slots.sampling["num_candidates"] > 0)
        layout = self._drafting.lay_out(plan, scheduled, on_host | self.masks.has, none=prompts is not None)
        longest, make_drafts = self._longest(layout.scheduled), None
        if self._passes is not None:
            metadata = self._metadata_of(scheduled.sampling_slots)
            make_drafts = partial(self._passes.precede, layout, metadata, longest)
        with self._span("forward"):
            logits, _ = self._runner.forward(layout.scheduled, layout.sizes, longest, layout.most_drafts, make_drafts)
        self._sampling.count_admitted()
        clock.mark()
        masks = self.masks.send(scheduled, clock) if self.ranks.samples else None
        with self._span("sample"):
            enqueued = self._sample(scheduled, layout, prompts, logits, masks)
        clock.mark()
        return enqueued, layout.sizes.num_drafts

    def _longest(self, scheduled: Scheduled) -> int:
        """Return an upper bound of a sequence's tokens after a step: drafts of steps in flight may each give one."""
        ends = self.slots.num_computed_tokens[scheduled.slots] + scheduled.num_tokens
        in_flight = sum(step.most_drafts for step in self._pending)
        return min(int(ends.max()) + in_flight, self.limits.max_model_len)

    def _sample(
        self,
        scheduled: Scheduled,
        layout: Layout,
        wanted_prompts: PromptRows | None,
        logits: Tensor,
        masks: StepMasks | None,
    ) -> _Enqueued:
        """Enqueue sampling from a step's logits [L, vocab], and what the host gets."""
        sizes = layout.sizes
        inputs, metadata = self._device_slots.inputs(sizes), self._metadata_of(scheduled.sampling_slots)
        # Logits of prompts have their own memory; those of sampling rows stay.
        prompts = None if wanted_prompts is None else self._prompts.compute(wanted_prompts)
        samples, logprobs, on_host = self.ranks.samples, None, None
        if samples:
            logprobs = self._sampler.new_logprobs(inputs, metadata)
        if samples and (len(metadata.host_rows) or masks is not None):
            on_host = partial(self._choose_on_host, layout.scheduled, metadata.host_rows, inputs, logits, masks)
        candidates = self._rounds.enqueue(sizes, metadata, logprobs, on_host)
        if masks is not None:
            self.masks.take_back(masks)
        pending = self._device_slots.fetch(scheduled, sizes)
        fetched = None if logprobs is None else self._sampler.fetch_logprobs(logprobs, metadata)
        return _Enqueued(pending, fetched, prompts, candidates, masks)

    def _choose_on_host(
        self, scheduled: Scheduled, rows: IntArray, inputs: StepInputs, logits: Tensor, masks: StepMasks | None
    ) -> RowCandidates | None:
        """Choose tokens of these sampling slots with the CPU's code, and overwrite the device's: they have no drafts.

        The mirror must have all tokens. masks: of the step; rows that are late, or have failed, get their errors.
        """
        tokens, errors = self._sampler.rows(inputs)
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
        sampled = choose(here, argmax(here), self.slots, these, self._functions, of_rows)
        places = sent(rows, self._device)
        tokens.index_copy_(0, places, sent(sampled.token_ids, self._device))
        errors.index_copy_(0, places, sent(sampled.errors.astype(np.int32), self._device))
        return sampled.candidates
