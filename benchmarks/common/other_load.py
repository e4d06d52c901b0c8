"""Measures the load of other processes, so that a row from a disturbed machine has a note."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from types import TracebackType

import psutil

DISTURBED_CORES = 0.15
"""If others used more cores than this, the measurement gets a note."""


class OtherLoad:
    """Cores used, on average while the block ran, by processes that are neither this one nor its descendants.

    `cores` is set after the block. The kernel counts CPU time in ticks of 10 ms, so blocks should last 0.2 s or more.
    Children whose ids are in `others` count as others, with their descendants: systems that must be idle.
    """

    cores: float = 0.0

    def __init__(self, others: Collection[int] = ()) -> None:
        self._others = others

    def __enter__(self) -> OtherLoad:
        self._start, self._busy, self._own = time.monotonic(), _busy_s(), _own_s(self._others)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        others = (_busy_s() - self._busy) - (_own_s(self._others) - self._own)
        self.cores = max(0.0, others) / max(time.monotonic() - self._start, 1e-9)


def note_on(other_cores: float) -> str:
    """A row's note on other load; empty if the machine was quiet."""
    if other_cores <= DISTURBED_CORES:
        return ""
    return f"disturbed: other processes used up to {other_cores:.2f} cores meanwhile"


def wait_quiet(limit_s: float, others: Collection[int] = ()) -> bool:
    """Wait until others have used at most DISTURBED_CORES cores for a second; False if that takes over `limit_s` s.

    `others` as for OtherLoad.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with OtherLoad(others) as other:
            time.sleep(1.0)
        if other.cores <= DISTURBED_CORES:
            return True
    return False


def _busy_s() -> float:
    """CPU seconds used by all processes since the machine started; time stolen by a hypervisor counts as used."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0))


def _own_s(others: Collection[int] = ()) -> float:
    """CPU seconds of this process and its descendants, including reaped ones; without those under `others`."""
    total, left = 0.0, [psutil.Process(os.getpid())]
    while left:
        process = left.pop()
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            left += [child for child in process.children() if child.pid not in others]
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
