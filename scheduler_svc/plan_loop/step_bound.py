"""How long a step may take: an upper estimate from the steps that have run, to find one that hangs.

The pacer's estimate is a lower one, for sending plans early enough; see pacing.
"""

from __future__ import annotations

from collections import deque

UNKNOWN_S = 10.0
"""The estimate before any step has run."""
_HISTORY = 8


class StepBound:
    """Estimates step durations from above. Times are in seconds.

    A step's duration is taken to be a sum of parts that do not shrink with its work: a constant, a part for each
    computed token, a part for each context token. Then a step with at most twice the tokens and twice the context of
    another takes at most twice as long.

    Steps are grouped by size, one group per power of two of each count. A group is represented by its second-longest
    recent step, so that one slow step (a page fault, a suspended process, a hang that ended) does not count.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], deque[tuple[int, int, float]]] = {}
        """By the bit lengths of both counts: (tokens, context tokens, seconds) of recent steps."""

    def observe(self, num_tokens: int, num_context_tokens: int, seconds: float) -> None:
        """Record that a step of `num_tokens` computed tokens, which attend to `num_context_tokens`, took this long."""
        num_tokens, num_context_tokens = max(1, num_tokens), max(1, num_context_tokens)
        group = self._steps.setdefault(_size(num_tokens, num_context_tokens), deque(maxlen=_HISTORY))
        group.append((num_tokens, num_context_tokens, seconds))

    def predict(self, num_tokens: int, num_context_tokens: int) -> float:
        """An upper estimate of a step's duration; it never falls when one of the counts grows.

        It is the least duration that the other groups' steps imply for a step of this size. Steps that were not larger
        raise it where they took longer than that: other work than tokens (block moves, logprobs) took their time.
        """
        if not self._steps:
            return UNKNOWN_S
        num_tokens, num_context_tokens = max(1, num_tokens), max(1, num_context_tokens)
        implied = min(_implied(steps, num_tokens, num_context_tokens) for steps in self._steps.values())
        size = _size(num_tokens, num_context_tokens)
        seen = (
            _second_longest([seconds for _, _, seconds in steps])
            for (tokens, context), steps in self._steps.items()
            # A single step may be the slow one.
            if tokens <= size[0] and context <= size[1] and len(steps) > 1
        )
        return max(implied, max(seen, default=0.0))


def _size(num_tokens: int, num_context_tokens: int) -> tuple[int, int]:
    return num_tokens.bit_length(), num_context_tokens.bit_length()


def _implied(steps: deque[tuple[int, int, float]], num_tokens: int, num_context_tokens: int) -> float:
    """The duration that a group of steps implies for a step of these counts."""
    return _second_longest(
        [
            seconds * max(1.0, num_tokens / tokens, num_context_tokens / context_tokens)
            for tokens, context_tokens, seconds in steps
        ]
    )


def _second_longest(durations: list[float]) -> float:
    """The second-longest duration; a single duration counts as such."""
    return sorted(durations)[-2:][0]
