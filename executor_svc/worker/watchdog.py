"""Ends a process whose device thread hangs in a step, so that a supervisor starts it again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from executor_svc.worker.session import Activity

_log = logging.getLogger(__name__)

_MAX_INTERVAL_S = 1.0
_LATE_NS = 1_000_000_000
"""A check that is later than this means that this process was suspended."""


class StepWatchdog:
    """A thread of its own: neither the event loop nor the device thread can delay it, only a held interpreter lock.

    The age of a step counts from its start on the device thread, without the time for which the process was suspended.
    """

    def __init__(self, activity: Callable[[], Activity], timeout_s: float, on_hang: Callable[[], object]) -> None:
        """activity: the current work of the device thread. on_hang: called once, in the watchdog's thread."""
        self._activity = activity
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._interval_s = min(_MAX_INTERVAL_S, timeout_s / 10)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._last_check_ns = 0
        self._step_id = 0
        self._suspended_ns = 0
        """Time for which the process was suspended while the current step ran."""

    def start(self) -> None:
        """Start the thread."""
        self._last_check_ns = time.monotonic_ns()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()

    def is_hung(self, now_ns: int) -> bool:
        """Whether the running step is older than the timeout; logs it. now_ns: on the monotonic clock."""
        activity = self._activity()
        late_ns = now_ns - self._last_check_ns - int(self._interval_s * 1e9)
        self._last_check_ns = now_ns
        if activity.step_id != self._step_id:
            self._step_id, self._suspended_ns = activity.step_id, 0
        if late_ns > _LATE_NS:
            self._suspended_ns += min(late_ns, activity.age_ns)
        age_s = (activity.age_ns - self._suspended_ns) / 1e9
        if not activity.step_id or age_s <= self._timeout_s:
            return False
        _log.error(
            "step %d has run for %.1f s, longer than --step-timeout-s %g: this process ends",
            activity.step_id, age_s, self._timeout_s, extra={"step_id": activity.step_id},
        )  # fmt: skip
        return True

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            if self.is_hung(time.monotonic_ns()):
                self._on_hang()
                return
