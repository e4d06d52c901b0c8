"""One trace at a time of the steps of a device thread, asked for from any other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

StartTrace = Callable[[], Callable[[], bytes]]
"""Begins a trace; returns what ends it and gives it."""


@dataclass(slots=True)
class _Asked:
    """A trace of so many steps more."""

    steps_left: int
    done: Future[bytes]
    stop: Callable[[], bytes] | None = None


class StepTracing:
    """What was asked for, and how far it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: _Asked | None = None

    def ask(self, num_steps: int) -> Future[bytes]:
        """Record the next steps; the future has the trace once they have run. Cancelling it gives the trace up.

        Raises RuntimeError while one is being recorded.
        """
        with self._lock:
            earlier = self._asked
            if earlier is not None and not earlier.done.cancelled():
                raise RuntimeError("a trace is being recorded already")
            # One that was given up, and still waits for a step to end after, becomes this one.
            self._asked = _Asked(num_steps, Future(), earlier.stop if earlier else None)
            return self._asked.done

    def before_step(self, start: StartTrace) -> None:
        """Begin what was asked for, on the device thread."""
        asked = self._asked
        if asked is not None and asked.stop is None:
            try:
                asked.stop = start()
            except Exception as exc:
                self._end(asked, exc)

    def after_step(self) -> None:
        """Count a step; end the trace after its last one, or if nobody waits for it any more."""
        asked = self._asked
        if asked is None or asked.stop is None:
            return
        asked.steps_left -= 1
        if asked.steps_left <= 0 or asked.done.cancelled():
            try:
                self._end(asked, asked.stop())
            except Exception as exc:
                self._end(asked, exc)

    def _end(self, asked: _Asked, outcome: bytes | Exception) -> None:
        with self._lock:
            if self._asked is asked:
                self._asked = None
        if not asked.done.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            asked.done.set_exception(outcome)
        else:
            asked.done.set_result(outcome)
