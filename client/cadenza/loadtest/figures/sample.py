"""What the latency figures draw: one run's latencies under a label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cadenza.loadtest.columns import RequestColumns
from cadenza.loadtest.figures.style import Look
from cadenza.loadtest.latencies import Window, gaps_of, is_within, per_request
from cadenza.loadtest.requests import Floats

SHORT = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}
TITLES = {"ttft_s": "Time to first token", "tpot_s": "Time per output token", "itl_s": "Inter-token latency",
          "e2e_s": "End to end"}  # fmt: skip
"""The latencies that are drawn, and their panels' titles."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A series of the latency figures, in seconds; [n] each but for `itl_s`."""

    label: str
    due_s: Floats
    """When each request was due, in seconds of the run."""
    latencies: dict[str, npt.NDArray[np.floating]]
    """ttft_s, tpot_s, e2e_s of each request (NaN: none), itl_s of each message."""
    failed_due_s: Floats
    """When the requests that failed were due."""
    window: Window | None = None
    """What counts; CDFs show nothing else."""
    look: Look | None = None
    """None: by its place among the series."""


def sample_of(label: str, columns: RequestColumns, window: Window | None, look: Look | None = None) -> Sample:
    """The requests that ended well, and when the others were due."""
    rows = columns.ok
    counted = rows & is_within(columns.due_s, window)
    found: dict[str, npt.NDArray[np.floating]] = {
        name: values[rows] for name, values in per_request(columns).items() if name in TITLES
    }
    return Sample(
        label, columns.due_s[rows], {**found, "itl_s": gaps_of(columns, counted)}, columns.due_s[~rows], window, look
    )


def within_window(sample: Sample, name: str) -> npt.NDArray[np.floating]:
    """A latency's values that count; not NaN."""
    values = sample.latencies[name]
    if name != "itl_s":
        values = values[is_within(sample.due_s, sample.window)]
    known: npt.NDArray[np.floating] = values[~np.isnan(values)]
    return known
