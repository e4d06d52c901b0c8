"""What policies remember of one executor: counters of batching, and how often sequences finish."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.9
"""Weight of earlier finishes after each new one."""


class Turnover:
    """The mean time between two finishes, in which newer ones weigh more. Times are in seconds."""

    __slots__ = ("_interval_s", "_last")

    def __init__(self) -> None:
        self._interval_s: float | None = None
        self._last: float | None = None

    def observe(self, num_finished: int, now: float) -> None:
        """Record that this many sequences finished now, since the last call that named any."""
        if self._last is not None:
            each = max(0.0, now - self._last) / num_finished
            for _ in range(min(num_finished, 16)):
                self._interval_s = each if self._interval_s is None else _DECAY * self._interval_s + (1 - _DECAY) * each
        self._last = now

    def pause(self) -> None:
        """Nothing runs: the time until the next finish says nothing."""
        self._last = None

    @property
    def interval_s(self) -> float | None:
        """Mean seconds between two finishes; None before the second."""
        return self._interval_s


@dataclass(slots=True)
class BatchingState:
    """Counters of the batching policies; each uses its own."""

    num_held_back: int = 0
    """Continuous batching: steps since waiting groups were last admitted."""
    num_unfilled: int = 0
    """Static batching: groups of the running batch not admitted yet, as its prompts may need several steps."""
    closed_by_memory: bool = False
    """Static batching: the last batch was closed because memory was full."""
