"""The data of the latency figures: one run's latencies with a label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cadenza_loadtest.figures.style import Look
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import Window, gaps_of, is_within, per_request
from cadenza_loadtest.requests import Floats

SHORT = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}
TITLES = {"ttft_s": "Time to first token", "tpot_s": "Time per output token", "itl_s": "Inter-token latency",
          "e2e_s": "End to end"}  # fmt: skip
"""The drawn latencies and the titles of their panels."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A series of the latency figures, in seconds; [n] each except `itl_s`."""

    label: str
    due_s: Floats
    """When each request was due, in seconds of the run."""
    latencies: dict[str, npt.NDArray[np.floating]]
    """ttft_s, tpot_s and e2e_s of each request (NaN: none), itl_s of each message."""
    failed_due_s: Floats
    """When the requests that failed were due."""
    window: Window | None = None
    """The window that counts; CDFs show nothing outside it."""
    look: Look | None = None
    """None: chosen by the position among the series."""


def sample_of(label: str, columns: RequestColumns, window: Window | None, look: Look | None = None) -> Sample:
    """The latencies of the completed requests, and the due times of the failed ones."""
    rows = columns.ok
    counted = rows & is_within(columns.due_s, window)
    found: dict[str, npt.NDArray[np.floating]] = {
        name: values[rows] for name, values in per_request(columns).items() if name in TITLES
    }
    return Sample(
        label, columns.due_s[rows], {**found, "itl_s": gaps_of(columns, counted)}, columns.due_s[~rows], window, look
    )


def within_window(sample: Sample, name: str) -> npt.NDArray[np.floating]:
    """The values of a latency that count, without NaN."""
    values = sample.latencies[name]
    if name != "itl_s":
        values = values[is_within(sample.due_s, sample.window)]
    known: npt.NDArray[np.floating] = values[~np.isnan(values)]
    return known
