"""Edits of logits rows before a token is chosen, as flat lists. `logits_processors` defines the meaning of each."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from executor_svc.plan.arrays import FloatArray, IntArray
from executor_svc.sampling.masks import Words


def _no_masks() -> Words:
    return np.zeros((0, 0), np.uint32)


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Tokens of rows as a flat list of (row, id) pairs in any order; a pair that has a value occurs once."""

    rows: IntArray
    """[n] the row of each pair."""
    ids: IntArray
    """[n] the token id of each pair."""

    @classmethod
    def none(cls) -> RowTokens:
        """Return an empty list of pairs."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class LogitsEdits:
    """Edits of the logits of P rows of a batch. The rows of pairs are indices into `rows`."""

    rows: IntArray
    """[P] rows of the batch, ascending."""
    allowed: RowTokens
    """The only tokens that may be chosen, for the rows that occur in this list."""
    forbidden: RowTokens
    """Tokens that must not be chosen."""
    biased: RowTokens
    biases: FloatArray
    """The bias of each pair of `biased`."""
    counted: RowTokens
    """The distinct tokens in the histories of rows with penalties."""
    counts: FloatArray
    """For each pair of `counted`: the token's occurrences in the output."""
    repetition_penalty: FloatArray
    """For each pair of `counted`, as are the next two."""
    frequency_penalty: FloatArray
    presence_penalty: FloatArray
    masked: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[m] indices into `rows`, ascending, of rows with a grammar's mask."""
    mask_bits: Words = field(default_factory=_no_masks)
    """[m, num_mask_words] their masks."""
