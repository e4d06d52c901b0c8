"""Counts of durations in bins of equal ratio: percentiles of billions of values in a few kilobytes."""

from __future__ import annotations

import math

import numpy as np

from cadenza_loadtest.requests import Floats, Ints

_LOW_S, _HIGH_S, _RATIO = 1e-5, 1e6, 1.01


class LogHistogram:
    """A percentile is right to 1%, the width of a bin; values outside 10 µs to 11 days are in the first or last bin."""

    def __init__(self) -> None:
        self._counts = np.zeros(math.ceil(math.log(_HIGH_S / _LOW_S) / math.log(_RATIO)) + 1)
        self._scale = 1 / math.log(_RATIO)
        self.total = 0.0
        """Sum of the values."""

    @property
    def count(self) -> float:
        """Number of values, weights included."""
        return float(self._counts.sum())

    @property
    def mean(self) -> float:
        """Mean of the values; NaN without one."""
        return self.total / self.count if self.count else math.nan

    def add(self, seconds: Floats, weights: Ints | None = None) -> None:
        """Add values [n], each `weights` [n] times."""
        if not len(seconds):
            return
        bins = (np.log(np.maximum(seconds, _LOW_S) / _LOW_S) * self._scale).astype(np.int64)
        np.minimum(bins, len(self._counts) - 1, out=bins)
        self._counts += np.bincount(bins, weights, minlength=len(self._counts))
        self.total += float(seconds.sum() if weights is None else seconds @ weights)

    def merge(self, other: LogHistogram) -> None:
        """Add the values of another one."""
        self._counts += other._counts
        self.total += other.total

    def percentile(self, mark: float) -> float:
        """The value below which `mark` percent lie: the middle of its bin; NaN without values."""
        total = self.count
        if not total:
            return math.nan
        place = int(np.searchsorted(np.cumsum(self._counts), total * mark / 100))
        return float(_LOW_S * _RATIO ** (min(place, len(self._counts) - 1) + 0.5))
