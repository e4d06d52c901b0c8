"""The schedule of one executor as it grows: a fixed number of rows, and a column for each step or a few of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from cadenza.steps.cells import Cell, computed_cell
from cadenza.v1 import admin_pb2

MAX_ROWS = 24
MAX_COLUMNS = 240
"""Columns that a page gets when it opens."""
_COLUMNS_AT_ONCE = 32
"""Of more steps between two frames, several share a column, as in `cadenza.steps.cells`."""
_MAX_LABEL = 40


@dataclass(slots=True)
class ScheduleRow:
    """One sequence in a row."""

    place: int
    sequence_id: int
    label: str
    num_prompt_tokens: int
    since: int
    """Its first column."""
    num_output_tokens: int = 0
    has_ended: bool = False
    resting: Cell = Cell.WAITING
    """Its state in a step that does not compute it."""

    def fields(self) -> list[Any]:
        """As the page gets it."""
        return [
            self.place,
            self.sequence_id,
            self.label[:_MAX_LABEL],
            self.num_prompt_tokens,
            self.num_output_tokens,
            int(self.has_ended),
            self.since,
        ]


class ScheduleRows:
    """Takes the records of one executor in the order of steps."""

    def __init__(self) -> None:
        self._rows: dict[int, ScheduleRow] = {}
        """By sequence id, in the order of joining."""
        self._pending: list[tuple[int, int, list[Cell]]] = []
        """(step, sequences computed, cells by place) since the last frame."""
        self._columns: deque[list[Any]] = deque(maxlen=MAX_COLUMNS)
        self._next_column = 0
        self._is_changed = False
        self._hidden: set[int] = set()
        """Sequences that joined while all rows were taken, and have not left."""

    @property
    def num_hidden(self) -> int:
        """Sequences without a row."""
        return len(self._hidden)

    def join(self, sequence_id: int, label: str, num_prompt_tokens: int) -> None:
        """A sequence comes into the batch, or comes back."""
        if sequence_id in self._rows:
            return
        if (place := self._free_place()) is None:
            self._hidden.add(sequence_id)
            return
        self._hidden.discard(sequence_id)
        self._rows[sequence_id] = ScheduleRow(place, sequence_id, label, num_prompt_tokens, self._next_column)
        self._is_changed = True

    def preempt(self, sequence_id: int) -> None:
        """A sequence goes back to a queue."""
        if sequence_id in self._rows:
            self._rows[sequence_id].resting = Cell.WAITING

    def leave(self, sequence_id: int, num_output_tokens: int | None = None) -> None:
        """A sequence has ended, or runs elsewhere."""
        if sequence_id in self._hidden:
            self._hidden.remove(sequence_id)
            self._is_changed = True
        row = self._rows.get(sequence_id)
        if row is None or row.has_ended:
            return
        row.has_ended, self._is_changed = True, True
        if num_output_tokens is not None:
            row.num_output_tokens = num_output_tokens

    def leave_all(self) -> None:
        """The executor has lost its sequences."""
        for sequence_id in (*self._rows, *self._hidden):
            self.leave(sequence_id)

    def step(self, record: admin_pb2.StepRecord) -> None:
        """A step has computed sequences."""
        if not self._next_column and not self._pending:  # sequences that had joined before the watch began
            for sequence_id in record.sequence_ids:
                self.join(sequence_id, f"sequence {sequence_id}", 0)
        cells = [Cell.ABSENT] * MAX_ROWS
        found = {sequence_id: index for index, sequence_id in enumerate(record.sequence_ids)}
        for row in self._rows.values():
            index = found.get(row.sequence_id)
            if index is not None and record.num_tokens[index]:
                cells[row.place] = computed_cell(record, index, row.num_prompt_tokens)
                row.num_output_tokens += 0 if row.has_ended else record.num_sampled[index]
                row.resting = Cell.IDLE
            elif not row.has_ended:
                cells[row.place] = row.resting
        self._pending.append((record.step_id, sum(1 for count in record.num_tokens if count), cells))
        self._is_changed = True

    def take(self) -> dict[str, Any] | None:
        """The new columns, and all rows; None: nothing has changed."""
        if not self._is_changed:
            return None
        self._is_changed = False
        columns = self._merged()
        self._columns.extend(columns)
        return {"rows": self._fields(), "columns": columns, "hidden": self.num_hidden}

    def snapshot(self) -> dict[str, Any]:
        """All rows and the newest columns, as of the last frame."""
        return {"rows": self._fields(), "columns": list(self._columns), "hidden": self.num_hidden}

    def _fields(self) -> list[list[Any]]:
        return [row.fields() for row in self._rows.values()]

    def _merged(self) -> list[list[Any]]:
        """A column for each step, or for several: [column, last step, sequences computed in a step, cells]."""
        pending, self._pending = self._pending, []
        per_column = -(-len(pending) // _COLUMNS_AT_ONCE) or 1
        columns = []
        for start in range(0, len(pending), per_column):
            part = pending[start : start + per_column]
            cells = [max(each) for each in zip(*(cells for _, _, cells in part), strict=True)]
            batch = round(sum(size for _, size, _ in part) / len(part))
            columns.append([self._next_column, part[-1][0], batch, "".join(str(int(cell)) for cell in cells)])
            self._next_column += 1
        return columns

    def _free_place(self) -> int | None:
        """A free place, or the place of the row that ended first; None: all sequences run."""
        if len(self._rows) < MAX_ROWS:
            taken = {row.place for row in self._rows.values()}
            return next(place for place in range(MAX_ROWS) if place not in taken)
        ended = next((row for row in self._rows.values() if row.has_ended), None)
        if ended is None:
            return None
        del self._rows[ended.sequence_id]
        return ended.place
