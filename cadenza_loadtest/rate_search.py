"""The search for the highest rate that holds: by growing factors, then by halving the gap on a logarithmic scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_FACTOR = 1024.0
"""The largest factor between the start and any tried rate, in either direction."""
_LARGEST_STEP = 2.0


@dataclass(slots=True)
class RateSearch:
    """Try `next_rate` and `record` whether it held, until there is no next rate. Rates are in requests per second.

    A rate that failed once counts as failed: no higher rate is tried afterwards.
    """

    start: float
    tolerance: float = 0.05
    """The search ends when the lowest rate that failed is at most this share above the highest that held."""
    factor: float = _LARGEST_STEP
    """First factor between two rates while there is no bracket; each further factor is the square of the one before,
    2 at most. A small one suits a start that is close to the result."""
    held: float | None = field(default=None, init=False)
    """The highest rate that has held so far."""
    failed: float | None = field(default=None, init=False)
    """The lowest rate that has failed so far."""
    _num_recorded: int = field(default=0, init=False)

    def next_rate(self) -> float | None:
        """The rate to try next; None: the search is over and `held` is its result (None: not even the lowest rate
        held)."""
        if self.held is None and self.failed is None:
            return self.start
        if self.failed is None:
            assert self.held is not None
            return self._step * self.held if self.held < self.start * MAX_FACTOR else None
        if self.held is None:
            return self.failed / self._step if self.failed > self.start / MAX_FACTOR else None
        if self.failed <= self.held * (1 + self.tolerance):
            return None
        return math.sqrt(self.held * self.failed)

    def record(self, rate: float, held: bool) -> None:
        """Record whether a rate held."""
        self._num_recorded += 1
        if held:
            self.held = rate if self.held is None else max(self.held, rate)
        else:
            self.failed = rate if self.failed is None else min(self.failed, rate)

    def expected_trials(self) -> int:
        """Estimate of the number of trials that are left, 0 if the search is over."""
        if self.next_rate() is None:
            return 0
        if self.held is not None and self.failed is not None:
            return self._halvings(self.failed / self.held)
        return (1 if self._num_recorded else 2) + self._halvings(self._step)

    @property
    def _step(self) -> float:
        """The next factor, without a bracket."""
        logarithm = math.log(self.factor) * 2.0 ** max(0, self._num_recorded - 1)
        return _LARGEST_STEP if logarithm >= math.log(_LARGEST_STEP) else math.exp(logarithm)

    def _halvings(self, ratio: float) -> int:
        """How often a bracket of this ratio is halved until it is within the tolerance."""
        return max(0, math.ceil(math.log2(math.log(ratio) / math.log1p(self.tolerance)) - 1e-9))
