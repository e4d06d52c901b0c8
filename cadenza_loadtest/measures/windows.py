"""The steady part of a run: without the time in which queues fill, and without the drain after the last arrival."""

from __future__ import annotations

import math

import numpy as np

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import Window, per_request
from cadenza_loadtest.requests import Floats, LoadTestError

_BATCH = 5
_CLEARLY = 0.1
"""Share of a window's arrivals; if more than this did not end in it, the server clearly falls behind."""
_GROWTH = 0.02
"""Share of the arrivals in a window's second half by which the number of requests in the system may grow, besides
chance."""


def steady_window(columns: RequestColumns, warm_up_s: float | None = 0.0, cool_down_s: float = 0.0) -> Window | None:
    """From the end of the warm-up to the last arrival less the cool-down; None if all requests were due at one time.

    The time after the last arrival is the drain, which is not steady. With a `warm_up_s` of None, `warm_up_end` finds
    the warm-up; if it finds no steady state, nothing is left out. Raises LoadTestError if nothing would remain.
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
            f"--warm-up-s: {left_out} leaves nothing of a run whose last request was due at {last_s:g} s"
        )
    return start_s, end_s


def kept_up(columns: RequestColumns, window: Window | None) -> bool | None:
    """Whether about as many requests ended as arrived in the second half of the window; None without a window.

    Failed requests are left out: they no longer wait. With independent requests the number in the system varies as a
    Poisson count: its change between two distant times has a variance of twice its mean. Up to three standard
    deviations may be chance; only one if clearly fewer requests ended than arrived over the whole window, which also
    happens with long answers while the system fills.
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
    """Number of requests that arrived after the span's start and up to its end, and its excess over those that ended
    then."""
    come, ended = (int(((times > span[0]) & (times <= span[1])).sum()) for times in (due_s, last_s))
    return come, come - ended


def warm_up_end(columns: RequestColumns) -> float | None:
    """End of the warm-up by MSER-5 on the TTFTs, in seconds of the run; None if there is no steady state.

    MSER: White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69(6), 1997,
    https://doi.org/10.1177/003754979706900601. As usual, a truncation point within the second half counts as no steady
    state.
    """
    order = np.argsort(columns.due_s, kind="stable")
    ttft_s = per_request(columns)["ttft_s"][order]
    known = ~np.isnan(ttft_s)
    cut = mser5(ttft_s[known])
    return None if cut is None else float(columns.due_s[order][known][cut])


def mser5(values: Floats) -> int | None:
    """Number of first values [n] to leave out, a multiple of 5; None for fewer than 20 values or if it is over half.

    It is the truncation point, in means of 5 values, that minimizes the standard error of the mean of the rest.
    """
    num_batches = len(values) // _BATCH
    if num_batches < 4:
        return None
    means = values[: num_batches * _BATCH].reshape(num_batches, _BATCH).mean(1)
    # Sums over the rest, from the end; relative to the overall mean, because the squares would cancel otherwise.
    rest = (means - means.mean())[::-1]
    left = np.arange(1, num_batches + 1)
    squares = np.cumsum(rest**2) - np.cumsum(rest) ** 2 / left
    errors = (np.maximum(squares, 0) / left**2)[::-1]
    # The last few are left out of the search: the spread of two or three values is meaningless.
    cut = int(np.argmin(errors[:-3]))
    return cut * _BATCH if cut <= num_batches // 2 else None
