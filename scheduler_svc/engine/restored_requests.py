"""Requests of an earlier process, restored from its journal: they wait for their streams to come back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from scheduler_svc.core.types import FinishDetail, RequestKey
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.plan_loop.clock import Clock, Timer


class RestoredRequests:
    """Restored requests until their grace ends.

    Unfinished ones run in the engine and have no listeners. One that still has none at the end of its grace is aborted;
    one that finishes before that stays readable until then, like those that had ended in the earlier process.
    """

    def __init__(self, clock: Clock, abort: Callable[[str, str], object]) -> None:
        self._clock = clock
        self._abort = abort
        self._unfinished: dict[RequestKey, LiveRequest] = {}
        self._ended: dict[RequestKey, Callable[[], LiveRequest]] = {}
        self._timers: dict[RequestKey, Timer] = {}

    def add_unfinished(self, live: LiveRequest, grace_s: float) -> None:
        """A request that the engine runs again."""
        self._unfinished[live.request.spec.key] = live
        self._set_timer(live.request.spec.key, grace_s)

    def add_ended(self, key: RequestKey, make: Callable[[], LiveRequest], grace_s: float) -> None:
        """A request that had ended; `make` is called when a stream comes back for it."""
        self._ended[key] = make
        self._set_timer(key, grace_s)

    def find(self, tenant: str, request_id: str) -> LiveRequest | None:
        """The ended request with this id; None if there is none, or if the engine runs it."""
        key = (tenant, request_id)
        make = self._ended.get(key)
        if make is None:
            return None
        live = make()
        self._ended[key] = lambda: live
        return live

    def on_ended(self, live: LiveRequest) -> None:
        """Keep a restored request that has ended, unless it was aborted because its stream was lost again."""
        key = live.request.spec.key
        if self._unfinished.get(key) is not live:
            return
        del self._unfinished[key]
        aborted = any(sample.finish and sample.finish.detail is FinishDetail.ABORTED for sample in live.samples)
        if live.has_listeners or not aborted:
            self._ended[key] = lambda: live
        else:
            self._timers.pop(key).cancel()

    def stop(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()

    def _set_timer(self, key: RequestKey, grace_s: float) -> None:
        self._timers[key] = self._clock.call_later(grace_s, partial(self._expire, key))

    def _expire(self, key: RequestKey) -> None:
        live = self._unfinished.get(key)
        if live is not None and not live.has_listeners:
            self._abort(*key)
        self._unfinished.pop(key, None)
        self._ended.pop(key, None)
        self._timers.pop(key, None)
