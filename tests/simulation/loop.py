"""An asyncio event loop on virtual time: it never sleeps, and a seed decides every order that asyncio leaves open.

What asyncio guarantees is kept: callbacks of `call_soon` run in the order in which they were scheduled, and a timer
never runs before its moment. What it leaves open is drawn: timers that are due at one turn of the loop run in any
order. A turn can be late, as when the process was busy; then it finds more timers due, as uvloop does, whose timers
have a resolution of 1 ms. Messages arrive by timers, so streams race with each other and with timers; a stream keeps
its own order (see network).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from random import Random
from typing import Any

from scheduler_svc.plan_loop.clock import Clock, ScheduledCall

START_S = 1.0
"""A time of 0 means "not yet" in a request's times."""
_MAX_CALLBACKS_AT_ONCE = 20_000
"""Callbacks within _LEAST_STEP_S, after which the loop counts as spinning."""
_LEAST_STEP_S = 1e-6


class NothingLeftError(Exception):
    """All tasks wait, and nothing is scheduled that could wake one."""


class SpinningError(Exception):
    """Callbacks schedule each other without an end, and time stands still."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks and timers, and nothing else: there are no sockets, threads or signals."""

    _ready: Any
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool

    def __init__(self, rng: Random, *, latest_s: float = 0.0) -> None:
        """latest_s: how late a turn of the loop may be."""
        super().__init__()
        self.latest_s = latest_s
        self.num_callbacks = 0
        self._rng = rng
        self._now = START_S
        self._num_since_step = 0
        self._counted_from = START_S

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._now

    def pause(self, seconds: float) -> None:
        """Let time pass in which this process does not run: everything that comes due is late."""
        self._now += seconds

    @property
    def scheduled(self) -> list[asyncio.TimerHandle]:
        """The timers that have neither run nor been cancelled."""
        return [handle for handle in self._scheduled if not handle.cancelled()]

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._advance()
        num_ready = len(ready)
        self.num_callbacks += num_ready
        self._num_since_step += num_ready
        if self._num_since_step > _MAX_CALLBACKS_AT_ONCE:
            count, self._num_since_step = self._num_since_step, 0
            raise SpinningError(f"{count} callbacks at {self._now} s")
        for _ in range(num_ready):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _advance(self) -> None:
        """Step to the next timer, or a little past it, and make ready what is due then."""
        scheduled = self._scheduled
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not scheduled:
            raise NothingLeftError("every task waits, and no timer is set")
        wakes_at = scheduled[0]._when
        if self.latest_s:
            wakes_at += self._rng.random() * self.latest_s
        self._now = max(self._now, wakes_at)
        if self._now > self._counted_from + _LEAST_STEP_S:
            self._counted_from, self._num_since_step = self._now, 0
        due: list[asyncio.TimerHandle] = []
        while scheduled and scheduled[0]._when <= self._now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            if not handle._cancelled:
                due.append(handle)
        if len(due) > 1:
            self._rng.shuffle(due)
        self._ready.extend(due)

    def _write_to_self(self) -> None:
        """There is no other thread that would have to wake the loop."""


class LoopClock(Clock):
    """The loop's time as the engine's clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.wall_offset_s = 1e9
        """Wall time less monotonic time; a test may change it at any moment."""

    def monotonic_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    def wall_time_ns(self) -> int:
        return round((self._loop.time() + self.wall_offset_s) * 1e9)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> ScheduledCall:
        # A delay that rounds to nothing would never let time pass.
        return self._loop.call_later(max(1e-9, delay_s) if delay_s > 0 else 0.0, callback)
