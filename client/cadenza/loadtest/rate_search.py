"""The search for the highest rate that holds: by factors of two, then by halving the gap on a logarithmic scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_FACTOR = 1024.0
"""The search goes no further than this from where it began, either way."""


@dataclass(slots=True)
class RateSearch:
    """Ask `next_rate`, try it, `tell` whether it held; until there is no next. Rates in requests per second.

    A rate that failed once counts as failed: above it nothing is tried again.
    """

    start: float
    tolerance: float = 0.05
    """The search ends when the lowest rate that failed is at most this share above the highest that held."""
    held: float | None = field(default=None, init=False)
    """The highest rate that has held so far."""
    failed: float | None = field(default=None, init=False)
    """The lowest rate that has failed so far."""

    def next_rate(self) -> float | None:
        """What to try now; None: the search is over, and `held` is its answer (None: not even the lowest one held)."""
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
        """What became of a rate."""
        if held:
            self.held = rate if self.held is None else max(self.held, rate)
        else:
            self.failed = rate if self.failed is None else min(self.failed, rate)
