"""Waits until a given time, to about 0.1 ms and without busy-waiting."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import itertools
import os
import sys
from collections.abc import Iterator

from cadenza_loadtest.driving.target import Clock

_CLOCK_MONOTONIC = 1
_MILLISECOND = 0.001


class Timer:
    """Wakes the waiting tasks of one event loop, each at its time.

    asyncio's timers have epoll's resolution of a millisecond, and spinning the loop for the last millisecond occupies a
    core at some hundred requests per second. Linux's timerfd (`man 2 timerfd_create`) is late only by the time to wake
    a thread. On other systems the timer spins the loop.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._file: int | None = None
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()  # so that no two entries of the heap are equal

    @contextlib.contextmanager
    def set(self) -> Iterator[Timer]:
        """The timer is usable while the body runs, within the event loop."""
        self._file = _open_timer()
        loop = asyncio.get_running_loop()
        try:
            if self._file is not None:
                loop.add_reader(self._file, self._fire)
            yield self
        finally:
            if self._file is not None:
                loop.remove_reader(self._file)
                os.close(self._file)
                self._file = None

    async def wait_until(self, moment_s: float) -> None:
        """Return at this clock reading, never earlier; immediately if it has passed."""
        left_s = moment_s - self._clock()
        if left_s > 0 and self._file is not None:
            wakeup = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (moment_s, next(self._numbers), wakeup))
            if self._waiting[0][2] is wakeup:
                _start_timer(self._file, left_s)
            await wakeup
        elif left_s > _MILLISECOND:
            await asyncio.sleep(left_s - _MILLISECOND)
        while self._clock() < moment_s:  # noqa: ASYNC110 - the condition is time itself
            await asyncio.sleep(0)

    def _fire(self) -> None:
        assert self._file is not None
        with contextlib.suppress(BlockingIOError):  # it was restarted in the meantime
            os.read(self._file, 8)
        now_s = self._clock()
        while self._waiting and (self._waiting[0][0] <= now_s or self._waiting[0][2].done()):
            wakeup = heapq.heappop(self._waiting)[2]
            if not wakeup.done():  # it may have been cancelled
                wakeup.set_result(None)
        if self._waiting:
            _start_timer(self._file, self._waiting[0][0] - now_s)


class _TimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _open_timer() -> int | None:
    """A timerfd, which becomes readable when its time has come; None if the system has none."""
    if _LIBC is None or not hasattr(_LIBC, "timerfd_create"):
        return None
    file: int = _LIBC.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    return file if file >= 0 else None


def _start_timer(file: int, left_s: float) -> None:
    assert _LIBC is not None
    seconds, rest_s = divmod(left_s, 1.0)
    nanoseconds = min(int(1e9 * rest_s) + 1, 999_999_999)  # 0 would disarm the timer
    spec = _TimerSpec(0, 0, int(seconds), nanoseconds)
    _LIBC.timerfd_settime(file, 0, ctypes.byref(spec), None)
