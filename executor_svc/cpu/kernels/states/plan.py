"""The CPU's plan of a step for recurrent layers: what each sequence does, at fixed addresses for launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from executor_svc.cpu.kernels.codegen.emit import Emitter, Int, Vec
from executor_svc.plan.arrays import IntArray

_FIELDS = 8
"""First row, rows, context, folded, address of the state's pages, first and last of its saves, rows folded."""
_names = itertools.count()


class CpuStatePlan:
    """Implements `device.states.StatePlan`; `fill` sets it for a step."""

    def __init__(self, pages_per_state: int, tail: int, max_seqs: int) -> None:
        self.name = f"states{next(_names)}"
        self.num_tiles = 0
        self.tail = tail
        self.table = np.zeros(4, np.int64)
        """Addresses of records, of positions of saves, and of their pages; bytes of the pages of a save."""
        self._records = np.zeros((max_seqs, _FIELDS), np.int64)
        self._pages = pages_per_state
        self.table[0], self.table[3] = self._records.ctypes.data, pages_per_state * 4
        self._kept: tuple[Tensor, ...] = ()
        """Launches hold only addresses."""
        self._places: dict[tuple[tuple[int, ...], tuple[int, ...]], IntArray] = {}

    def places(self, pages: tuple[int, ...], offsets: tuple[int, ...]) -> int:
        """Return the address of `unit_places`, which this plan keeps.

        Not for all plans of the process: another thread that makes the same at the same time could drop it.
        """
        key = pages, offsets
        if key not in self._places:
            self._places[key] = unit_places(pages, offsets)
        return int(self._places[key].ctypes.data)

    def fill(
        self,
        query_start_loc: Tensor,
        context_lens: Tensor,
        folded: Tensor,
        state_tables: Tensor,
        save_starts: Tensor,
        save_positions: Tensor,
        save_tables: Tensor,
    ) -> None:
        """Set the step; arguments as in `device.states.StatePlan`."""
        assert state_tables.shape[1] == save_tables.shape[1] == self._pages, "another number of pages"
        starts, contexts = query_start_loc.numpy().astype(np.int64), context_lens.numpy()
        rows = np.diff(starts)
        order = np.argsort(-rows, kind="stable")[: np.count_nonzero(rows)]  # the largest work first
        kept = tuple(each.contiguous() for each in (state_tables, save_positions, save_tables))
        saves, records = save_starts.numpy(), self._records[: len(order)]
        records[:, 0], records[:, 1], records[:, 2] = starts[order], rows[order], contexts[order]
        records[:, 3] = folded.numpy()[order]
        records[:, 4] = kept[0].data_ptr() + order * (4 * self._pages)
        records[:, 5], records[:, 6] = saves[order], saves[order + 1]
        records[:, 7] = np.maximum(rows[order] - self.tail, 0)
        self.table[1], self.table[2] = kept[1].data_ptr(), kept[2].data_ptr()
        self.num_tiles, self._kept = len(order), kept


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """What an item knows of its sequence, as numbers in the code that is made."""

    table: Int
    """Address of the plan's table."""
    row: Int
    """The first in the step."""
    rows: Int
    """At least 1."""
    context: Int
    folded: Int
    pages: Int
    """Address of the pages of its state."""
    first_save: Int
    last_save: Int
    """One more than that of the last."""
    folding: Int
    """How many of its rows are folded in this step."""

    @staticmethod
    def read(emit: Emitter, table: Int, index: Int) -> SequenceStep:
        """Emit reads of a record; table: the address of that of a plan."""
        record = emit.load_int(table) + index * (8 * _FIELDS)
        return SequenceStep(table, *(emit.load_int(record + 8 * field) for field in range(_FIELDS)))

    def each_save(self, emit: Emitter, body: Callable[[Int, Int], None]) -> None:
        """Emit body(position, address of the pages) for each of its saves, in ascending order of positions."""
        positions, pages, size = (emit.load_int(self.table + 8 * field) for field in (1, 2, 3))

        def save(index: Int, _: list[Vec]) -> None:
            body(emit.load_int32(positions + index * 4), pages + index * size)

        emit.loop(self.first_save, self.last_save, 1, save)

    def save_at(self, emit: Emitter, position: Int, body: Callable[[Int], None]) -> None:
        """Emit body(address of the pages) for a save at a position, if there is one."""

        def save(at: Int, pages: Int) -> None:
            emit.when(at.equals(position), lambda: body(pages))

        self.each_save(emit, save)


@dataclass(frozen=True, slots=True)
class UnitPlaces:
    """Where units of a layer lie: arguments of a launch."""

    pool: Int
    page_bytes: Int
    places: Int
    """Address of the page and the offset of each unit."""

    def address(self, emit: Emitter, pages: Int, unit: Int | int) -> Int:
        """Return the address of a unit in the state with these pages."""
        place = self.places + emit.integer(unit) * 16
        page = emit.load_int32(pages + emit.load_int(place) * 4)
        return self.pool + page * self.page_bytes + emit.load_int(place + 8)


def unit_places(pages: tuple[int, ...], offsets: tuple[int, ...]) -> IntArray:
    """Return the places of units, as `UnitPlaces` reads them: [units, 2] int64."""
    return np.stack([np.array(pages, np.int64), np.array(offsets, np.int64)], axis=1).copy()
