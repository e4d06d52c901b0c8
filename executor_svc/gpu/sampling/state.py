"""Sampling parameters of the slots on the device: admissions write them, the sampling kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.sampling import Need, SequenceSampling
from executor_svc.gpu.kernels.sampling.penalties import add_tokens, restart_counts
from executor_svc.gpu.kernels.sampling.state import (
    MAX_INT32,
    RECORD,
    RECORD_WORDS,
    SamplingLists,
    SamplingState,
    num_words,
)
from executor_svc.gpu.kernels.slots.slots import StepInputs, padded
from executor_svc.gpu.slots.device_slots import DeviceSlots
from executor_svc.gpu.slots.slot_changes import Applied
from executor_svc.plan.arrays import BoolArray, IntArray, ints
from executor_svc.plan.limits import Limits
from executor_svc.plan.sampling import needs_of, stored

LIST_CAPACITY = 65536
"""Total entries of all slots in each list column: biases, bad words, early stop ids."""

_NO_IDS = np.zeros(0, np.int64)


class ListRanges:
    """Allocates ranges of a list column, at most one per slot: the first free range that is large enough."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: dict[int, tuple[int, int]] = {}

    def take(self, slot: int, length: int) -> int | None:
        """Replace the slot's range; return where the new one begins, None if no free range is large enough."""
        self._taken.pop(slot, None)
        start = 0
        for first, end in sorted(self._taken.values()):
            if first - start >= length:
                break
            start = end
        if start + length > self._size:
            return None
        if length:
            self._taken[slot] = (start, start + length)
        return start

    def free(self, slots: IntArray) -> None:
        """Free the ranges of these slots."""
        if self._taken:
            for slot in slots.tolist():
                self._taken.pop(slot, None)


class SlotSamplingState:
    """The sampling state of all slots: records, lists, allowed tokens and token counts."""

    def __init__(self, limits: Limits, slots: DeviceSlots, *, draws_on_host: bool = False) -> None:
        """Place the state in `slots.extra`, which has `extra_words` words.

        draws_on_host: whether the host chooses all tokens that are not the most likely ones of unedited logits.
        """
        self.draws_on_host = draws_on_host
        n, vocab, device = limits.num_slots, limits.vocab_size, slots.state.words.device
        parts = slots.extra.split(_extra_sizes(limits))
        self._slots, self._vocab = slots, vocab
        self._ranges = ListRanges(LIST_CAPACITY)
        bias_ids, biases, word_ids, word_following, stop_ids = parts[2:]
        self.state = SamplingState(
            records=parts[0].view(n, RECORD_WORDS),
            token_ids=slots.state.token_ids,
            num_tokens=slots.state.num_tokens,
            num_prompt_tokens=slots.state.num_prompt_tokens,
            counts=torch.zeros((n, vocab), dtype=torch.int32, device=device),
            allowed_bits=parts[1][: n * num_words(vocab)].view(n, -1),
            lists=SamplingLists(bias_ids, biases.view(torch.float32), word_ids, word_following, stop_ids),
        )
        self.guessed = replace(self.state, num_tokens=slots.state.num_guessed)
        """The state behind the drafts that a draft model has made so far."""
        self._columns = parts[2:]
        self._applied: Applied | None = None
        self.lists_on_host: BoolArray = np.zeros(n, np.bool_)
        """[n]: whether the host chooses the slot's tokens: its lists exceeded the device's free ranges, or with
        draws_on_host."""

    @staticmethod
    def extra_words(limits: Limits) -> int:
        """Return the number of words that the state needs in `DeviceSlots.extra`."""
        return sum(_extra_sizes(limits))

    def clear(self) -> None:
        """Free the ranges of all slots."""
        self._ranges = ListRanges(LIST_CAPACITY)
        self._applied = None

    def apply(self, plan: StepPlan, applied: Applied, has_mask: BoolArray) -> None:
        """Write the sampling parameters of a plan's admissions with its other slot changes, which are `applied`.

        has_mask: [n], slots whose allowed tokens are written before each step, as they have grammars.
        """
        if len(plan.released_slots):
            self._ranges.free(ints(plan.released_slots))
        if not plan.admitted:
            self._applied = None
            return
        for sequence in plan.admitted:
            self._admit(sequence.slot, sequence.sampling, has_mask=bool(has_mask[sequence.slot]))
        counted = any(
            Need.COUNTS in needs_of(stored(sequence.sampling))
            for sequence in plan.admitted
            if not self.lists_on_host[sequence.slot]
        )
        self._applied = applied if counted else None

    def count_admitted(self) -> None:
        """Enqueue counting the tokens of the sequences that the last plan admitted, after its changes were sent."""
        applied, self._applied = self._applied, None
        if applied is not None:
            self.recount(applied.slots, applied.max_tokens)

    def count_taken(self, inputs: StepInputs) -> None:
        """Enqueue counting the tokens that a step's slots have taken in its last commit."""
        add_tokens(self.state.counts, inputs.row_slots, inputs.taken, self.state.records)

    def count_guessed(self, inputs: StepInputs, tokens: Tensor) -> None:
        """Enqueue counting the drafts [R] of a pass, until `recount`."""
        add_tokens(self.state.counts, inputs.rows, tokens, self.state.records)

    def recount(self, slots: Tensor, max_tokens: int) -> None:
        """Enqueue counting the known tokens of these slots [S] int32, distinct, at most max_tokens of each."""
        s = self.state
        restart_counts(s.counts, slots, s.records, s.token_ids, s.num_tokens, s.num_prompt_tokens, max_tokens)

    def _admit(self, slot: int, sampling: SequenceSampling, *, has_mask: bool) -> None:
        lists = _lists(sampling)
        on_host = self.draws_on_host and (has_mask or not _is_greedy(sampling))
        start = None if on_host else self._ranges.take(slot, max(map(len, lists)))
        self.lists_on_host[slot] = start is None
        if start is None:
            # The host chooses this slot's tokens; the device computes only their logprobs.
            sampling, start, lists = SequenceSampling(num_logprobs=sampling.num_logprobs), 0, ()
        record = pack_record(sampling, start, start, start)
        record["has_allowed"] |= has_mask
        self._slots.write(self.state.records[slot], record.view(np.int32))
        for column, values in zip(self._columns, lists, strict=False):
            self._slots.write(column[start:], values)
        if len(sampling.allowed_token_ids) and not has_mask:
            self._slots.write(self.state.allowed_bits[slot], pack_bits(sampling.allowed_token_ids, self._vocab))


