"""A step whose work is enqueued on a GPU, or its model alone while masks are made for its sampling."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

import numpy as np

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult, StepTimings
from executor_svc.batch.mirror_slots import MirrorSlots, ReportedTokens
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slot_digest import digest_of
from executor_svc.batch.step_result import WRONG_STATE, Computed, SampledTokens, make_result
from executor_svc.gpu.measuring import StepClock
from executor_svc.gpu.sampling.step_sampling import Enqueued, Forward, StepSampling
from executor_svc.gpu.slots.device_slots import CommittedTokens
from executor_svc.gpu.step_states import EnqueuedStates, StepSaves
from executor_svc.plan.arrays import IntArray


class StepOwner(Protocol):
    """Knows the order of the enqueued steps."""

    sampling: StepSampling
    saves: StepSaves | None
    """None: the model has no recurrent states."""

    def can_sample(self, step: GpuStep, forward: Forward) -> bool:
        """Return whether all masks of a step are there, so that its sampling would not wait."""
        ...

    def sample(self, forward: Forward) -> Enqueued:
        """Enqueue the sampling of the step whose model was enqueued last; if it has masks, all earlier are settled."""
        ...

    def settle_until(self, last: GpuStep | None) -> None:
        """Settle the enqueued steps in order, up to `last`; None: all."""
        ...


class GpuStep:
    """An enqueued step: its model, and its sampling too unless that waits for masks."""

    def __init__(
        self,
        owner: StepOwner,
        plan: StepPlan,
        scheduled: Scheduled,
        enqueued: Enqueued | Forward | None,
        generations: IntArray,
        clock: StepClock,
        timings: StepTimings,
        most_drafts: int,
        states: EnqueuedStates | None,
    ) -> None:
        """scheduled: without drafts, of which a slot has most_drafts at most. enqueued: None without work. states: of a
        model that has some, with work."""
        self.most_drafts = most_drafts
        self._owner = owner
        self._plan = plan
        self._scheduled = scheduled
        self._enqueued = enqueued
        self._generations = generations
        self._clock = clock
        self._timings = timings
        self._states = states
        self._launched = time.monotonic_ns()
        self._result: StepResult | None = None
        self._invalid: InvalidPlan | None = None

    def is_done(self) -> bool:
        """Return whether `result` would return at once, or no sooner if it is called later.

        Enqueues the sampling as soon as the masks are there.
        """
        if self._result is not None or self._enqueued is None:
            return True
        if isinstance(self._enqueued, Forward):
            if not self._owner.can_sample(self, self._enqueued):
                return not self._enqueued.clock.is_running()
            self.sample()
        assert isinstance(self._enqueued, Enqueued)
        return self._enqueued.tokens.is_done()

    @property
    def waits_for_masks(self) -> bool:
        """Whether its sampling is not enqueued yet."""
        return isinstance(self._enqueued, Forward)

    def sample(self) -> None:
        """Enqueue the sampling, if it is not: with the masks that are there when the model has run, or soon after.

        All earlier steps must be settled.
        """
        if isinstance(self._enqueued, Forward):
            self._enqueued = self._owner.sample(self._enqueued)

    def result(self) -> StepResult:
        """Wait for the step and all earlier ones.

        Raises any error of the device, and InvalidPlan if a slot's state did not stand where the plan says.
        """
        if self._result is None and self._invalid is None:
            self._owner.settle_until(self)
        if self._invalid is not None:
            raise self._invalid
        assert self._result is not None
        return self._result

    def settle(self, slots: MirrorSlots) -> None:
        """Wait for the step, update the mirror, and build the result. All earlier steps must be settled."""
        self.sample()
        assert not isinstance(self._enqueued, Forward)
        none = self._scheduled.slots[:0]
        scheduled, computed = self._scheduled, Computed(SampledTokens(none, none, None), none)
        if self._enqueued is not None:
            try:
                scheduled, computed = self._settle(slots, self._enqueued)
            except InvalidPlan as exc:
                self._invalid = exc  # A later plan may settle this one, and is not the one to fail.
                return
        digest = digest_of(slots) if self._plan.debug_digest else b""
        total_ns = self._timings.total_ns + time.monotonic_ns() - self._launched
        begun = self._timings
        timings = StepTimings(begun.queue_ns, computed.device_ns, computed.sample_ns, total_ns, begun.moves_ns)
        self._result = make_result(self._plan.step_id, scheduled, computed, timings, digest)

    def _settle(self, slots: MirrorSlots, enqueued: Enqueued) -> tuple[Scheduled, Computed]:
        """Return the work with the drafts that were made, without slots that had stopped before, and its results."""
        committed = enqueued.tokens.wait()
        if enqueued.masks is not None:
            committed = replace(committed, errors=enqueued.masks.errors(committed.errors, committed.owners))
        if self._states is not None:
            self._check_states(committed)
        scheduled, is_plain = committed.with_drafts(self._scheduled), committed.is_plain and enqueued.masks is None
        errors, idle = committed.errors, None if is_plain else committed.idle
        if idle is not None:
            errors = np.where(idle, 0, errors)
        slots.settle(
            scheduled, self._generations, ReportedTokens(committed.token_ids, errors, idle, committed.positions)
        )
        saves, saved = self._owner.saves, None
        if saves is not None and self._states is not None:
            saved = saves.settle(self._states, scheduled, committed)
        logprobs = None if enqueued.logprobs is None else enqueued.logprobs.wait(committed)
        prompts = {} if enqueued.prompts is None else enqueued.prompts.wait()
        if idle is not None and idle.any():
            working = self._scheduled.with_idle(idle[committed.ahead == 0])
            committed = committed.of_rows(~idle)
            scheduled = committed.with_drafts(working)
        sampled = SampledTokens(committed.token_ids, committed.errors, logprobs, enqueued.candidates)
        self._owner.sampling.masks.committed(slots, scheduled, sampled)
        device_ns, sample_ns = self._clock.between()
        return scheduled, Computed(sampled, committed.positions, prompts, device_ns, sample_ns, saved)

    def _check_states(self, committed: CommittedTokens) -> None:
        """Raise InvalidPlan if a slot's state did not stand where the plan says. Nothing else of the step counts."""
        wrong = committed.errors == WRONG_STATE
        if wrong.any():
            slot = self._scheduled.sampling_slots[committed.owners[wrong.argmax()]]
            raise InvalidPlan(f"state_pages of slot {slot} hold a state that stands elsewhere than computed tokens say")
