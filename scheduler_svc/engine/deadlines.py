"""Deadlines of unfinished requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from scheduler_svc.core.types import RequestKey
from scheduler_svc.plan_loop.clock import Clock, ScheduledCall
from scheduler_svc.plan_loop.ports import EngineRequest


class Deadlines:
    """A timer for each request that has a deadline."""

    def __init__(self, clock: Clock, end: Callable[[str, str], object]) -> None:
        """`end(tenant, request_id)` ends a request."""
        self._clock = clock
        self._end = end
        self._timers: dict[RequestKey, ScheduledCall] = {}

    def set(self, request: EngineRequest) -> None:
        """End the request at its deadline, at once if that has passed."""
        if request.deadline is None:
            return
        key = request.spec.key
        delay = max(0.0, request.deadline - self._clock.monotonic())
        self._timers[key] = self._clock.call_later(delay, partial(self._end, *key))

    def cancel(self, key: RequestKey) -> None:
        """The request has ended."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
