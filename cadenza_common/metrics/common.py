"""What both services measure and export: the lag of an event loop, and what listeners refuse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from cadenza_common.metrics.families import Definition, Scrape
from cadenza_common.metrics.histogram import Histogram
from cadenza_common.metrics.listener_counts import ListenerCounts
from cadenza_common.wire.tls.files import ExpiringFiles

LOOP_DEFINITIONS = (
    Definition(
        "cadenza_event_loop_lag_seconds",
        "histogram",
        "seconds",
        "How late the event loop ran a timer, 20 times a s.",
    ),
    Definition("cadenza_event_loop_lag_max_seconds", "gauge", "seconds", "The largest lag since the start."),
)
LISTENER_DEFINITIONS = (
    Definition(
        "cadenza_refused_calls_total", "counter", "calls",
        "Calls refused before their message was read, by reason.", ("reason",),
    ),
    Definition("cadenza_connections", "gauge", "connections", "Open connections to the listener (Linux)."),
    Definition(
        "cadenza_closed_connections_total", "counter", "connections",
        "Connections closed since their address had over --max-connections-per-peer.",
    ),
    Definition(
        "cadenza_tls_certificate_expiry_seconds", "gauge", "unix seconds",
        "When the first certificate of a file in use expires; link: listener, or executors on the scheduler.",
        ("link", "option"),
    ),
)  # fmt: skip
INTERVAL_S = 0.05
"""A callback that holds the loop for longer than this is always seen, a shorter one with a probability of its share of
the interval."""
LAG_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Seconds. uvloop's timers are exact to a millisecond, so the first bucket holds an idle loop's noise."""


def add_listener(scrape: Scrape, counts: ListenerCounts) -> None:
    """Add what a listener has refused, and its connections."""
    for reason, count in counts.refused.items():
        scrape.add("cadenza_refused_calls_total", count, reason)
    if counts.num_connections is not None:
        scrape.add("cadenza_connections", counts.num_connections)
    scrape.add("cadenza_closed_connections_total", counts.num_closed)


def add_expiries(scrape: Scrape, links: Mapping[str, ExpiringFiles | None]) -> None:
    """Add when certificates expire, by link; may read files, so not on an event loop."""
    for link, files in links.items():
        for option, ends in ({} if files is None else files.expiries()).items():
            scrape.add("cadenza_tls_certificate_expiry_seconds", ends, link, option)


def add_loop_lag(scrape: Scrape, histogram: Histogram, max_s: float) -> None:
    """Add the values of a LoopLag."""
    scrape.add_histogram("cadenza_event_loop_lag_seconds", histogram)
    scrape.add("cadenza_event_loop_lag_max_seconds", max_s)


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