def _is_greedy(sampling: SequenceSampling) -> bool:
    """Return whether the token is the most likely one of unedited logits."""
    waits = sampling.min_tokens > 0 and len(sampling.stop_token_ids) > 0
    return sampling.temperature == 0 and not waits and next(sampling.edits(), None) is None


def _lists(sampling: SequenceSampling) -> tuple[NDArray[Any], ...]:
    """Return a slot's entries of each column of `SamplingLists`, as 32-bit words."""
    return (
        ints(sampling.bias_token_ids),
        np.asarray(sampling.biases, np.float32).view(np.int32),
        np.concatenate(sampling.bad_words) if sampling.bad_words else _NO_IDS,
        following(sampling.bad_words),
        # Kernels read stop ids only before min_tokens.
        ints(sampling.stop_token_ids) if sampling.min_tokens else _NO_IDS,
    )


def _extra_sizes(limits: Limits) -> list[int]:
    n, vocab = limits.num_slots, limits.vocab_size
    return [n * RECORD_WORDS, padded(n * num_words(vocab)), *[LIST_CAPACITY] * 5]


def pack_bits(token_ids: Sequence[int], vocab: int) -> NDArray[np.int32]:
    """Return a slot's row of `SamplingState.allowed_bits`."""
    bits = np.zeros(num_words(vocab) * 32, np.bool_)
    bits[ints(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def pack_record(
    sampling: SequenceSampling, bias_start: int = 0, word_start: int = 0, stop_start: int = 0
) -> np.ndarray:
    """Return a [1] array of RECORD for a slot with lists that begin at these places of the columns."""
    record, numbers = np.zeros(1, RECORD), stored(sampling)
    needs = needs_of(numbers)
    for name, value in numbers.items():
        if name in (RECORD.names or ()):
            record[name] = min(value, MAX_INT32) if RECORD[name] == np.int32 else value
    record["has_floor"] = Need.FLOOR in needs
    record["penalised"] = Need.COUNTS in needs
    record["has_allowed"] = len(sampling.allowed_token_ids) > 0
    record["bias_start"], record["bias_length"] = bias_start, len(sampling.bias_token_ids)
    record["word_start"], record["word_length"] = word_start, sum(len(word) for word in sampling.bad_words)
    record["stop_start"], record["stop_length"] = stop_start, len(sampling.stop_token_ids)
    return record


def following(words: tuple[Sequence[int], ...]) -> NDArray[np.int32]:
    """Return a slot's part of `SamplingLists.word_following`."""
    parts = [np.arange(len(word), dtype=np.int32)[::-1] for word in words]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
