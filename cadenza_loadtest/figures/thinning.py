"""Reduces a million values to a few hundred points and keeps the extremes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cadenza_loadtest.requests import Floats, Ints

_CDF_POINTS = 500
_MIN_WINDOW, _MAX_WINDOW = 20, 2000
_MAX_RUNNING = 300


def cdf_points(values: npt.NDArray[np.floating]) -> tuple[Floats, Floats]:
    """Sorted values and the share of all values that are no greater, 0 to 1; [m] each, empty if all `values` [n] are
    NaN.

    Up to 500 values are all kept. Of more values, 500 evenly spaced ranks are kept, and ranks that become denser
    towards both ends, so that the extremes are exact.
    """
    known = np.sort(values[~np.isnan(values)]).astype(np.float64)
    count = len(known)
    if count <= _CDF_POINTS:
        return known, np.arange(1, count + 1) / max(count, 1)
    near = np.geomspace(1, count, 200).astype(np.int64) - 1
    ranks = np.unique(np.concatenate([np.linspace(0, count - 1, _CDF_POINTS).astype(np.int64), near, count - 1 - near]))
    return known[ranks], (ranks + 1) / count


@dataclass(frozen=True, slots=True)
class Binned:
    """A series over time in bins; [b] each, without empty bins."""

    at: Floats
    """Mean time of the bin's values."""
    low: Floats
    mean: Floats
    high: Floats


def binned(times: Floats, values: npt.NDArray[np.number], num_bins: int) -> Binned:
    """Minimum, mean and maximum of the values [n] in bins of equal time; unchanged if there are fewer values than bins.

    Pairs in which the time or the value is NaN are left out.
    """
    known = ~np.isnan(times) & ~np.isnan(values)
    times, levels = times[known], values[known].astype(np.float64)
    order = np.argsort(times, kind="stable")
    times, levels = times[order], levels[order]
    if len(times) <= num_bins:
        return Binned(times, levels, levels, levels)
    starts = bin_starts(times, num_bins)
    counts = np.diff(np.append(starts, len(times)))
    return Binned(
        np.add.reduceat(times, starts) / counts,
        np.minimum.reduceat(levels, starts),
        np.add.reduceat(levels, starts) / counts,
        np.maximum.reduceat(levels, starts),
    )


def bin_starts(times: Floats, num_bins: int) -> Ints:
    """Start index of each non-empty bin in sorted times [n], n over 0."""
    edges = np.linspace(times[0], times[-1], num_bins + 1)[:-1]
    # An empty bin starts where the next one does.
    return np.unique(np.minimum(np.searchsorted(times, edges), len(times) - 1)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class RunningQuantiles:
    """Running quantiles: over `width` neighbours each, at `at` [m]."""

    width: int
    at: Floats
    median: Floats
    tail: Floats
    tail_percent: int
    """Which quantile `tail` is: 99, or 90 where fewer than 100 neighbours leave none."""


def running(times: Floats, values: Floats) -> RunningQuantiles | None:
    """Running median and tail of values [n] in the order of their times; None for fewer than 20 known values.

    A window is a twentieth of the values, at least 20 and at most 2,000; windows overlap.
    """
    known = ~np.isnan(times) & ~np.isnan(values)
    order = np.argsort(times[known], kind="stable")
    times, values = times[known][order], values[known][order]
    count = len(times)
    if count < _MIN_WINDOW:
        return None
    width = min(max(_MIN_WINDOW, count // 20), _MAX_WINDOW)
    starts = np.arange(0, count - width + 1, max(1, width // 4, count // _MAX_RUNNING))
    percent = 99 if width >= 100 else 90
    marks = np.array([np.quantile(values[start : start + width], (0.5, percent / 100)) for start in starts])
    at = np.array([times[start : start + width].mean() for start in starts])
    return RunningQuantiles(width, at, marks[:, 0], marks[:, 1], percent)
