"""What changes in rows of logits before a token is chosen, as flat lists. `logits_processors` says what each means."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from executor_svc.plan.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Tokens of rows as a flat list of pairs, in no particular order; no pair twice where a value belongs to it."""

    rows: IntArray
    """[n]."""
    ids: IntArray
    """[n]."""

    @classmethod
    def none(cls) -> RowTokens:
        """No pair."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class LogitsEdits:
    """What changes in the logits of P rows of a batch. The rows of pairs are indices into `rows`."""

    rows: IntArray
    """[P] rows of the batch, ascending."""
    allowed: RowTokens
    """All that may be chosen, in those rows that occur here."""
    forbidden: RowTokens
    """Must not be chosen."""
    biased: RowTokens
    biases: FloatArray
    """One for each pair of `biased`."""
    counted: RowTokens
    """The distinct tokens of penalised histories."""
    counts: FloatArray
    """Of each pair of `counted`: occurrences in the output."""
    repetition_penalty: FloatArray
    """Of each pair of `counted`; the next two alike."""
    frequency_penalty: FloatArray
    presence_penalty: FloatArray
