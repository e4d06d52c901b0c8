"""Waiting for a moment on the monotonic clock, to the microseconds and without burning the core."""

from __future__ import annotations

import ctypes
import sys
import time

_PR_SET_TIMERSLACK = 29


def sharpen_sleep() -> None:
    """Let the kernel wake this thread in time: by default it may come 50 microseconds late, to save power.

    Linux only; elsewhere sleep is as exact as it is.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


def sleep_until(moment_ns: int) -> None:
    """Return when `time.monotonic_ns` has reached this moment, at once if it has."""
    while (left := moment_ns - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)
