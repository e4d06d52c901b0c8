"""What computing tokens and moving blocks cost on one executor, as its results tell."""

from __future__ import annotations

_DECAY = 0.9
"""How much of the past counts after each observation."""


class _Mean:
    """A mean in which each observation counts for a tenth less than the next."""

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
    """Nanoseconds that a token more adds to a step, and nanoseconds per block moved.

    A step of one token may take as long as one of a hundred: weights are read once for all of them. So a token costs
    what a step grows by with it: the slope of a line (ordinary least squares) through the mean steps of each size, one
    for each power of two, in which newer steps count for more. Sizes that have not been seen for long keep theirs: a
    stretch of decodes does not forget what prompts took. A slope below 0 counts as 0. While all steps were of one
    size, a token costs its share of a step, which is the most that it can cost.

    Before both are measured blocks are moved: that throws nothing away, and tells what a move costs.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _Mean] = {}
        """By the number of bits of a step's tokens."""
        self._moves: _Mean | None = None
        self._ns_per_token: float | None = None
        """Of the newest steps; None: make it anew."""

    def observe(self, num_tokens: int, num_moved_blocks: int, device_ns: int, moves_ns: int) -> None:
        """Take in what a result says: tokens computed in `device_ns`, blocks swapped in `moves_ns`.

        Leave the moves of a step out (0 blocks) if it copied blocks within the device pool too: those cost next to
        nothing, and their time is not told apart.
        """
        if num_tokens > 0 and device_ns > 0:
            size = num_tokens.bit_length()
            if size not in self._steps:
                self._steps[size] = _Mean()
            self._steps[size].add(num_tokens, device_ns)
            self._ns_per_token = None
        if num_moved_blocks > 0 and moves_ns > 0:
            if self._moves is None:
                self._moves = _Mean()
            self._moves.add(num_moved_blocks, moves_ns)

    @property
    def ns_per_token(self) -> float | None:
        """That a token more adds to a step; None before anything was measured."""
        if self._ns_per_token is None and self._steps:
            self._ns_per_token = _slope([mean.point for mean in self._steps.values()])
        return self._ns_per_token

    @property
    def ns_per_block(self) -> float | None:
        """Of moving between device and host, one way; None before it was measured."""
        if self._moves is None:
            return None
        num_blocks, ns = self._moves.point
        return ns / num_blocks

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Do so many blocks move out and back in less time than so many tokens are computed again?"""
        return self._cheaper(num_tokens, 2 * num_blocks)

    def swap_in_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Do so many blocks move in, in less time than so many tokens are computed?"""
        return self._cheaper(num_tokens, num_blocks)

    def _cheaper(self, num_tokens: int, num_moves: int) -> bool:
        ns_per_token, ns_per_block = self.ns_per_token, self.ns_per_block
        if ns_per_token is None or ns_per_block is None:
            return True
        return num_moves * ns_per_block < num_tokens * ns_per_token


def _slope(points: list[tuple[float, float]]) -> float:
    """Of the line nearest to all of these sizes and times, or from 0 through the only one."""
    if len(points) == 1:
        ((size, ns),) = points
        return ns / size
    mean_size = sum(size for size, _ in points) / len(points)
    mean_ns = sum(ns for _, ns in points) / len(points)
    covariance = sum((size - mean_size) * (ns - mean_ns) for size, ns in points)
    return max(0.0, covariance / sum((size - mean_size) ** 2 for size, _ in points))
