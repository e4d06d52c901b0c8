"""Requests of an earlier process, restored from its journal: they wait for their streams to come back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from scheduler_svc.core.types import RequestKey
from scheduler_svc.engine.kept_requests import KeptRequests
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.plan_loop.clock import Clock, ScheduledCall


class RestoredRequests:
    """Restored requests until the time for their streams to come back is over.

    Unfinished requests run in the engine without a stream. When the time is over, a request without a stream is
    aborted. A finished request, of this or the earlier process, stays readable until then. Unfinished requests with a
    grace are KeptRequests' after their restoration.
    """

    def __init__(self, clock: Clock, kept: KeptRequests, abort: Callable[[str, str], object]) -> None:
        self._clock = clock
        self._kept = kept
        self._abort = abort
        self._unfinished: dict[RequestKey, LiveRequest] = {}
        self._ended: dict[RequestKey, Callable[[], LiveRequest]] = {}
        self._timers: dict[RequestKey, ScheduledCall] = {}

    def add_unfinished(self, live: LiveRequest, grace_s: float) -> None:
        """A request that the engine runs again; `grace_s`: seconds for its stream to come back."""
        own_s = self._kept.grace_s(live)
        if own_s > 0:
            self._kept.wait_for_stream(live, max(own_s, grace_s))
            return
        self._unfinished[live.request.spec.key] = live
        self._set_timer(live.request.spec.key, grace_s)

    def add_ended(self, key: RequestKey, make: Callable[[], LiveRequest], grace_s: float) -> None:
        """A request that had ended; `make` is called when a stream comes back for it."""
        self._ended[key] = make
        self._set_timer(key, grace_s)

    def find(self, key: RequestKey) -> LiveRequest | None:
        """The ended request with this key; None if there is none, or if the engine runs it."""
        make = self._ended.get(key)
        if make is None:
            return None
        live = make()
        self._ended[key] = lambda: live
        return live

    def has_ended(self, key: RequestKey) -> bool:
        """Whether the request with this key has ended and is kept."""
        return key in self._ended

    def on_ended(self, live: LiveRequest) -> None:
        """Keep a restored request that has finished."""
        key = live.request.spec.key
        if self._unfinished.get(key) is live:
            del self._unfinished[key]
            self._ended[key] = lambda: live

    def forget(self, key: RequestKey) -> None:
        """Let go of a request that was aborted."""
        self._unfinished.pop(key, None)
        self._ended.pop(key, None)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def stop(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()

    def _set_timer(self, key: RequestKey, grace_s: float) -> None:
        self._timers[key] = self._clock.call_later(grace_s, partial(self._expire, key))

    def _expire(self, key: RequestKey) -> None:
        live = self._unfinished.get(key)
        if live is not None and not live.has_listener:
            self._abort(*key)
        self.forget(key)
