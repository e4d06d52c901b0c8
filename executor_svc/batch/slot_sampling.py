"""Sampling parameters of each slot, in arrays with a row per slot; token lists and token counts of the slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cadenza_common.plan.plan import AdmittedSequence
from cadenza_common.plan.sampling import COLUMNS, Need
from executor_svc.batch.ragged import SlotLists, spans
from executor_svc.plan.arrays import BoolArray, IntArray, ints
from executor_svc.plan.limits import Limits
from executor_svc.plan.sampling import column_names, needs_of, stored


class SlotSampling:
    """Sampling parameters of all slots, and the token counts that penalties need."""

    def __init__(self, limits: Limits) -> None:
        n = limits.num_slots
        self._limits = limits
        self._numbers = {column.name: np.full(n, column.off, column.dtype) for column in COLUMNS.values()}
        self._on = {need: np.zeros(n, np.bool_) for need in Need}
        self.processed = np.zeros(n, np.bool_)
        """Whether a slot's logits may be edited before a token is chosen; other slots are skipped."""
        self.greedy = np.zeros(n, np.bool_)
        """Whether a slot's token is the most likely one of its unedited logits, without logprobs or candidates."""
        self.stop_ids = SlotLists(n, np.int32)
        self._may_stop = np.zeros(limits.vocab_size, np.bool_)
        """Of each token: whether it is a stop id of a slot, or was one of an earlier sequence's since `clear`."""
        self.allowed_ids = SlotLists(n, np.int32)
        self.biases = SlotLists(n, np.int32, np.float32)
        # The concatenated tokens of a slot's words, and the number of tokens of the word that follow each.
        self.bad_words = SlotLists(n, np.int32, np.int32)
        self._counts: TokenCounts | None = None
        self._last: tuple[IntArray, tuple[Need, ...], dict[str, Any]] | None = None
        """What `rows` returned last, for the same slots: they come again in every step that lets all go on."""

    def admit(self, sequence: AdmittedSequence) -> None:
        """Store a sequence's parameters, which are checked already, and count its tokens if it has penalties."""
        slot, sampling, self._last = sequence.slot, sequence.sampling, None
        numbers = stored(sampling)
        for name, value in numbers.items():
            self._numbers[name][slot] = value
        needs = needs_of(numbers)
        for need, on in self._on.items():
            on[slot] = need in needs
        self.stop_ids.put(slot, sampling.stop_token_ids)
        self._may_stop[ints(sampling.stop_token_ids)] = True
        self.allowed_ids.put(slot, sampling.allowed_token_ids)
        self.biases.put(slot, sampling.bias_token_ids, sampling.biases)
        self.bad_words.put(slot, *_joined(sampling.bad_words))
        if Need.COUNTS in needs:
            self._count_tokens(sequence)
        self.processed[slot] = bool(
            Need.COUNTS in needs
            or len(sampling.bias_token_ids)
            or len(sampling.allowed_token_ids)
            or sampling.bad_words
            or (sampling.min_tokens and len(sampling.stop_token_ids))
        )
        reports = Need.REPORT in needs or sampling.num_candidates
        self.greedy[slot] = sampling.temperature == 0 and not self.processed[slot] and not reports

    def __getitem__(self, name: str) -> Any:
        """Return the column [num_slots] of this name."""
        return self._numbers[name]

    def rows(self, slots: IntArray, *needs: Need) -> dict[str, Any]:
        """Return the columns of parameters with these needs, by name, for these slots; [n] each, to be read only."""
        if self._last is None or self._last[0] is not slots or self._last[1] != needs:
            self._last = slots, needs, {name: self._numbers[name][slots] for name in column_names(*needs)}
        return self._last[2]

    def on(self, need: Need) -> BoolArray:
        """Return [num_slots]: whether the slot has a parameter with this need that is on."""
        return self._on[need]

    def _count_tokens(self, sequence: AdmittedSequence) -> None:
        if self._counts is None:
            self._counts = TokenCounts(self._limits)
        prompt, output = np.split(ints(sequence.token_ids), [sequence.num_prompt_tokens])
        # Only the repetition penalty counts prompt tokens.
        counts_prompt = sequence.sampling.repetition_penalty != 1
        self._counts.restart(sequence.slot, prompt if counts_prompt else prompt[:0], output)

    def clear(self) -> None:
        """Discard the lists of all sequences."""
        self.release(np.arange(self._limits.num_slots))
        self._may_stop[:] = False

    def release(self, slots: IntArray) -> None:
        """Discard the lists of sequences that have ended."""
        for lists in (self.stop_ids, self.allowed_ids, self.biases, self.bad_words):
            lists.forget(slots)

    def add_tokens(self, slots: IntArray, token_ids: IntArray) -> None:
        """Count an output token of each of these slots, no slot twice; [n] each."""
        if self._counts is not None and (counted := self._on[Need.COUNTS][slots]).any():
            self._counts.add(slots[counted], token_ids[counted])

    def are_stop_ids(self, slots: IntArray, token_ids: IntArray) -> BoolArray:
        """Return [n]: whether each token is one of its slot's stop ids."""
        found = self._may_stop[token_ids]
        if not found.any():
            return found
        found[:] = False
        owner, places = self.stop_ids.locate(slots)
        found[owner[self.stop_ids.columns[0][places] == token_ids[owner]]] = True
        return found

    def read_counts(self, slots: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return (index into slots, token id, occurrences in the output) of the tokens that these slots penalise."""
        (counted,) = self._on[Need.COUNTS][slots].nonzero()
        if self._counts is None or not len(counted):
            return counted[:0], counted[:0], counted[:0]
        owner, ids, counts = self._counts.read(slots[counted])
        return counted[owner], ids, counts


def _joined(words: tuple[Sequence[int], ...]) -> tuple[IntArray, IntArray]:
    """Return the tokens of all words, and the number of tokens of the word that follow each."""
    if not words:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate(words), np.concatenate([np.arange(len(word))[::-1] for word in words])


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
