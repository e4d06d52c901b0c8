"""The tokens of a sequence with their counts, from which penalties are computed."""

from __future__ import annotations

import numpy as np

from executor_svc.batch.ragged import spans
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits


class TokenCounts:
    """The distinct tokens of each slot's history, and the occurrences of each in its output.

    A function of the sequence's token ids only: a readmitted sequence is counted again from them. Only slots that are
    counted write to pages of the tables.
    """

    def __init__(self, limits: Limits) -> None:
        n, width = limits.num_slots, min(limits.vocab_size, limits.max_model_len + 1)
        # 0: not in the history; else 1 + occurrences in the output.
        self._table = np.zeros((n, limits.vocab_size), np.int32)
        # The ids whose entry in the table is not 0, so that neither a step nor an admission scans the vocabulary.
        self._ids = np.zeros((n, width), np.int32)
        self._num_ids = np.zeros(n, np.int64)

    def restart(self, slot: int, prompt: IntArray, output: IntArray) -> None:
        """Set a slot's history to these tokens; prompt may be empty where only the output counts."""
        table = self._table[slot]
        table[self._ids[slot, : self._num_ids[slot]]] = 0
        ids = np.unique(np.concatenate((prompt, output)))
        table[ids] = 1
        np.add.at(table, output, 1)
        self._ids[slot, : len(ids)] = ids
        self._num_ids[slot] = len(ids)

    def add(self, slots: IntArray, token_ids: IntArray) -> None:
        """Add an output token to each of these slots, no slot twice; [n] each."""
        before = self._table[slots, token_ids]
        self._table[slots, token_ids] = np.maximum(before, 1) + 1
        fresh = before == 0
        slots, token_ids = slots[fresh], token_ids[fresh]
        self._ids[slots, self._num_ids[slots]] = token_ids
        self._num_ids[slots] += 1

    def read(self, slots: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return (index into slots, token id, occurrences in the output) of every distinct token, slot by slot."""
        owner, places = spans(slots * self._ids.shape[1], self._num_ids[slots])
        ids = self._ids.reshape(-1)[places].astype(np.int64)
        return owner, ids, self._table[slots[owner], ids].astype(np.int64) - 1
