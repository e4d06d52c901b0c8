"""The search for the highest rate that holds: by factors of two, then by halving the gap on a logarithmic scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_FACTOR = 1024.0
"""The largest factor between the start and any tried rate, in either direction."""


@dataclass(slots=True)
class RateSearch:
    """Try `next_rate` and `record` whether it held, until there is no next rate. Rates are in requests per second.

    A rate that failed once counts as failed: no higher rate is tried afterwards.
    """

    start: float
    tolerance: float = 0.05
    """The search ends when the lowest rate that failed is at most this share above the highest that held."""
    held: float | None = field(default=None, init=False)
    """The highest rate that has held so far."""
    failed: float | None = field(default=None, init=False)
    """The lowest rate that has failed so far."""

    def next_rate(self) -> float | None:
        """The rate to try next; None: the search is over and `held` is its result (None: not even the lowest rate
        held)."""
        if self.held is None and self.failed is None:
            return self.start
        if self.failed is None:
            assert self.held is not None
            return 2 * self.held if self.held < self.start * MAX_FACTOR else None
        if self.held is None:
            return self.failed / 2 if self.failed > self.start / MAX_FACTOR else None
        if self.failed <= self.held * (1 + self.tolerance):
            return None
        return math.sqrt(self.held * self.failed)

    def record(self, rate: float, held: bool) -> None:
        """Record whether a rate held."""
        if held:
            self.held = rate if self.held is None else max(self.held, rate)
        else:
            self.failed = rate if self.failed is None else min(self.failed, rate)
