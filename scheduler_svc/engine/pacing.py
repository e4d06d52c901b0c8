"""When to send the next plan: as late as keeps the executor busy.

A plan that is sent early shuts out whoever arrives before its step begins; one that is sent late leaves the executor
idle. So the running step's end is predicted, from below, out of the durations of the last steps of its size.
"""

from __future__ import annotations

from collections import deque

_HISTORY = 4
_CONFIDENCE = 0.7
_MARGIN_S = 0.004


class StepPacer:
    """Predicts step durations; times in seconds on the engine's clock.

    Steps are kept by size, a power of two for each: a step of a few tokens hardly takes less than another, but one of
    a few after a prompt of thousands does, if not by as much as it has fewer tokens.
    """

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[int, float]]] = {}
        """By the number of bits of their tokens: tokens and durations."""
        self._running_since = 0.0

    def started(self, now: float) -> None:
        """The executor has begun the oldest plan in flight."""
        self._running_since = now

    def observe(self, num_tokens: int, duration: float) -> None:
        """A step of this many tokens took this long on the executor."""
        num_tokens = max(1, num_tokens)
        size = num_tokens.bit_length()
        if size not in self._steps:
            self._steps[size] = deque(maxlen=_HISTORY)
        self._steps[size].append((num_tokens, duration))

    def predict(self, num_tokens: int) -> float:
        """A duration that a step of this many tokens will hardly undercut; 0 when nothing is known.

        A step takes no less than one of fewer tokens, and no less than its share of one of more. Of the last steps of
        its size the least of this counts; of other sizes, where none of its own was seen, the most.
        """
        alike = self._steps.get(max(1, num_tokens).bit_length())
        if alike is not None:
            return _least(alike, num_tokens)
        return max((_least(steps, num_tokens) for steps in self._steps.values()), default=0.0)

    def due(self, num_tokens: int) -> float:
        """When the next plan should go out, with a step of `num_tokens` running."""
        return self._running_since + max(0.0, _CONFIDENCE * self.predict(num_tokens) - _MARGIN_S)


def _least(steps: deque[tuple[int, float]], num_tokens: int) -> float:
    """What each of these says that a step of this many tokens takes at least: the least of it."""
    return min(duration if num_tokens >= tokens else duration * num_tokens / tokens for tokens, duration in steps)
