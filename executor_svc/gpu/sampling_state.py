"""Sampling parameters of the slots on the device: who admits writes them, kernels of `sampling_edits` read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.gpu.device_slots import DeviceSlots
from executor_svc.gpu.kernels.sampling.penalties import add_tokens, restart_counts
from executor_svc.gpu.kernels.sampling.state import RECORD_WORDS, SamplingLists, SamplingState, num_words
from executor_svc.gpu.kernels.slots.slots import StepInputs, padded
from executor_svc.gpu.sampling_records import following, pack_bits, pack_record
from executor_svc.gpu.slot_changes import Applied
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.plan.plan import Limits, StepPlan
from executor_svc.plan.sampling import Need, SequenceSampling

LIST_ROOM = 65536
"""Entries of biases, bad words or early stop ids that all slots have together."""

_NO_IDS = np.zeros(0, np.int64)


class ListRooms:
    """Ranges of a column of lists, one for a slot at most: the first that is large enough."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: dict[int, tuple[int, int]] = {}

    def take(self, slot: int, length: int) -> int | None:
        """Return where the slot's range begins, in the place of the one that it had; None: no room."""
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
        """Take these slots' ranges back."""
        if self._taken:
            for slot in slots.tolist():
                self._taken.pop(slot, None)


class SlotSamplingState:
    """Records, lists, allowed tokens and token counts of all slots."""

    def __init__(self, limits: Limits, slots: DeviceSlots) -> None:
        """Take `slots.extra`, of the size that `extra_words` gives."""
        n, vocab, device = limits.num_slots, limits.vocab_size, slots.state.words.device
        parts = slots.extra.split(_extra_sizes(limits))
        self._slots, self._vocab = slots, vocab
        self._rooms = ListRooms(LIST_ROOM)
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
        self._columns = parts[2:]
        self._applied: Applied | None = None
        self.without_room: BoolArray = np.zeros(n, np.bool_)
        """[n]: the slot's lists are not on the device, for want of room."""

    @staticmethod
    def extra_words(limits: Limits) -> int:
        """Words by slot that it needs."""
        return sum(_extra_sizes(limits))

    def clear(self) -> None:
        """Forget what all slots have."""
        self._rooms = ListRooms(LIST_ROOM)
        self._applied = None

    def apply(self, plan: StepPlan, applied: Applied) -> None:
        """Have the parameters of a plan's sequences written with its other changes; applied: what they were."""
        self._rooms.free(plan.released_slots)
        for sequence in plan.admitted:
            self._admit(sequence.slot, sequence.sampling)
        counted = any(Need.COUNTS in sequence.sampling.needs() for sequence in plan.admitted)
        self._applied = applied if counted else None

    def count_admitted(self) -> None:
        """Enqueue counting the tokens of the sequences admitted by the plan applied last, whose changes were sent."""
        applied, self._applied = self._applied, None
        if applied is not None:
            s = self.state
            restart_counts(
                s.counts, applied.slots, s.records, s.token_ids, s.num_tokens, s.num_prompt_tokens, applied.max_tokens
            )

    def count_taken(self, inputs: StepInputs) -> None:
        """Enqueue counting the tokens that a step's slots have taken."""
        add_tokens(self.state.counts, inputs.rows, inputs.taken, self.state.records)

    def _admit(self, slot: int, sampling: SequenceSampling) -> None:
        lists = _lists(sampling)
        start = self._rooms.take(slot, max(map(len, lists)))
        self.without_room[slot] = start is None
        if start is None:
            # The host chooses this slot's tokens; only what is told of them is the device's.
            sampling, start, lists = SequenceSampling(num_logprobs=sampling.num_logprobs), 0, ()
        self._slots.write(self.state.records[slot], pack_record(sampling, start, start, start).view(np.int32))
        for column, values in zip(self._columns, lists, strict=False):
            self._slots.write(column[start:], values)
        if len(sampling.allowed_token_ids):
            self._slots.write(self.state.allowed_bits[slot], pack_bits(sampling.allowed_token_ids, self._vocab))


def _lists(sampling: SequenceSampling) -> tuple[NDArray[Any], ...]:
    """What a slot has of each column of `SamplingLists`, as 32-bit words."""
    return (
        sampling.bias_token_ids,
        sampling.biases.astype(np.float32).view(np.int32),
        np.concatenate(sampling.bad_words) if sampling.bad_words else _NO_IDS,
        following(sampling.bad_words),
        # Read before min_tokens only.
        sampling.stop_token_ids if sampling.min_tokens else _NO_IDS,
    )


def _extra_sizes(limits: Limits) -> list[int]:
    n, vocab = limits.num_slots, limits.vocab_size
    return [n * RECORD_WORDS, padded(n * num_words(vocab)), *[LIST_ROOM] * 5]
