"""Was anybody else using the cores? A row from a disturbed machine says so."""

from __future__ import annotations

import contextlib
import os
import time
from types import TracebackType

import psutil

DISTURBED_CORES = 0.15
"""More cores than this used by others make a measurement worth a note."""


class OtherLoad:
    """Cores used, on average while the block ran, by processes that are neither this one nor its descendants.

    `cores` is known after the block. The kernel counts CPU time in ticks of 10 ms: blocks should last 0.2 s or more.
    """

    cores: float = 0.0

    def __enter__(self) -> OtherLoad:
        self._start, self._busy, self._own = time.monotonic(), _busy_s(), _own_s()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        others = (_busy_s() - self._busy) - (_own_s() - self._own)
        self.cores = max(0.0, others) / max(time.monotonic() - self._start, 1e-9)


def note_on(other_cores: float) -> str:
    """What a row says of other load; empty if the machine was quiet."""
    if other_cores <= DISTURBED_CORES:
        return ""
    return f"disturbed: other processes used up to {other_cores:.2f} cores meanwhile"


def wait_quiet(limit_s: float) -> bool:
    """Wait until others have used at most DISTURBED_CORES cores for a second; False if that took over `limit_s` s."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with OtherLoad() as other:
            time.sleep(1.0)
        if other.cores <= DISTURBED_CORES:
            return True
    return False


def _busy_s() -> float:
    """CPU seconds used by all processes since the machine started; what a hypervisor took away counts as used."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0))


def _own_s() -> float:
    """CPU seconds of this process and its descendants, ended and collected ones included."""
    total = 0.0
    root = psutil.Process(os.getpid())
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
