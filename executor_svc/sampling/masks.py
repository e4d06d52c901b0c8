"""Masks of grammars: which tokens each row of a step may choose, as bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor_svc.plan.arrays import BoolArray, FloatArray, IntArray

Words = NDArray[np.uint32]
_WORD_BITS = 32


_FEW_WORDS = 256
"""Up to so many words with a bit it is faster to look at their tokens alone."""
_MOST_PASSED = 4
"""Largest numbers without a bit that are passed over before all are looked at."""


def best_allowed(x: FloatArray, words: Words) -> int:
    """Return the lowest id of the largest number that has a bit; -1 if all of these are -inf, or there are none.

    x: [vocab] float32, without NaN and +inf; unchanged when this returns. words: [num_mask_words].
    """
    (places,) = words.nonzero()
    best = _first_allowed(x, words) if len(places) > _FEW_WORDS else -1
    if best < 0:
        (at,) = np.unpackbits(words[places].view(np.uint8), bitorder="little").view(np.bool_).nonzero()
        ids = places[at // _WORD_BITS] * _WORD_BITS + at % _WORD_BITS
        ids = ids[: np.searchsorted(ids, len(x))]
        best = int(ids[x[ids].argmax()]) if len(ids) else -1
    return best if best >= 0 and np.isfinite(x[best]) else -1


def _first_allowed(x: FloatArray, words: Words) -> int:
    """Return the largest number's id if it is among the largest few of all; else -1. Most bits are set in a text."""
    passed: list[tuple[int, np.float32]] = []
    found = -1
    for _ in range(_MOST_PASSED):
        best = int(x.argmax())
        if words[best // _WORD_BITS] >> np.uint32(best % _WORD_BITS) & 1:
            found = best
            break
        passed.append((best, x[best]))
        x[best] = -np.inf
    for best, value in passed:
        x[best] = value
    return found


def num_mask_words(vocab_size: int) -> int:
    """Return the number of words of a mask: bit i % 32 of word i // 32 is that of token i."""
    return -(-vocab_size // _WORD_BITS)


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of a step's Q rows, of which some have none."""

    rows: IntArray
    """[m] rows with a mask, ascending."""
    bits: Words
    """[m, num_mask_words]."""
    late: BoolArray
    """[Q]: whether the row's mask is not there yet, so that it gives no token in this step."""
    failed: BoolArray
    """[Q]: whether the row's grammar has failed: at a limit, or because it does not allow the tokens that are there."""

    def take(self, rows: IntArray) -> RowMasks:
        """Return the masks of some rows [n], in ascending order, as rows 0 to n - 1."""
        kept = np.isin(self.rows, rows)
        return RowMasks(np.searchsorted(rows, self.rows[kept]), self.bits[kept], self.late[rows], self.failed[rows])

    @property
    def is_masked(self) -> BoolArray:
        """[Q]: whether the row has a mask."""
        masked = np.zeros(len(self.late), np.bool_)
        masked[self.rows] = True
        return masked

    def allow(self, tokens: IntArray) -> BoolArray:
        """Return [m]: whether each of rows may choose its token; tokens: [m], -1 for none, which is not allowed."""
        word = self.bits[np.arange(len(tokens)), np.maximum(tokens, 0) // _WORD_BITS]
        allowed: BoolArray = ((word >> (np.maximum(tokens, 0) % _WORD_BITS).astype(np.uint32)) & 1).astype(np.bool_)
        return allowed & (tokens >= 0)
