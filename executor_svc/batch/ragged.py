"""Lists of different lengths, one per batch slot; reads cover many slots at once, without a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from executor_svc.plan.arrays import IntArray


def spans(starts: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Return the elements of n runs of places: (index of the run, place), [lengths.sum()] each.

    Run i begins at starts[i] and has lengths[i] places.
    """
    owner = np.arange(len(lengths)).repeat(lengths)
    ends: IntArray = lengths.cumsum()
    places = np.arange(len(owner)) + (starts - (ends - lengths))[owner]
    return owner, places


_NONE = np.zeros(0, np.int64)


class SlotLists:
    """A list for each slot, with one or more columns; each column is a flat array that holds all lists.

    A new list is appended. Once an array is full, the lists in use move to arrays of twice their size: memory follows
    the lists in use, and the cost of a move is amortized over the lists appended since the last one.
    """

    def __init__(self, num_slots: int, *dtypes: DTypeLike) -> None:
        self.columns: tuple[NDArray[Any], ...] = tuple(np.zeros(0, dtype) for dtype in dtypes)
        """Values at the places that `locate` returns."""
        self._starts = np.zeros(num_slots, np.int64)
        self._lengths = np.zeros(num_slots, np.int64)
        self._end = 0

    def put(self, slot: int, *values: Sequence[Any] | NDArray[Any]) -> None:
        """Replace a slot's list: one buffer [length] for each column."""
        length = len(values[0])
        self._lengths[slot] = 0
        if self._end + length > len(self.columns[0]):
            self._grow(length)
        for column, part in zip(self.columns, values, strict=True):
            column[self._end : self._end + length] = part
        self._starts[slot], self._lengths[slot] = self._end, length
        self._end += length

    def forget(self, slots: IntArray) -> None:
        """Empty these slots' lists."""
        self._lengths[slots] = 0

    def locate(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Return (index into slots, place in the columns) of every element of these slots' lists, in order."""
        if not self._end:
            return _NONE, _NONE
        return spans(self._starts[slots], self._lengths[slots])

    def _grow(self, length: int) -> None:
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
