"""Measured cost of computing tokens and of moving blocks on one executor."""

from __future__ import annotations

_DECAY = 0.9
"""Weight of earlier observations after each new one."""


class _DecayingMean:
    """An exponentially weighted mean: each observation weighs a tenth less than the next."""

    __slots__ = ("_ns", "_size", "_weight")

    def __init__(self) -> None:
        self._weight = self._size = self._ns = 0.0

    def add(self, size: int, ns: int) -> None:
        self._weight = _DECAY * self._weight + 1
        self._size = _DECAY * self._size + size
        self._ns = _DECAY * self._ns + ns

    @property
    def point(self) -> tuple[float, float]:
        """Mean size and mean nanoseconds."""
        return self._size / self._weight, self._ns / self._weight


class MeasuredRates:
    """Nanoseconds that one more token adds to a step, and nanoseconds per block moved.

    A step of one token may take as long as one of a hundred, because weights are read once for all of them. So the
    cost of a token is its marginal cost: the slope of a line (ordinary least squares) through the mean steps of each
    size class, one class per power of two, in which newer steps weigh more. Classes keep their means while other
    sizes run, so many decodes do not erase the cost of prompts. A slope below 0 counts as 0. While all steps have one
    size, a token costs its share of a step, which is an upper bound.

    Until both are measured, moving blocks counts as cheaper: it discards nothing, and measures the cost of a move.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _DecayingMean] = {}
        """By the number of bits of a step's tokens."""
        self._moves: _DecayingMean | None = None
        self._line: tuple[float, float] | None = None
        """Cached slope and intercept; None: to be recomputed."""

    def observe(self, num_tokens: int, num_moved_blocks: int, device_ns: int, moves_ns: int) -> None:
        """Add a result: `num_tokens` computed in `device_ns`, `num_moved_blocks` swapped in `moves_ns`.

        Pass 0 blocks for a step that also copied blocks within the device pool: copies cost next to nothing, and
        `moves_ns` does not separate them.
        """
        if num_tokens > 0 and device_ns > 0:
            size = num_tokens.bit_length()
            if size not in self._steps:
                self._steps[size] = _DecayingMean()
            self._steps[size].add(num_tokens, device_ns)
            self._line = None
        if num_moved_blocks > 0 and moves_ns > 0:
            if self._moves is None:
                self._moves = _DecayingMean()
            self._moves.add(num_moved_blocks, moves_ns)

    @property
    def line(self) -> tuple[float, float]:
        """`ns_per_token`, and the cost of a step beside its tokens; 0 before the first measurement."""
        return self._fitted() or (0.0, 0.0)

    @property
    def ns_per_token(self) -> float | None:
        """Marginal cost of one token in a step; None before the first measurement."""
        line = self._fitted()
        return None if line is None else line[0]

    @property
    def ns_per_block(self) -> float | None:
        """Cost of moving a block between device and host, one way; None before the first measurement."""
        if self._moves is None:
            return None
        num_blocks, ns = self._moves.point
        return ns / num_blocks

    @property
    def costs(self) -> tuple[float, float] | None:
        """`ns_per_token` and `ns_per_block`; None before both are measured."""
        ns_per_token, ns_per_block = self.ns_per_token, self.ns_per_block
        return None if ns_per_token is None or ns_per_block is None else (ns_per_token, ns_per_block)

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether moving blocks out and back takes less time than recomputing the tokens."""
        return self._cheaper(num_tokens, 2 * num_blocks)

    def swap_in_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether moving blocks in takes less time than computing the tokens."""
        return self._cheaper(num_tokens, num_blocks)

    def _fitted(self) -> tuple[float, float] | None:
        if self._line is None and self._steps:
            self._line = _line([mean.point for mean in self._steps.values()])
        return self._line

    def _cheaper(self, num_tokens: int, num_moves: int) -> bool:
        costs = self.costs
        if costs is None:
            return True
        ns_per_token, ns_per_block = costs
        return num_moves * ns_per_block < num_tokens * ns_per_token


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line through (size, ns) points, neither below 0.

    A single point is joined to the origin.
    """
    if len(points) == 1:
        ((size, ns),) = points
        return ns / size, 0.0
    mean_size = sum(size for size, _ in points) / len(points)
    mean_ns = sum(ns for _, ns in points) / len(points)
    covariance = sum((size - mean_size) * (ns - mean_ns) for size, ns in points)
    slope = max(0.0, covariance / sum((size - mean_size) ** 2 for size, _ in points))
    return slope, max(0.0, mean_ns - slope * mean_size)
