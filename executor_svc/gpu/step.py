"""Steps on a GPU: each is enqueued at once; its sampled tokens stay on the device for the next step.

The host schedules with a mirror of the slots, which may be steps behind: a slot that has stopped in the meantime is
padding on the device, and reported as idle. Beam candidates are chosen on the host, with the CPU's code: a step with
candidates, forks or given tokens waits for all earlier steps, and so does one with drafts from a source on the host.
One with grammars is launched as others are, and sampled when the step before is settled and the masks are made.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepTimings
from executor_svc.batch.mirror_slots import MirrorSlots
from executor_svc.batch.prompt_rows import prompt_rows
from executor_svc.batch.scheduled import Scheduled
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.gpu.drafts.draft_model import GpuDraftModel
from executor_svc.gpu.drafts.drafting import GpuDrafting, ngrams_of
from executor_svc.gpu.drafts.head import GpuHead
from executor_svc.gpu.drafts.passes import DraftPasses
from executor_svc.gpu.enqueued_step import GpuStep
from executor_svc.gpu.experts import GpuExpertKernels
from executor_svc.gpu.measuring import StepClock
from executor_svc.gpu.runner import GpuRunner
from executor_svc.gpu.sampling.state import SlotSamplingState
from executor_svc.gpu.sampling.step_sampling import Enqueued, Forward, StepSampling
from executor_svc.gpu.slots.device_slots import DeviceSlots
from executor_svc.gpu.slots.slot_adapters import SlotAdapters
from executor_svc.gpu.step_ranks import GpuStepRanks
from executor_svc.gpu.step_states import EnqueuedStates, StepSaves
from executor_svc.models.decoder import Decoder
from executor_svc.models.heads.head import DraftHead
from executor_svc.models.loading import LoadedModel
from executor_svc.plan.arrays import BoolArray
from executor_svc.plan.limits import Limits
from executor_svc.speculation.drafts import DraftSource
from executor_svc.structured.slot_grammars import SlotGrammars
from executor_svc.worker.model_adapters import ModelAdapterLoader
from executor_svc.worker.profiling import Spans
from executor_svc.worker.step import move_blocks


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
        draft_model: Decoder | DraftHead | None = None,
        adapters: ModelAdapterLoader | None = None,
        grammars: SlotGrammars | None = None,
    ) -> None:
        """Allocate the slots, record the model, and capture its graphs, unless enforce_eager is set.

        drafts: makes drafts, as in `GpuDrafting`. draft_model: a model or head that makes them instead; its layers are
        in `pools`. adapters: those that plans may name, in the places of the model. grammars: makes their masks; those
        slots have no drafts.
        """
        torch_device = device.torch_device
        self.ranks = GpuStepRanks(loaded.ranks)
        self.limits = limits
        self.adapters = adapters
        self._has_places = loaded.adapters is not None
        self.slots = MirrorSlots(limits, compared=loaded.ranks is not None)
        self._pools = pools
        self.saves = StepSaves(self.slots) if limits.pages_per_state else None
        self._device = torch_device
        self._functions = device.functions
        self._span = Spans(torch_device.type == "cuda")
        kernels = device.kernels
        assert isinstance(kernels, GpuExpertKernels)
        on_host = kernels.step_ways.drafts_on_host
        ngrams, words = None if on_host else ngrams_of(drafts), SlotSamplingState.extra_words(limits)
        self._device_slots = DeviceSlots(limits, torch_device, extra_words=words, ngrams=ngrams)
        self._slot_adapters = SlotAdapters(adapters, self._device_slots)
        draft = self._run(loaded, device, not enforce_eager, draft_model)
        self.grammars = grammars
        self.sampling = StepSampling(self.slots, self._device_slots, self._runner, device, limits, self.ranks, grammars)
        self._drafting = GpuDrafting(
            self.slots,
            self._device_slots,
            drafts,
            self._runner.sizes_of,
            self._runner.drafted,
            tokens_of_pass=0 if draft is None else draft.tokens_of_pass,
            on_host=on_host,
        )
        self._passes, self._head = None, draft if isinstance(draft, GpuHead) else None
        if draft is not None:
            self._passes = DraftPasses(draft, self._runner, self._device_slots, self.sampling.sampler)
        self._pending: deque[GpuStep] = deque()
        self.token_counts = sorted(kernels.tokens_of_tiles)
        """Tokens of steps that have kernels of their own, for warm-up."""
        pools.warm_up()
        self.sampling.warm_up()
        if self._head is not None:
            self._head.warm_up()

    def _run(
        self, loaded: LoadedModel, device: Device, captures: bool, draft_model: Decoder | DraftHead | None
    ) -> GpuDraftModel | GpuHead | None:
        """Make the runner of the target, and return what runs beside it."""
        draft, follower, slots, pools = None, None, self._device_slots, self._pools
        if isinstance(draft_model, Decoder):
            draft = GpuDraftModel(draft_model, device, pools, self.limits, slots)
            follower = draft.run
        head = None if isinstance(draft_model, Decoder) else draft_model
        states = () if head is None else head.state_layers
        self._runner = GpuRunner(loaded, device, pools, self.limits, slots, captures, follower, states)
        if draft is not None:
            draft.compare(device.kernels)
        return draft if head is None else GpuHead(head, device, pools, self.limits, slots, self._runner)

    def adapted(self) -> AbstractContextManager[None] | None:
        """Return a context in which all slots have the adapter of an empty place, for warm-up; None: it has none."""
        return self._slot_adapters.everywhere() if self._has_places else None

    def clear(self) -> None:
        """Free all slots, after the enqueued steps; KV stays."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._pending.clear()
        self.slots.clear()
        self.sampling.clear()
        self._drafting.clear()
        if self._head is not None:
            self._head.clear()
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
            self._sample_last()
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
            if plan.admitted:
                self.sampling.forget()
            if self._needs_settled_mirror(applied):
                self.settle_until(None)
            self.sampling.masks.follow(plan, self.slots, self.limits.vocab_size)
            return self.slots.schedule(applied)

        scheduled = self.ranks.agreed(plan, self.slots, apply)
        return applied, scheduled

    def _enqueue(self, plan: StepPlan, scheduled: Scheduled, started: int, received_ns: int) -> GpuStep:
        moves_ns = move_blocks(self._pools, plan)
        self.sampling.apply(plan)
        self._drafting.follow(plan)
        if self._head is not None:
            self._head.admit(plan)
        clock = StepClock(self._device)
        enqueued, most_drafts, states = self._compute(plan, scheduled, clock)
        generations = self.slots.advance(scheduled)
        timings = StepTimings(started - received_ns, 0, 0, time.monotonic_ns() - started, moves_ns)
        step = GpuStep(self, plan, scheduled, enqueued, generations, clock, timings, most_drafts, states)
        self._pending.append(step)
        return step

    def _sample_last(self) -> None:
        """Enqueue the sampling of the last step: the next one reads its tokens, and changes the slots."""
        if self._pending and self._pending[-1].waits_for_masks:
            while len(self._pending) > 1:
                self.settle_until(self._pending[0])
            self._pending[0].sample()

    def can_sample(self, step: GpuStep, forward: Forward) -> bool:
        """Return whether all masks of a step are there, so that its sampling would not wait."""
        return step is self._pending[0] and self.sampling.masks.are_there(forward.scheduled)

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
        if self._drafting.reads_tokens(plan) or self.sampling.chooses_on_host(self.slots.admitted):
            return True
        given = len(plan.fork_slots) or len(plan.given_slots) or plan.debug_digest
        return bool(given or self.sampling.masks.reads_tokens(plan))

    def _compute(
        self, plan: StepPlan, scheduled: Scheduled, clock: StepClock
    ) -> tuple[Enqueued | Forward | None, int, EnqueuedStates | None]:
        """Enqueue the scheduled work, and return the most drafts of a slot and the recurrent states too.

        Returns its pending results; the model's alone if its sampling waits for masks; None without work.
        """
        if not len(scheduled.slots):
            self._device_slots.flush()
            self.sampling.state.count_admitted()
            return None, 0, None
        clock.mark()
        self._runner.use_adapters(self._slot_adapters.choose(self.slots, scheduled))
        # Rows of prompts are found by their place in the step, which drafts before them would change.
        prompts = prompt_rows(self.slots, scheduled)
        layout = self._drafting.lay_out(plan, scheduled, self._undrafted, none=prompts is not None)
        longest, make_drafts, states = self._longest(layout.scheduled), None, None
        if self.saves is not None:
            states = self.saves.before(layout.scheduled, self._drafts_in_flight())
            self._device_slots.put_saves(states.saves)
        if self._passes is not None:
            metadata = self.sampling.metadata_of(scheduled.sampling_slots)
            make_drafts = partial(self._passes.precede, layout, metadata, longest)
        with self._span("forward"):
            logits, _ = self._runner.forward(layout.scheduled, layout.sizes, longest, layout.most_drafts, make_drafts)
        if self._head is not None:
            self._head.launched(scheduled)
        self.sampling.state.count_admitted()
        clock.mark()
        forward = Forward(
            scheduled, layout.scheduled, layout.sizes, prompts, logits, clock, self.sampling.masks.recorded
        )
        waits = self.sampling.waits_for_masks(scheduled.sampling_slots)
        return forward if waits else self.sample(forward), layout.sizes.num_drafts, states

    def _undrafted(self) -> BoolArray:
        """Return [num_slots]: slots that may have no drafts."""
        found = self.sampling.on_host | self.sampling.masks.has
        return found if self._head is None else found | self._head.without_result

    def sample(self, forward: Forward) -> Enqueued:
        """Enqueue the sampling of the step whose model was enqueued last; if it has masks, all earlier are settled."""
        with self._span("sample"):
            enqueued = self.sampling.sample(forward)
        if self._head is not None and self._runner.ran is not None:
            with self._span("head"):
                self._head.follow(self._runner.ran)
        return enqueued

    def _longest(self, scheduled: Scheduled) -> int:
        """Return an upper bound of a sequence's tokens after a step: drafts of steps in flight may each give one."""
        ends = self.slots.num_computed_tokens[scheduled.slots] + scheduled.num_tokens
        return min(int(ends.max()) + self._drafts_in_flight(), self.limits.max_model_len)

    def _drafts_in_flight(self) -> int:
        """Return the most drafts of a slot in steps that are not settled."""
        return sum(step.most_drafts for step in self._pending)
