"""The recurrent states of slots: the pages of each, and the copies of them that are to be made at positions.

A state *stands* at a position: its matrices hold the tokens before it, the later ones are in its tail. Where it stands
is in its pages alone, so that it moves with them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import StateSaves
from executor_svc.plan.arrays import BoolArray, IntArray, check_range, check_unique, ints
from executor_svc.plan.limits import Limits

_NONE = np.iinfo(np.int64).max


class ArmedSave(NamedTuple):
    """A copy of a slot's state that is to be made when it stands at the position."""

    position: int
    pages: NDArray[np.int32]
    """[pages_per_state]."""


class SavedStates(NamedTuple):
    """The copies that a step has made."""

    slots: IntArray
    """[V]."""
    positions: IntArray
    """[V]."""


class SlotStates:
    """States of all slots; without states in the model it is empty."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.tables = np.zeros((limits.num_slots, limits.pages_per_state), np.int32)
        """[num_slots, P]."""
        self.armed: dict[int, list[ArmedSave]] = {}
        """By slot, positions ascending."""
        # The first position armed for each slot.
        self._next = np.full(limits.num_slots, _NONE)

    def clear(self) -> None:
        """Drop what is armed."""
        self.armed.clear()
        self._next[:] = _NONE

    def release(self, slots: IntArray) -> None:
        """Drop what is armed for slots."""
        if self.armed:
            for slot in slots.tolist():
                self.armed.pop(slot, None)
            self._next[slots] = _NONE

    def arm(self, saves: StateSaves, computed: IntArray) -> None:
        """Arm copies of states of admitted slots; computed: [num_slots] where states are known to have passed.

        Raises InvalidPlan.
        """
        slots, positions, limits = ints(saves.slots), ints(saves.positions), self._limits
        pages = ints(saves.page_ids)
        if len(pages) != len(slots) * limits.pages_per_state:
            raise InvalidPlan(
                f"state_saves: {len(pages)} page_ids for {len(slots)} states of {limits.pages_per_state} pages"
            )
        check_range(pages, limits.num_device_blocks, "state_saves: page")
        check_unique(pages, "state_saves: page")
        for slot, position, own in zip(
            slots.tolist(), positions.tolist(), pages.reshape(-1, limits.pages_per_state), strict=True
        ):
            armed = self.armed.setdefault(slot, [])
            where = f"state_saves: slot {slot}: position {position}"
            if not 1 <= position <= limits.max_model_len:
                raise InvalidPlan(f"{where} is not 1 to max_model_len {limits.max_model_len}")
            if armed and armed[-1].position >= position:
                raise InvalidPlan(f"{where} is not above {armed[-1].position}, which is armed already")
            if position < computed[slot]:
                raise InvalidPlan(f"{where}: the state stands at {computed[slot]} or later")
            armed.append(ArmedSave(position, own.astype(np.int32)))
            self._next[slot] = armed[0].position

    def ends(self, context: IntArray, counts: IntArray) -> IntArray:
        """Return [S] where states stand after a step of counts [S] tokens behind context [S].

        The last tokens of a step, as many as a tail holds, are not folded in it.
        """
        found: IntArray = context + np.maximum(0, counts - self._limits.state_tail)
        return found

    def is_due(self, rows: IntArray, ends: IntArray) -> bool:
        """Return whether a copy is armed at or before ends [S] for one of the slots rows [S]."""
        return bool(self.armed) and bool((self._next[rows] <= ends).any())

    def due(self, rows: IntArray, folded: IntArray, ends: IntArray) -> tuple[list[ArmedSave], IntArray]:
        """Return the copies that are made as states of the slots rows [S] go from folded [S] to ends [S], and their
        number for each slot."""
        saves: list[ArmedSave] = []
        counts = np.zeros(len(rows), np.int64)
        if self.is_due(rows, ends):
            for index in np.flatnonzero(self._next[rows] <= ends).tolist():
                armed = self.armed[int(rows[index])]
                made = [each for each in armed if folded[index] <= each.position <= ends[index]]
                saves += made
                counts[index] = len(made)
        return saves, counts

    def made(self, rows: IntArray, ends: IntArray) -> None:
        """Forget what is armed up to ends [S] of the slots rows [S]: a step made it, or it was passed before."""
        if not self.armed:
            return
        for index in np.flatnonzero(self._next[rows] <= ends).tolist():
            slot = int(rows[index])
            left = [each for each in self.armed[slot] if each.position > ends[index]]
            self._next[slot] = left[0].position if left else _NONE
            self.armed[slot] = left
            if not left:
                del self.armed[slot]

    def digest_of(self, slot: int) -> bytes:
        """Return the pages of a slot's state, then the position and pages of what is armed, as little-endian int32."""
        parts = [self.tables[slot]]
        for save in self.armed.get(slot, ()):
            parts += [np.array([save.position], np.int32), save.pages]
        return b"".join(part.astype("<i4").tobytes() for part in parts)


def check_folded(slots: IntArray, folded: IntArray, context: IntArray, tail: int) -> None:
    """Check that each slot's state stands where its tail reaches the context: [n] each; raises InvalidPlan."""
    wrong: BoolArray = (folded > context) | (context > folded + tail)
    wrong &= context > 0
    if wrong.any():
        i = wrong.argmax()
        raise InvalidPlan(
            f"state_pages of slot {slots[i]} hold a state that stands at {folded[i]}: with {context[i]} computed "
            f"tokens it must be {max(0, context[i] - tail)} to {context[i]}"
        )
