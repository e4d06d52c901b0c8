"""Lists of different lengths, one per batch slot, that are read for many slots at once, without a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from executor_svc.plan.arrays import IntArray


def spans(starts: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Spell out n runs of places, run i from starts[i] on: (which run, which place), [lengths.sum()] each."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(len(owner)) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return owner, places


class SlotLists:
    """A list for each slot, in one or more columns that lie behind each other in flat arrays.

    A new list goes to the end; when that is reached, the lists that still count are moved to arrays of twice their
    size, so the memory follows what is in use and the cost of moving is spread over the lists that came since.
    """

    def __init__(self, num_slots: int, *dtypes: DTypeLike) -> None:
        self.columns: tuple[NDArray[Any], ...] = tuple(np.zeros(0, dtype) for dtype in dtypes)
        """Values at the places that `locate` gives."""
        self._starts = np.zeros(num_slots, np.int64)
        self._lengths = np.zeros(num_slots, np.int64)
        self._end = 0

    def put(self, slot: int, *values: NDArray[Any]) -> None:
        """Give a slot its list, in place of an earlier one: an array for each column, all [length]."""
        length = len(values[0])
        self._lengths[slot] = 0
        if self._end + length > len(self.columns[0]):
            self._make_room(length)
        for column, part in zip(self.columns, values, strict=True):
            column[self._end : self._end + length] = part
        self._starts[slot], self._lengths[slot] = self._end, length
        self._end += length

    def forget(self, slots: IntArray) -> None:
        """Empty these slots' lists."""
        self._lengths[slots] = 0

    def any_of(self, slots: IntArray) -> bool:
        """Has any of these slots a list that is not empty."""
        return bool(self._lengths[slots].any())

    def locate(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Where these slots' lists are: (index into slots, place in the columns) of every element, in order."""
        return spans(self._starts[slots], self._lengths[slots])

    def _make_room(self, length: int) -> None:
        _, kept = self.locate(np.arange(len(self._lengths)))
        size = 2 * (len(kept) + length)
        moved = []
        for column in self.columns:
            wider = np.zeros(size, column.dtype)
            wider[: len(kept)] = column[kept]
            moved.append(wider)
        self.columns = tuple(moved)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._end = len(kept)
