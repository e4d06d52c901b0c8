"""What of a run is steady: without the time in which queues fill, and without the drain after the last arrival."""

from __future__ import annotations

import math

import numpy as np

from cadenza.loadtest.columns import RequestColumns
from cadenza.loadtest.latencies import Window, per_request
from cadenza.loadtest.requests import Floats, LoadTestError

_BATCH = 5
_CLEARLY = 0.1
"""Share of a window's arrivals that did not end in it."""
_GROWTH = 0.02
"""Share of the arrivals of a window's second half by which the requests in the system may have become more, beside
chance."""


def steady_window(columns: RequestColumns, warm_up_s: float | None = 0.0, cool_down_s: float = 0.0) -> Window | None:
    """From the end of the warm-up to the last arrival less the cool-down; None where all were due at one time.

    What comes after the last arrival is the drain, and not steady. A `warm_up_s` of None is found by `warm_up_end`; if
    that finds no steady state, nothing is left out. Raises LoadTestError if nothing would be left.
    """
    due_s = columns.due_s[~np.isnan(columns.due_s)]
    if not len(due_s) or due_s.min() == due_s.max():
        return None
    last_s = float(due_s.max())
    start_s = warm_up_end(columns) or 0.0 if warm_up_s is None else warm_up_s
    end_s = last_s - cool_down_s
    if start_s >= end_s:
        left_out = f"a warm-up of {start_s:g} s" + (f" and a cool-down of {cool_down_s:g} s" if cool_down_s else "")
        raise LoadTestError(
            f"--warm-up-s: {left_out} leave nothing of a run whose last request was due at {last_s:g} s"
        )
    return start_s, end_s


def kept_up(columns: RequestColumns, window: Window | None) -> bool | None:
    """Did about as many requests end as came, in the second half of the window; None without a window.

    Those that failed are left out: they no longer wait. Were all as they come independent of each other, the number in
    the system would vary by chance as a Poisson count does: its change between two far moments has twice the variance
    of its mean. Three standard deviations may be chance; one only, where over the whole window clearly fewer ended
    than came, which long answers do too while the system fills.
    """
    if window is None:
        return None
    due_s, last_s = columns.due_s[columns.ok], columns.last_s[columns.ok]
    middle = sum(window) / 2
    num_come, growth = _growth(due_s, last_s, (middle, window[1]))
    num_in_window, missing = _growth(due_s, last_s, window)
    clearly = missing > _CLEARLY * num_in_window and missing > 3 * math.sqrt(num_in_window)
    num_before = int((due_s <= middle).sum() - (last_s <= middle).sum())
    by_chance = (1 if clearly else 3) * math.sqrt(2 * max(num_before, 1))
    return growth <= _GROWTH * num_come + by_chance


def _growth(due_s: Floats, last_s: Floats, span: Window) -> tuple[int, int]:
    """How many requests came after the span's start and up to its end, and how many more than ended then."""
    come, ended = (int(((times > span[0]) & (times <= span[1])).sum()) for times in (due_s, last_s))
    return come, come - ended


def warm_up_end(columns: RequestColumns) -> float | None:
    """Where the warm-up ends by MSER-5 on the TTFTs, in seconds of the run; None if no steady state is shown.

    MSER: White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69(6), 1997,
    https://doi.org/10.1177/003754979706900601. As usual a cut within the second half counts as no steady state.
    """
    order = np.argsort(columns.due_s, kind="stable")
    ttft_s = per_request(columns)["ttft_s"][order]
    known = ~np.isnan(ttft_s)
    cut = mser5(ttft_s[known])
    return None if cut is None else float(columns.due_s[order][known][cut])


def mser5(values: Floats) -> int | None:
    """How many of the first values [n] to leave out, a multiple of 5; None for fewer than 20 or if it is over half.

    Of the means of each 5 values, the cut that makes the standard error of the mean of the rest smallest.
    """
    num_batches = len(values) // _BATCH
    if num_batches < 4:
        return None
    means = values[: num_batches * _BATCH].reshape(num_batches, _BATCH).mean(1)
    # Sums over what is left, from the end; relative to the overall mean, or the squares would cancel.
    rest = (means - means.mean())[::-1]
    left = np.arange(1, num_batches + 1)
    squares = np.cumsum(rest**2) - np.cumsum(rest) ** 2 / left
    errors = (np.maximum(squares, 0) / left**2)[::-1]
    # The last few are left out of the search: the spread of two or three values says nothing.
    cut = int(np.argmin(errors[:-3]))
    return cut * _BATCH if cut <= num_batches // 2 else None
