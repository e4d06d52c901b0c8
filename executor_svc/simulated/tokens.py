"""The simulated model in plain integers, one token after the other, without the executor's arrays.

A token costs O(1) by the two running sums of `hashing`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from executor_svc.sampling.splitmix64 import GAMMA, MASK, mix
from executor_svc.simulated.hashing import adapter_key


class SimulatedContext:
    """The state of the simulated model after a sequence of tokens."""

    def __init__(self, token_ids: Sequence[int] = (), adapter_hash: bytes = b"") -> None:
        """adapter_hash: the content of the sequence's adapter; empty: none."""
        self.length = 0
        self._adapter_key = adapter_key(adapter_hash)
        self._digest = 0
        self._sum = 0
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Append the next token."""
        token = mix((int(token_id) + GAMMA + self._adapter_key) & MASK)
        self._digest = (self._digest + mix((token + self.length * GAMMA) & MASK)) & MASK
        self._sum = (self._sum + mix((self._digest + _position_key(self.length)) & MASK)) & MASK
        self.length += 1

    def logits_hash(self) -> int:
        """Return the hash that represents the logits of the next token; the sequence must not be empty."""
        return mix((self._sum + GAMMA) & MASK)


def rank_logprob(logits_hash: int, rank: int, vocab_size: int) -> float:
    """Return the logprob at a rank, from 0: the best has 0.5 to 0.9, rank r 1 / (r (r + 1)) of the rest."""
    first = 0.5 + 0.4 * ((logits_hash >> 40) + 1) / 2.0**24
    if rank == 0:
        return math.log(first)
    return math.log((1 - first) * vocab_size / ((vocab_size - 1) * rank * (rank + 1)))


@functools.lru_cache(1 << 16)
def _position_key(position: int) -> int:
    return mix((position + GAMMA) & MASK)
