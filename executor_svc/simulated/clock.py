"""Waits for a moment on the monotonic clock, accurate to microseconds and without a busy loop."""

from __future__ import annotations

import ctypes
import sys
import time

_PR_SET_TIMERSLACK = 29


def sharpen_sleep() -> None:
    """Make the kernel wake this thread on time: by default it may be 50 microseconds late, to save power.

    Linux only; no effect elsewhere.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


def sleep_until(moment_ns: int) -> None:
    """Return once `time.monotonic_ns` has reached this moment."""
    while (left := moment_ns - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)
