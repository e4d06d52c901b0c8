"""A histogram of plain numbers with fixed buckets, which costs the code that fills it next to nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values by bucket; one thread fills it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """bounds: the largest value of each bucket, ascending; one more bucket takes all larger values."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0
        """Sum of all values."""

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def num_values(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def copy(self) -> Histogram:
        """The same histogram, which does not change any more."""
        result = Histogram.__new__(Histogram)
        result.bounds, result.counts, result.total = self.bounds, self.counts.copy(), self.total
        return result

    def add(self, other: Histogram) -> None:
        """Add the values of a histogram with the same bounds."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def cumulative(self, bounds: Sequence[float]) -> list[int]:
        """Number of values up to each of these bounds, which must be among its own; then the number of all values."""
        sums, found = 0, dict.fromkeys(self.bounds, 0)
        for bound, count in zip(self.bounds, self.counts, strict=False):
            sums += count
            found[bound] = sums
        return [*(found[bound] for bound in bounds), sums + self.counts[-1]]


def sum_of(histograms: Sequence[Histogram], bounds: tuple[float, ...]) -> Histogram:
    """The values of several histograms with these bounds."""
    result = Histogram(bounds)
    for each in histograms:
        result.add(each)
    return result
