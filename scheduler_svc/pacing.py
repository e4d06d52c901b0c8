"""When to send the next plan: as late as keeps the executor busy.

A plan that is sent early shuts out whoever arrives before its step begins; one that is sent late leaves the executor
idle. So the running step's end is predicted, from below, out of the last steps' durations.
"""

from __future__ import annotations

from collections import deque

_HISTORY = 8
_CONFIDENCE = 0.7
_MARGIN_S = 0.004


class StepPacer:
    """Predicts step durations; times in seconds on the engine's clock."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_HISTORY)
        self._running_since = 0.0

    def started(self, now: float) -> None:
        """The executor has begun the oldest plan in flight."""
        self._running_since = now

    def observe(self, num_tokens: int, duration: float) -> None:
        """A step of this many tokens took this long on the executor."""
        self._steps.append((max(1, num_tokens), duration))

    def predict(self, num_tokens: int) -> float:
        """A duration that a step of this many tokens will hardly undercut; 0 when nothing is known."""
        if not self._steps:
            return 0.0
        return min(duration * min(1.0, num_tokens / tokens) for tokens, duration in self._steps)

    def due(self, num_tokens: int) -> float:
        """When the next plan should go out, with a step of `num_tokens` running."""
        return self._running_since + max(0.0, _CONFIDENCE * self.predict(num_tokens) - _MARGIN_S)
