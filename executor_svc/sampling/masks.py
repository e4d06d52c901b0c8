"""Masks of grammars: which tokens each row of a step may choose, as bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor_svc.plan.arrays import BoolArray, IntArray

Words = NDArray[np.uint32]
_WORD_BITS = 32


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
