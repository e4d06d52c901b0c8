"""What came of a simulated fleet: percentiles, goodput and cost.

Durations are counted in bins of equal ratio: percentiles of billions of values in a few kilobytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from cadenza_loadtest.requests import Floats, Ints

_MARKS = (50, 95, 99)


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


@dataclass(frozen=True, slots=True)
class Objective:
    """The limits that a good request keeps, in seconds."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf


@dataclass(slots=True)
class Tally:
    """Counts of a run; requests are counted in the hour in which they are due."""

    objectives: tuple[Objective, ...]
    """The first one is that of the summary."""
    num_hours: int
    ttft: LogHistogram = field(default_factory=LogHistogram)
    tpot: LogHistogram = field(default_factory=LogHistogram)
    gaps: LogHistogram = field(default_factory=LogHistogram)
    e2e: LogHistogram = field(default_factory=LogHistogram)
    num_due: int = 0
    num_refused: int = 0
    num_ended: int = 0
    num_restarted: int = 0
    """Requests that lost their executor, each time."""
    num_preemptions: int = 0
    num_failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    good_tokens: int = 0
    busy_s: float = 0.0
    """Time of steps, over all executors."""
    good: Ints = field(init=False)
    """[objectives] requests that kept them."""
    hourly_due: Ints = field(init=False)
    hourly_good: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Empty counts."""
        self.good = np.zeros(len(self.objectives), np.int64)
        self.hourly_due = np.zeros(self.num_hours, np.int64)
        self.hourly_good = np.zeros(self.num_hours, np.int64)

    def arrived(self, due_s: Floats) -> None:
        """Requests [n] are due."""
        self.num_due += len(due_s)
        self.hourly_due += np.bincount(self._hours(due_s), minlength=self.num_hours)

    def ended(self, due_s: Floats, first_s: Floats, last_s: Floats, output: Ints) -> None:
        """Requests [n] have ended: when the client sent them and had the first and the last token."""
        ttft_s, tpot_s = first_s - due_s, (last_s - first_s) / np.maximum(1, output - 1)
        self.num_ended += len(due_s)
        self.output_tokens += int(output.sum())
        self.ttft.add(ttft_s)
        self.tpot.add(tpot_s[output > 1])
        self.e2e.add(last_s - due_s)
        for place, objective in enumerate(self.objectives):
            kept = (ttft_s <= objective.ttft_s) & (tpot_s <= objective.tpot_s)
            self.good[place] += int(kept.sum())
            if not place:
                self.good_tokens += int(output[kept].sum())
                self.hourly_good += np.bincount(self._hours(due_s[kept]), minlength=self.num_hours)

    def _hours(self, due_s: Floats) -> Ints:
        return np.minimum(due_s // 3600, self.num_hours - 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The outcome of a run."""

    tally: Tally
    num_executors: int
    duration_s: float
    """Time of arrivals."""
    price: float = 0.0
    """Of an executor for an hour."""

    @property
    def good_share(self) -> float:
        """Share of all requests that kept the first objective; one that was refused or did not end did not."""
        return int(self.tally.good[0]) / max(1, self.tally.num_due)

    def cost_per_million(self, tokens: int) -> float:
        """Price of all executors for the whole time, over this many tokens."""
        return self.price * self.num_executors * self.duration_s / 3600 / max(tokens, 1) * 1e6

    def summary(self) -> dict[str, float]:
        """Numbers by name, with their units."""
        tally = self.tally
        found = {
            "requests": float(tally.num_due),
            "refused": float(tally.num_refused),
            "unfinished": float(tally.num_due - tally.num_refused - tally.num_ended),
            "good_share": self.good_share,
            "goodput_per_s": int(tally.good[0]) / self.duration_s,
            "output_tokens_per_s": tally.output_tokens / self.duration_s,
            "cached_share": tally.cached_tokens / max(1, tally.prompt_tokens),
            "busy_share": tally.busy_s / (self.num_executors * self.duration_s),
            "preemptions": float(tally.num_preemptions),
            "failures": float(tally.num_failures),
            "restarted": float(tally.num_restarted),
        }
        for name, times in (("ttft", tally.ttft), ("tpot", tally.tpot), ("itl", tally.gaps), ("e2e", tally.e2e)):
            found |= {f"{name}_p{mark}_ms": 1000 * times.percentile(mark) for mark in _MARKS}
        if self.price:
            found["cost_per_million_tokens"] = self.cost_per_million(tally.output_tokens)
            found["cost_per_million_good_tokens"] = self.cost_per_million(tally.good_tokens)
        return found


_LOW_S, _HIGH_S, _RATIO = 1e-5, 1e6, 1.01
