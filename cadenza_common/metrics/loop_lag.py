"""How late an event loop runs what is due: its lag, sampled by a timer."""

from __future__ import annotations

import asyncio
import time

from cadenza_common.metrics.histogram import Histogram

INTERVAL_S = 0.05
"""A callback that holds the loop for longer than this is always seen, a shorter one with a probability of its share of
the interval."""
LAG_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Seconds. uvloop's timers are exact to a millisecond, so the first bucket holds an idle loop's noise."""


class LoopLag:
    """Samples the lag of the running event loop from `start` to `stop`."""

    def __init__(self) -> None:
        self.histogram = Histogram(LAG_BOUNDS)
        self.max_s = 0.0
        """The largest lag so far."""
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; called on the loop."""
        self._set_timer(asyncio.get_running_loop())

    def stop(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = time.monotonic() + INTERVAL_S
        self._timer = loop.call_later(INTERVAL_S, self._sample, loop)

    def _sample(self, loop: asyncio.AbstractEventLoop) -> None:
        lag_s = max(0.0, time.monotonic() - self._due)
        self.histogram.observe(lag_s)
        self.max_s = max(self.max_s, lag_s)
        self._set_timer(loop)
