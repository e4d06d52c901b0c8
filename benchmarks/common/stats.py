"""The statistics that rows hold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile with linear interpolation between neighbours; `percent` is 0 to 100.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def medians(repeats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each metric over all repeats, which must have the same metrics; four significant digits."""
    return {name: float(f"{statistics.median(each[name] for each in repeats):.4g}") for name in repeats[0]}
