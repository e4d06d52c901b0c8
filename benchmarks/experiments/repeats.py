"""Quantities repeated with several seeds: means, minima and maxima."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.experiments.experiment import Series


@dataclass(frozen=True, slots=True)
class Repeated:
    """One quantity over the seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean."""
        return float(np.mean(self.values))

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.values)

    def text(self, form: str = ".1f", unit: str = "", scale: float = 1.0) -> str:
        """Mean and range, such as 3.1 (2.9 to 3.4); only the mean if the range rounds to it."""
        mean, low, high = (format(scale * each, form) for each in (self.mean, self.low, self.high))
        return f"{mean}{unit}" if low == mean == high else f"{mean}{unit} ({low} to {high})"


def ratio(above: Repeated, below: Repeated) -> Repeated:
    """The ratio seed by seed, so that a seed's effect on both cancels."""
    return Repeated(tuple(a / b for a, b in zip(above.values, below.values, strict=True)))


def percent_more(above: Repeated, below: Repeated) -> Repeated:
    """The difference in percent, seed by seed."""
    return Repeated(tuple(100 * (share - 1) for share in ratio(above, below).values))


def series(label: str, x: Sequence[float | str], y: Sequence[Repeated], *, scale: float = 1.0) -> Series:
    """A line or a group of bars, with ranges if there are several seeds."""
    repeated = any(len(each.values) > 1 for each in y)
    return Series(
        label=label,
        x=list(x),
        y=[scale * each.mean for each in y],
        low=[scale * each.low for each in y] if repeated else None,
        high=[scale * each.high for each in y] if repeated else None,
    )
