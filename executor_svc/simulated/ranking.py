"""Rankings of the vocabulary, and their probabilities, from hashes.

A ranking is an arithmetic progression modulo the vocabulary size, with start and stride from the hash. The stride has
no divisor in common with the size, so every token has exactly one rank, and token and rank follow from each other in
O(1).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor_svc.plan.arrays import IntArray
from executor_svc.simulated.hashing import U64

_NUM_STRIDES = 16


@functools.cache
def strides(vocab_size: int) -> tuple[U64, U64]:
    """Return (up to 16 strides without a divisor in common with vocab_size, their inverses modulo it)."""
    candidates = np.arange(1, max(2, vocab_size))
    coprime = candidates[np.gcd(candidates, vocab_size) == 1]
    # Spread over the whole vocabulary: with a small stride, neighbouring ranks would have neighbouring ids.
    chosen = coprime[np.unique(np.linspace(0, len(coprime) - 1, _NUM_STRIDES).astype(np.int64))]
    inverses = [pow(stride, -1, vocab_size) for stride in chosen.tolist()]
    return chosen.astype(np.uint64), np.array(inverses, np.uint64)


@dataclass(frozen=True, slots=True)
class Ranking:
    """The rankings of n rows: hashes [n]. Rank 0 is the most likely token."""

    hashes: U64
    vocab_size: int

    def tokens(self, rows: IntArray, ranks: IntArray) -> IntArray:
        """Return [m] the tokens at ranks of rows."""
        size = np.uint64(self.vocab_size)
        start, stride = self.hashes[rows] % size, strides(self.vocab_size)[0][self._stride(rows)]
        return ((start + stride * ranks.astype(np.uint64)) % size).astype(np.int64)

    def ranks(self, rows: IntArray, token_ids: IntArray) -> IntArray:
        """Return [m] the ranks of tokens in rows."""
        size = np.uint64(self.vocab_size)
        start, inverse = self.hashes[rows] % size, strides(self.vocab_size)[1][self._stride(rows)]
        ahead = token_ids.astype(np.uint64) + size - start
        return (ahead % size * inverse % size).astype(np.int64)

    def logprobs(self, rows: IntArray, ranks: IntArray) -> NDArray[np.float64]:
        """Return [m] the logprobs at ranks of rows; they fall with the rank, and a row's probabilities sum to 1.

        The best token has more than 1/2 and less than 9/10; rank r shares the rest by 1 / (r (r + 1)).
        """
        fraction = (self.hashes[rows] >> np.uint64(40)).astype(np.float64)
        first = 0.5 + 0.4 * (fraction + 1) / 2.0**24
        r = np.maximum(ranks, 1).astype(np.float64)
        share = (1 - first) * self.vocab_size / ((self.vocab_size - 1) * r * (r + 1))
        result: NDArray[np.float64] = np.log(np.where(ranks == 0, first, share))
        return result

    def _stride(self, rows: IntArray) -> IntArray:
        count = np.uint64(len(strides(self.vocab_size)[0]))
        return ((self.hashes[rows] >> np.uint64(32)) % count).astype(np.int64)
