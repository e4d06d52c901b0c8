"""Families that both services export."""

from __future__ import annotations

from cadenza.metrics.families import Definition, Scrape
from cadenza.metrics.histogram import Histogram

LOOP_DEFINITIONS = (
    Definition(
        "cadenza_event_loop_lag_seconds",
        "histogram",
        "seconds",
        "How late the event loop ran a timer, 20 times a s.",
    ),
    Definition("cadenza_event_loop_lag_max_seconds", "gauge", "seconds", "The largest lag since the start."),
)


def add_loop_lag(scrape: Scrape, histogram: Histogram, max_s: float) -> None:
    """Add the values of a LoopLag."""
    scrape.add_histogram("cadenza_event_loop_lag_seconds", histogram)
    scrape.add("cadenza_event_loop_lag_max_seconds", max_s)
