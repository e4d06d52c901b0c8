"""The changes of a plan to the slots on the device, as runs and single words of their state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from executor_svc.batch.block_tables import TablePlaces
from executor_svc.gpu.kernels.sampling.state import MAX_INT32
from executor_svc.gpu.kernels.slots.slots import DRAFTS_END, MAX_DRAFTS, MAX_LEN, NUM_NUMBERS, SlotState, padded
from executor_svc.gpu.slots.staging import StagedChanges
from executor_svc.plan.arrays import IntArray, ints
from executor_svc.plan.limits import Limits


@dataclass(frozen=True, slots=True)
class Applied:
    """A plan's admissions, for other state by slot; valid on the device from `build` or `flush` to the next one."""

    slots: Tensor
    """[A] int32: slots admitted."""
    max_tokens: int
    """The most known tokens of any of them; 0 without admissions."""


class ChangeLog:
    """Translates plans into changes of the state. Keeps on the host what they depend on: block counts, limits of drafts
    and words of stop ids."""

    def __init__(self, limits: Limits, state: SlotState, admitted: Tensor, state_tables: Tensor) -> None:
        """Take the words of the state for the list of a plan's admitted slots, `list_words`, and [num_slots, P] for
        the pages of recurrent states."""
        n = state.num_slots
        self._limits = limits
        self._numbers = int(state.numbers.storage_offset()) + np.arange(NUM_NUMBERS) * state.numbers.stride(0)
        self._token_ids = _RowPlaces(int(state.token_ids.storage_offset()), state.token_ids.stride(0))
        self._tables = _RowPlaces(int(state.tables.storage_offset()), state.tables.stride(0))
        self._table_words = state.tables.stride(1)
        self._state_tables = _RowPlaces(int(state_tables.storage_offset()), state_tables.shape[1])
        self._stop_bits = _RowPlaces(int(state.stop_bits.storage_offset()), state.stop_bits.stride(0))
        # The ends of block tables, for appended blocks, and the words of stop ids that an admission must clear.
        self._places = TablePlaces(limits)
        self._max_drafts = np.zeros(n, np.int64)
        self._max_len = np.zeros(n, np.int64)
        self._stop_words = [np.zeros(0, np.int64)] * n
        self._admitted = admitted
        self._nothing = Applied(admitted[:0], 0)

    @staticmethod
    def list_words(num_slots: int) -> int:
        """Return the words of the state for the list of admitted slots."""
        return padded(num_slots)

    def add_plan(self, plan: StepPlan, changes: StagedChanges) -> Applied:
        """Add a plan's admissions, appended blocks and given tokens; changes: without those of any other plan."""
        if not (plan.admitted or len(plan.append_slots) or plan.group_appends or len(plan.given_slots)):
            return self._nothing
        if plan.admitted:
            self._admit(plan.admitted, changes)
        for table, slots, entries, pages in self._places.appended(plan):
            places = self._tables.place + slots * self._tables.stride + table * self._table_words + entries
            changes.write_singles(places, pages)
        self._end_drafts(plan, changes)
        if len(plan.given_slots):
            changes.give_tokens(ints(plan.given_slots), ints(plan.given_token_ids))
        longest = max((len(sequence.token_ids) for sequence in plan.admitted), default=0)
        return Applied(self._admitted[: len(plan.admitted)], longest)

    def places_of_tokens(self, slots: IntArray, positions: IntArray) -> IntArray:
        """Return the places in the state of these slots' tokens at these positions, [n] each."""
        return self._token_ids.place + slots * self._token_ids.stride + positions

    def _admit(self, sequences: Sequence[AdmittedSequence], changes: StagedChanges) -> None:
        slots = np.array([sequence.slot for sequence in sequences], np.int64)
        # In the order of the rows of `SlotState.numbers` before the last, with all flags 0.
        numbers = np.array(
            [
                (
                    len(sequence.token_ids),
                    sequence.num_prompt_tokens,
                    sequence.num_computed_tokens,
                    0,
                    0,
                    min(sequence.sampling.min_tokens, MAX_INT32),
                    sequence.max_drafts,
                    (sequence.max_len or self._limits.max_model_len) if sequence.max_drafts else MAX_INT32,
                    0,
                )
                for sequence in sequences
            ],
            np.int64,
        )
        changes.write_singles((self._numbers[: DRAFTS_END.value] + slots[:, None]).ravel(), numbers.ravel())
        self._max_drafts[slots], self._max_len[slots] = numbers[:, MAX_DRAFTS.value], numbers[:, MAX_LEN.value]
        changes.write(int(self._admitted.storage_offset()), slots)
        for sequence in sequences:
            slot = sequence.slot
            changes.write(self._token_ids.start(slot), ints(sequence.token_ids))
            for table, first, pages in self._places.admitted(sequence):
                changes.write(self._tables.start(slot) + table * self._table_words + first, pages)
            changes.write(self._state_tables.start(slot), ints(sequence.state_pages))
            self._set_stop_ids(slot, ints(sequence.sampling.stop_token_ids), changes)

    def _set_stop_ids(self, slot: int, token_ids: IntArray, changes: StagedChanges) -> None:
        """Clear the words of the slot's earlier stop ids, and set the bits of the new ones."""
        earlier = self._stop_words[slot]
        if not len(token_ids) and not len(earlier):
            return
        words, index = np.unique(np.concatenate((token_ids // 32, earlier)), return_inverse=True)
        values = np.zeros(len(words), np.int64)
        np.bitwise_or.at(values, index[: len(token_ids)], 1 << token_ids % 32)
        changes.write_singles(self._stop_bits.start(slot) + words, values)
        self._stop_words[slot] = words[values != 0]

    def _end_drafts(self, plan: StepPlan, changes: StagedChanges) -> None:
        """Set the end of drafts of slots with new blocks, as `speculation.drafting` bounds them.

        A slot that plans behind a step may not let grow in time keeps a place for one token of each of them.
        """
        if not self._max_drafts.any():
            return
        admitted = np.array([sequence.slot for sequence in plan.admitted], np.int64)
        appended = (plan.append_slots, *(appends.slots for appends in plan.group_appends))
        slots = np.unique(np.concatenate((admitted, *map(ints, appended))))
        slots = slots[self._max_drafts[slots] > 0]
        if len(slots):
            places, longest = self._places.room(slots) * self._limits.block_size, self._max_len[slots] - 1
            ends = np.where(places >= longest, longest, places - (self._limits.max_inflight_plans - 1))
            changes.write_singles(self._numbers[DRAFTS_END.value] + slots, ends)


@dataclass(frozen=True, slots=True)
class _RowPlaces:
    """The places of a matrix's rows in the state."""

    place: int
    stride: int

    def start(self, row: int) -> int:
        return self.place + row * self.stride
