"""How many executors there should be, by the scheduler's own figures. Pure: time comes in as an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

FULL = 0.75
"""The part of the sequences of a step up to which an executor is loaded: the rest is for what comes meanwhile."""


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """What the scheduler says."""

    num_requests: int
    """That run, wait or are swapped out."""
    num_waiting: int
    max_num_seqs: int
    """Sequences that one executor can run at once; 0: not known."""

    def __str__(self) -> str:
        return f"{self.num_requests} requests, {self.num_waiting} of them wait"


class Scaling:
    """Decides when an executor more is needed, and when one less will do.

    More are needed at once, up to what the load asks for, when it has asked for `up_after_s`. One less will do when
    fewer would have done for `down_after_s`; after that the time begins anew, so they go one by one.
    """

    def __init__(self, least: int, most: int, up_after_s: float, down_after_s: float) -> None:
        self._least, self._most = least, most
        self._up_after_s, self._down_after_s = up_after_s, down_after_s
        self._more_since: float | None = None
        self._fewer_since: float | None = None

    def wanted(self, count: int, num_starting: int, load: ReportedLoad, now: float) -> int:
        """Return how many executors there should be. `count`: how many run or start now."""
        asked = self._asked(count, num_starting, load)
        self._more_since = _since(self._more_since, asked > count, now)
        self._fewer_since = _since(self._fewer_since, asked < count, now)
        if self._more_since is not None and now - self._more_since >= self._up_after_s:
            self._more_since = None
            return asked
        if self._fewer_since is not None and now - self._fewer_since >= self._down_after_s:
            self._fewer_since = None
            return count - 1
        return count

    def _asked(self, count: int, num_starting: int, load: ReportedLoad) -> int:
        """Return the number for the load, within the limits; `count` while nothing is known."""
        if not load.max_num_seqs:
            return count
        asked = math.ceil(load.num_requests / (FULL * load.max_num_seqs))
        if load.num_waiting and not num_starting:
            # They wait for memory, if not for places.
            asked = max(asked, count + 1)
        return min(max(asked, self._least), self._most)


def _since(since: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if since is None else since
