"""How each slot's tokens are chosen: parameters in arrays with a row per slot, lists and counts beside them."""

from __future__ import annotations

import numpy as np

from executor_svc.batch.ragged import SlotLists
from executor_svc.batch.token_counts import TokenCounts
from executor_svc.plan.plan import AdmittedSequence, BoolArray, IntArray, Limits


class SlotSampling:
    """Sampling parameters of all slots, and of their token histories what penalties need."""

    def __init__(self, limits: Limits) -> None:
        n = limits.num_slots
        self._limits = limits
        self.temperature = np.zeros(n, np.float32)
        self.top_p = np.ones(n, np.float32)
        self.top_k = np.zeros(n, np.int64)
        self.log_min_p = np.full(n, -np.inf, np.float32)
        self.seed = np.zeros(n, np.uint64)
        self.sample_index = np.zeros(n, np.int64)
        self.min_tokens = np.zeros(n, np.int64)
        self.num_logprobs = np.full(n, -1, np.int64)
        self.num_prompt_logprobs = np.full(n, -1, np.int64)
        # Above 0: the slot has this many candidates told and samples no token.
        self.num_candidates = np.zeros(n, np.int64)
        self.repetition_penalty = np.ones(n, np.float32)
        self.frequency_penalty = np.zeros(n, np.float32)
        self.presence_penalty = np.zeros(n, np.float32)
        # Can this slot's logits be changed before a token is chosen: the others are not looked at.
        self.processed = np.zeros(n, np.bool_)
        self.penalised = np.zeros(n, np.bool_)
        # Is this slot's token the most likely one of its logits as they are, with nothing more to be told.
        self.greedy = np.zeros(n, np.bool_)
        self.stop_ids = SlotLists(n, np.int32)
        self.allowed_ids = SlotLists(n, np.int32)
        self.biases = SlotLists(n, np.int32, np.float32)
        # The tokens of a slot's words one after the other, and how many tokens of the word follow each.
        self.bad_words = SlotLists(n, np.int32, np.int32)
        self._counts: TokenCounts | None = None

    def admit(self, sequence: AdmittedSequence) -> None:
        """Take a sequence's parameters, checked before, and count its tokens if they are penalised."""
        slot, sampling = sequence.slot, sequence.sampling
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.log_min_p[slot] = np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
        self.seed[slot] = sampling.seed
        self.sample_index[slot] = sampling.sample_index
        self.min_tokens[slot] = sampling.min_tokens
        self.num_logprobs[slot] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self.num_prompt_logprobs[slot] = -1 if sampling.num_prompt_logprobs is None else sampling.num_prompt_logprobs
        self.num_candidates[slot] = sampling.num_candidates
        self.stop_ids.put(slot, sampling.stop_token_ids)
        self.allowed_ids.put(slot, sampling.allowed_token_ids)
        self.biases.put(slot, sampling.bias_token_ids, sampling.biases)
        self.bad_words.put(slot, *_joined(sampling.bad_words))
        self._admit_penalties(sequence)
        self.processed[slot] = bool(
            self.penalised[slot]
            or len(sampling.bias_token_ids)
            or len(sampling.allowed_token_ids)
            or sampling.bad_words
            or (sampling.min_tokens and len(sampling.stop_token_ids))
        )
        told = sampling.num_logprobs is not None or sampling.num_candidates
        self.greedy[slot] = sampling.temperature == 0 and not self.processed[slot] and not told

    def _admit_penalties(self, sequence: AdmittedSequence) -> None:
        slot, sampling = sequence.slot, sequence.sampling
        self.repetition_penalty[slot] = sampling.repetition_penalty
        self.frequency_penalty[slot] = sampling.frequency_penalty
        self.presence_penalty[slot] = sampling.presence_penalty
        self.penalised[slot] = sampling.is_penalised
        if self.penalised[slot]:
            if self._counts is None:
                self._counts = TokenCounts(self._limits)
            prompt, output = np.split(sequence.token_ids, [sequence.num_prompt_tokens])
            # The prompt counts for the repetition penalty alone.
            self._counts.restart(slot, prompt if sampling.repetition_penalty != 1 else prompt[:0], output)

    def release(self, slots: IntArray) -> None:
        """Forget the lists of sequences that have ended."""
        for lists in (self.stop_ids, self.allowed_ids, self.biases, self.bad_words):
            lists.forget(slots)

    def add_tokens(self, slots: IntArray, token_ids: IntArray) -> None:
        """Note an output token of each of these slots, no slot twice; [n] each."""
        if self._counts is not None and (counted := self.penalised[slots]).any():
            self._counts.add(slots[counted], token_ids[counted])

    def are_stop_ids(self, slots: IntArray, token_ids: IntArray) -> BoolArray:
        """[n]: is this token one of its slot's stop ids."""
        found = np.zeros(len(slots), np.bool_)
        if not self.stop_ids.any_of(slots):
            return found
        owner, places = self.stop_ids.locate(slots)
        found[owner[self.stop_ids.columns[0][places] == token_ids[owner]]] = True
        return found

    def read_counts(self, slots: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """(index into slots, token id, occurrences in the output) of what the penalties of these slots apply to."""
        penalised = np.flatnonzero(self.penalised[slots])
        if self._counts is None or not len(penalised):
            return penalised[:0], penalised[:0], penalised[:0]
        owner, ids, counts = self._counts.read(slots[penalised])
        return penalised[owner], ids, counts


def _joined(words: tuple[IntArray, ...]) -> tuple[IntArray, IntArray]:
    """The tokens of all words, and how many tokens of its word follow each."""
    if not words:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate(words), np.concatenate([np.arange(len(word))[::-1] for word in words])
