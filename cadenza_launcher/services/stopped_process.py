"""Notices that a process is stopped by a signal, as by SIGSTOP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_STOPPED = "T"  # a process that a debugger holds is "t", and is left alone
_MAX_LOOK_S = 0.5


def process_state(pid: int) -> str:
    """The letter of proc(5), such as R, S or T; empty if the process is gone or the system has no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    _, _, fields = stat.rpartition(")")  # the program's name, before it, may hold spaces and parentheses
    return fields.split()[0]


class StoppedTimer:
    """Measures for how long a process has been stopped by a signal.

    The time between two observations counts for at most half a second. So an observer that was itself suspended does
    not take the time of its own pause for the other's.
    """

    def __init__(self, pid: int, state: Callable[[int], str] = process_state) -> None:
        self._pid = pid
        self._state = state
        self._observed_at: float | None = None
        self._stopped_s = 0.0

    def seconds(self, now: float) -> float:
        """Observe the process: seconds that it has been stopped, 0 if it runs. Call it several times a second."""
        if self._state(self._pid) != _STOPPED:
            self._observed_at, self._stopped_s = None, 0.0
            return 0.0
        if self._observed_at is not None:
            self._stopped_s += min(now - self._observed_at, _MAX_LOOK_S)
        self._observed_at = now
        return self._stopped_s
