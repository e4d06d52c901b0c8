"""Notices an executor that makes no progress: a step that has begun and does not end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.plan_loop.clock import Clock, ScheduledCall
from scheduler_svc.plan_loop.step_bound import StepBound

_LOG = logging.getLogger(__name__)

MIN_ALLOWED_S = 2.0
"""A step may take this long in any case."""
FACTOR = 3.0
"""And this many times its predicted duration."""
NUM_FIRST_STEPS = 3
FIRST_STEP_S = 60.0
"""The first steps with an incarnation may take this long, as no earlier step predicts them. An executor compiles its
kernels and captures its graphs before it serves. But a first step may still compile a rarely used kernel, and it may be
as long as steps can be: 2,048 tokens of a model of 0.8 billion parameters took 57 s on two cores that four other
processes kept busy (measured)."""
_LATE_S = 1.0
"""A timer that is later than this means that this process was suspended or busy."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The step that the executor does not end."""

    step_id: int
    since: float
    """When the executor could begin it, in seconds on the clock."""


@dataclass(frozen=True, slots=True)
class _Running:
    step_id: int
    since: float
    num_tokens: int
    num_context_tokens: int


class ProgressWatch:
    """Watches the oldest plan in flight. It costs a step no timer of its own: one timer runs while steps do."""

    def __init__(self, clock: Clock, target: str, on_change: Callable[[], None]) -> None:
        """on_change: called when the executor stalls, and when it makes progress again."""
        self.stall: Stall | None = None
        """The step without progress; None while there is progress, or nothing to do."""
        self._clock = clock
        self._target = target
        self._on_change = on_change
        self._bound = StepBound()
        self._incarnation = 0
        self._num_ended = 0
        """Steps of this incarnation that have ended."""
        self._running: _Running | None = None
        self._timer: ScheduledCall | None = None
        self._due = 0.0

    def session_opened(self, incarnation: int) -> None:
        """A session begins; another incarnation may be another machine, whose steps are not known yet."""
        if incarnation != self._incarnation:
            self._bound, self._incarnation, self._num_ended = StepBound(), incarnation, 0

    def started(self, lane: Lane) -> None:
        """The executor can begin the lane's oldest plan in flight now, if there is one."""
        if not lane.inflight:
            return
        step = lane.inflight[0]
        self._running = _Running(
            step.plan.step_id, self._clock.monotonic(), step.most_tokens, _num_context_tokens(lane, step)
        )
        if self._timer is None:
            self._set_timer(MIN_ALLOWED_S)

    def ended(self) -> None:
        """The result of the oldest plan is here."""
        if self._running is None:
            return
        running, self._running = self._running, None
        seconds = self._clock.monotonic() - running.since
        self._bound.observe(running.num_tokens, running.num_context_tokens, seconds)
        self._num_ended += 1
        if self.stall is not None:
            self.stall = None
            _LOG.info(
                "executor %s makes progress again: step %d took %.1f s", self._target, running.step_id, seconds,
                extra={"executor": self._target, "step_id": running.step_id},
            )  # fmt: skip
            self._on_change()

    def session_closed(self) -> None:
        """The session has ended: nothing runs. Does not call on_change."""
        self._running = self.stall = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _allowed_s(self, running: _Running) -> float:
        allowed = max(MIN_ALLOWED_S, FACTOR * self._bound.predict(running.num_tokens, running.num_context_tokens))
        return max(allowed, FIRST_STEP_S) if self._num_ended < NUM_FIRST_STEPS else allowed

    def _set_timer(self, delay_s: float) -> None:
        self._due = self._clock.monotonic() + delay_s
        self._timer = self._clock.call_later(delay_s, self._check)

    def _check(self) -> None:
        self._timer = None
        running, now = self._running, self._clock.monotonic()
        if running is None or self.stall is not None:
            return
        until = running.since + self._allowed_s(running)
        if now > self._due + _LATE_S:
            # Results that arrived meanwhile are not read yet.
            until = max(until, now + _LATE_S)
        if now < until:
            self._set_timer(until - now)
            return
        self.stall = Stall(running.step_id, running.since)
        _LOG.warning(
            "executor %s makes no progress: step %d has run for %.1f s; requests wait for it",
            self._target, running.step_id, now - running.since,
            extra={"executor": self._target, "step_id": running.step_id},
        )  # fmt: skip
        self._on_change()


def _num_context_tokens(lane: Lane, step: PlannedStep) -> int:
    """About the number of positions that the step's tokens attend to, in time per chunk and not per sequence.

    A decode batch attends to all that is stored; blocks that several sequences share count once.
    """
    num_used_blocks = lane.spec.num_blocks - lane.blocks.num_free
    decoded = num_used_blocks * lane.spec.block_size if step.decode_slots else 0
    return decoded + sum(chunk.num_tokens * (chunk.context_len + chunk.num_tokens) for chunk in step.chunks)
