"""What computing tokens and moving blocks cost on one executor, as its results tell."""

from __future__ import annotations

_DECAY = 0.9
"""How much of the past counts after each observation."""
_MIN_TOKENS = 16
"""Of a step that tells what a token costs: in a smaller one it is mostly the step itself that is paid for."""


class MeasuredRates:
    """Nanoseconds per token computed and per block moved: quotients of sums that decay with every step.

    A quotient of sums weighs a step by its size, so that the long steps of prefills count for more than short ones.
    Before both are measured blocks are moved: that throws nothing away, and tells what a move costs.
    """

    def __init__(self) -> None:
        self._compute_ns = 0.0
        self._num_tokens = 0.0
        self._moves_ns = 0.0
        self._num_moved_blocks = 0.0

    def observe(self, num_tokens: int, num_moved_blocks: int, device_ns: int, moves_ns: int) -> None:
        """Take in what a result says: tokens computed in `device_ns`, blocks swapped in `moves_ns`.

        Steps of less than 16 tokens say nothing of a token's cost. Leave the moves of a step out (0 blocks) if it
        copied blocks within the device pool too: those cost next to nothing, and their time is not told apart.
        """
        if num_tokens >= _MIN_TOKENS and device_ns > 0:
            self._compute_ns = _DECAY * self._compute_ns + device_ns
            self._num_tokens = _DECAY * self._num_tokens + num_tokens
        if num_moved_blocks > 0 and moves_ns > 0:
            self._moves_ns = _DECAY * self._moves_ns + moves_ns
            self._num_moved_blocks = _DECAY * self._num_moved_blocks + num_moved_blocks

    @property
    def ns_per_token(self) -> float | None:
        """Of computing; None before it was measured."""
        return self._compute_ns / self._num_tokens if self._num_tokens else None

    @property
    def ns_per_block(self) -> float | None:
        """Of moving between device and host, one way; None before it was measured."""
        return self._moves_ns / self._num_moved_blocks if self._num_moved_blocks else None

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
