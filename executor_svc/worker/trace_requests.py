"""Traces of the device thread's steps, requested from any other thread, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

StartTrace = Callable[[], Callable[[], bytes]]
"""Starts a trace; returns a function that stops it and returns the trace."""


@dataclass(slots=True)
class _TraceRequest:
    """A requested trace, with the number of steps still to record."""

    steps_left: int
    done: Future[bytes]
    stop: Callable[[], bytes] | None = None


class TraceRequests:
    """The current request for a trace, and its progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._request: _TraceRequest | None = None

    def request(self, num_steps: int) -> Future[bytes]:
        """Request a trace of the next steps; the future holds it once they have run. Cancelling the future cancels it.

        Raises RuntimeError while another trace is being recorded.
        """
        with self._lock:
            earlier = self._request
            if earlier is not None and not earlier.done.cancelled():
                raise RuntimeError("a trace is being recorded already")
            # A cancelled trace ends only after its next step; this request continues it.
            self._request = _TraceRequest(num_steps, Future(), earlier.stop if earlier else None)
            return self._request.done

    def before_step(self, start: StartTrace) -> None:
        """Start the requested trace, on the device thread."""
        request = self._request
        if request is not None and request.stop is None:
            try:
                request.stop = start()
            except Exception as exc:
                self._end(request, exc)

    def after_step(self) -> None:
        """Count a step; end the trace after its last step, or if it is cancelled."""
        request = self._request
        if request is None or request.stop is None:
            return
        request.steps_left -= 1
        if request.steps_left <= 0 or request.done.cancelled():
            try:
                self._end(request, request.stop())
            except Exception as exc:
                self._end(request, exc)

    def _end(self, request: _TraceRequest, outcome: bytes | Exception) -> None:
        with self._lock:
            if self._request is request:
                self._request = None
        if not request.done.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            request.done.set_exception(outcome)
        else:
            request.done.set_result(outcome)
