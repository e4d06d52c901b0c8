"""When to send the next plan: as late as possible without letting the executor idle.

Requests that arrive after a plan was sent miss its step, so plans should be late; a plan that is too late leaves the
executor idle. So a lower bound of the running step's duration is predicted from recent steps of similar size.
"""

from __future__ import annotations

from collections import deque

_HISTORY = 4
CONFIDENCE = 0.7
MARGIN_S = 0.004


class StepPacer:
    """Predicts step durations. Times are in seconds on the engine's clock.

    Steps are grouped by size, one group per power of two: steps of similar size take similar time, while a decode step
    takes less than a step with a prompt of thousands of tokens, though not in proportion.
    """

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[int, float]]] = {}
        """By the bit length of the number of tokens: (tokens, seconds) of recent steps."""
        self._running_since = 0.0

    def started(self, now: float) -> None:
        """Record that the executor starts the oldest plan in flight now."""
        self._running_since = now

    def ended(self, num_tokens: int, duration: float, now: float) -> None:
        """Record that the oldest step ended, and that the executor goes on with the next one now.

        duration: seconds from the step's launch. A step that was launched while another one ran waited for it, and took
        no longer than the time since then.
        """
        self.observe(num_tokens, min(duration, max(0.0, now - self._running_since)))
        self.started(now)

    def observe(self, num_tokens: int, duration: float) -> None:
        """Record that a step of `num_tokens` took `duration` seconds on the executor."""
        num_tokens = max(1, num_tokens)
        size = num_tokens.bit_length()
        if size not in self._steps:
            self._steps[size] = deque(maxlen=_HISTORY)
        self._steps[size].append((num_tokens, duration))

    def predict(self, num_tokens: int) -> float:
        """A lower estimate of a step's duration in seconds; 0 without observations.

        Assumes that a step takes at least as long as one with fewer tokens, and at least its share of one with more.
        The estimate is the minimum over recent steps of its size group; without any, the maximum over the other
        groups.
        """
        alike = self._steps.get(max(1, num_tokens).bit_length())
        if alike is not None:
            return _least(alike, num_tokens)
        return max((_least(steps, num_tokens) for steps in self._steps.values()), default=0.0)

    def due(self, num_tokens: int) -> float:
        """When to send the next plan while a step of `num_tokens` is running."""
        return self._running_since + max(0.0, CONFIDENCE * self.predict(num_tokens) - MARGIN_S)


def _least(steps: deque[tuple[int, float]], num_tokens: int) -> float:
    """The smallest of the lower bounds that these steps give for a step of `num_tokens`."""
    return min(duration if num_tokens >= tokens else duration * num_tokens / tokens for tokens, duration in steps)
