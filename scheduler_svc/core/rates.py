"""What computing tokens and moving blocks cost on one executor, as its results tell."""

from __future__ import annotations

_DECAY = 0.9
"""How much of the past counts after each observation."""
_MIN_TOKENS = 16
"""Of a step that tells what a token costs: in a smaller one it is mostly the step itself that is paid for."""
_GUESSED_BYTES_PER_NS = 4.0
"""4 GB/s between device and host, a guess on the low side, until a move is measured."""
_GUESSED_BYTES_PER_BLOCK = 1 << 20
"""Where the executor does not say; a small model's."""


class MeasuredRates:
    """Nanoseconds per token computed and per block moved: quotients of sums that decay with every step.

    A quotient of sums weighs a step by its size, so that the long steps of prefills count for more than short ones.
    """

    def __init__(self, bytes_per_block: int = 0) -> None:
        self._prior_ns_per_block = (bytes_per_block or _GUESSED_BYTES_PER_BLOCK) / _GUESSED_BYTES_PER_NS
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
    def ns_per_block(self) -> float:
        """Of moving between device and host, one way."""
        return self._moves_ns / self._num_moved_blocks if self._num_moved_blocks else self._prior_ns_per_block

    def swap_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Do so many blocks move out and back in less time than so many tokens are computed again?

        Yes before computing was measured: a swap throws nothing away.
        """
        return self._cheaper(num_tokens, 2 * num_blocks)

    def swap_in_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Do so many blocks move in, in less time than so many tokens are computed? Yes before that was measured."""
        return self._cheaper(num_tokens, num_blocks)

    def _cheaper(self, num_tokens: int, num_moves: int) -> bool:
        ns_per_token = self.ns_per_token
        return ns_per_token is None or num_moves * self.ns_per_block < num_tokens * ns_per_token
