"""The memory of adapters in their places, for one linear or one table of embeddings, in the order kernels read it.

Matrices are in *strips* of 16 rows: number [n, k] of a matrix lies at [n // 16, k // step, n % 16, k % step]; step:
`panel_layout.inner_step`. A strip's unit, the step numbers of one row, has 4 bytes in every dtype. The matrices a of
all parts of a linear are one matrix, one below the other, each from an even row on; every b is one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from executor_svc.cpu.kernels.codegen.emit import LANES
from executor_svc.cpu.kernels.panel_layout import inner_step
from executor_svc.cpu.kernels.panels import new_memory
from executor_svc.device.adapters import AdapterPart, EmbeddingPair, ReplacedRows

Units = NDArray[np.int32]

PLACE_FIELDS = 6
"""Of a place's row: strips of a, address of a, number of parts; number of replaced rows, addresses of their indexes and
of the rows; then the fields of each part."""

PART_FIELDS = 6
"""First of its sums, units of a row of b, first column of the result, columns, address of b, scale (a float)."""

UNIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Pair:
    """A part in memory."""

    first_sum: int
    first_column: int
    columns: int
    b: Units
    scale: float


class _Table:
    """A row for each place: what a kernel reads of it."""

    def __init__(self, num_places: int, num_parts: int) -> None:
        self._fields = np.zeros((num_places, PLACE_FIELDS + num_parts * PART_FIELDS), np.int64)

    @property
    def address(self) -> int:
        return int(self._fields.ctypes.data)

    @property
    def row_bytes(self) -> int:
        return self._fields.strides[0]

    def clear(self, place: int) -> None:
        if not 0 <= place < len(self._fields):
            raise ValueError(f"adapter place {place}: there are {len(self._fields)}")
        self._fields[place] = 0

    def set(self, place: int, strips: int, a: int, pairs: Sequence[_Pair]) -> None:
        row = self._fields[place]
        for which, pair in enumerate(pairs):
            fields = row[PLACE_FIELDS + which * PART_FIELDS :][:PART_FIELDS]
            fields[:5] = pair.first_sum, pair.b.shape[1], pair.first_column, pair.columns, pair.b.ctypes.data
            fields[5:].view(np.float32)[0] = pair.scale
        row[:3] = strips, a, len(pairs)

    def set_replaced(self, place: int, token_ids: Tensor, rows: int) -> None:
        self._fields[place, 3:6] = len(token_ids), token_ids.data_ptr(), rows


class CpuAdapterPlaces:
    """Implements `device.adapters.AdapterPlaces`."""

    def __init__(
        self,
        num_places: int,
        max_rank: int,
        in_features: int,
        part_columns: Sequence[int],
        dtype: torch.dtype,
        replaces_rows: bool = False,
    ) -> None:
        """Take the memory; arguments as in `AdapterKernels.new_adapter_places`."""
        self.in_features, self.out_features = in_features, sum(part_columns)
        self._max_rank, self._part_columns, self._dtype = max_rank, sorted(part_columns), dtype
        self.replaces_rows = replaces_rows
        self._replaced: dict[int, tuple[Tensor, Units]] = {}
        self.max_sums = whole_strips(len(part_columns) * _even(max_rank))
        """Sums of a row at most, over all parts: a multiple of 16."""
        step = _step(dtype)
        b_units = sum(map(whole_strips, part_columns)) * -(-max_rank // step)
        size = self.max_sums * -(-in_features // step) + b_units
        self._memory = new_memory(
            num_places * size * UNIT_BYTES
        ).zero_()  # the system gives pages when they are written
        self._places: Units = self._memory.view(torch.int32).numpy().reshape(num_places, size)
        self.table = _Table(num_places, len(part_columns))

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes + sum(ids.nbytes + rows.nbytes for ids, rows in self._replaced.values())

    def load(self, place: int, parts: Sequence[AdapterPart], replaced: ReplacedRows | None = None) -> None:
        """As in `AdapterPlaces`."""
        self._check(parts)
        if replaced is not None:
            self._check_replaced(replaced)
        self.clear(place)
        if parts:
            self._load(place, parts)
        if replaced is not None:
            token_ids = replaced.token_ids.contiguous()
            rows = _write(replaced.rows.to(self._dtype))
            self._replaced[place] = token_ids, rows
            self.table.set_replaced(place, token_ids, rows.ctypes.data)

    def _load(self, place: int, parts: Sequence[AdapterPart]) -> None:
        taken = _Taker(self._places[place])
        a = torch.cat([functional.pad(part.a.to(self._dtype), (0, 0, 0, part.a.shape[0] % 2)) for part in parts])
        first_sums = np.cumsum([0, *(_even(part.a.shape[0]) for part in parts)])
        strips = _write(a, taken)
        pairs = [
            _Pair(int(first), part.first_row, part.b.shape[0], _write(part.b.to(self._dtype), taken), part.scale)
            for first, part in zip(first_sums, parts, strict=False)
        ]
        self.table.set(place, len(strips), strips.ctypes.data, pairs)

    def clear(self, place: int) -> None:
        """As in `AdapterPlaces`."""
        self.table.clear(place)
        self._replaced.pop(place, None)

    def _check(self, parts: Sequence[AdapterPart]) -> None:
        if len(parts) > len(self._part_columns):
            raise ValueError(f"{len(parts)} parts of an adapter: the linear has {len(self._part_columns)}")
        for part in parts:
            (rank, inner), (columns, other) = part.a.shape, part.b.shape
            if rank != other or inner != self.in_features or part.first_row + columns > self.out_features:
                raise ValueError(
                    f"a {list(part.a.shape)} and b {list(part.b.shape)} from row {part.first_row} on: the linear is "
                    f"{self.out_features} by {self.in_features}"
                )
            if not 1 <= rank <= self._max_rank:
                raise ValueError(f"an adapter of rank {rank}: at most {self._max_rank}")
        given = sorted(part.b.shape[0] for part in parts)[::-1]
        if any(columns > most for columns, most in zip(given, self._part_columns[::-1], strict=False)):
            raise ValueError(f"parts of {given} columns: those of the linear have {self._part_columns}")

    def _check_replaced(self, replaced: ReplacedRows) -> None:
        if not self.replaces_rows:
            raise ValueError("rows of this linear's weight cannot be replaced")
        _check_rows(replaced, (self.out_features, self.in_features))


class CpuEmbeddingPlaces:
    """Implements `device.adapters.EmbeddingPlaces`. A row of a is padded to whole vectors, and b is in strips."""

    def __init__(self, num_places: int, max_rank: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Arguments as in `AdapterKernels.new_embedding_places`."""
        self.hidden_size, self._max_rank, self._dtype = hidden_size, max_rank, dtype
        self.max_sums = whole_strips(max_rank)
        self._held: dict[int, list[Tensor | Units]] = {}
        self.table = _Table(num_places, 1)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for held in self._held.values() for each in held)

    def load(self, place: int, pair: EmbeddingPair | None, replaced: ReplacedRows | None = None) -> None:
        """As in `EmbeddingPlaces`."""
        self._check(pair, replaced)
        self.clear(place)
        held: list[Tensor | Units] = []
        if pair is not None:
            rank = pair.a.shape[1]
            wide = functional.pad(pair.a.to(self._dtype), (0, whole_strips(rank) - rank)).contiguous()
            b = _write(pair.b.to(self._dtype))
            held += [wide, b]
            part = _Pair(0, 0, self.hidden_size, b, pair.scale)
            self.table.set(place, wide.shape[1] // LANES, wide.data_ptr(), [part])
        if replaced is not None:
            token_ids, rows = replaced.token_ids.contiguous(), replaced.rows.to(self._dtype).contiguous()
            held += [token_ids, rows]
            self.table.set_replaced(place, token_ids, rows.data_ptr())
        self._held[place] = held  # kept alive: the table has their addresses

    def clear(self, place: int) -> None:
        """As in `EmbeddingPlaces`."""
        self.table.clear(place)
        self._held.pop(place, None)

    def _check(self, pair: EmbeddingPair | None, replaced: ReplacedRows | None) -> None:
        if pair is not None:
            rank = pair.a.shape[1]
            if pair.b.shape != (self.hidden_size, rank):
                raise ValueError(
                    f"a {list(pair.a.shape)} and b {list(pair.b.shape)} of embeddings of {self.hidden_size} numbers"
                )
            if not 1 <= rank <= self._max_rank:
                raise ValueError(f"an adapter of rank {rank}: at most {self._max_rank}")
        if replaced is not None:
            _check_rows(replaced, (None, self.hidden_size))


def _check_rows(replaced: ReplacedRows, shape: tuple[int | None, int]) -> None:
    """Raise ValueError for replaced rows that do not fit a weight; without a number of rows any index does."""
    ids, (num_rows, columns) = replaced.token_ids, shape
    if replaced.rows.shape != (len(ids), columns):
        raise ValueError(f"replaced rows {list(replaced.rows.shape)}: {[len(ids), columns]} are expected")
    within = not len(ids) or (int(ids[0]) >= 0 and (num_rows is None or int(ids[-1]) < num_rows))
    if not within or bool((ids.diff() <= 0).any()):
        raise ValueError(f"indexes of replaced rows must ascend from 0 on, below {num_rows}")


class _Taker:
    """Hands out a place's memory, one matrix after the other."""

    def __init__(self, memory: Units) -> None:
        self._left = memory

    def take(self, strips: int, units: int) -> Units:
        """Return [strips, units, 16]."""
        count = strips * units * LANES
        taken, self._left = self._left[:count], self._left[count:]
        return taken.reshape(strips, units, LANES)


def _write(matrix: Tensor, memory: _Taker | None = None) -> Units:
    """Write a matrix in strips, to new memory without a taker; the last strip and units are filled up with 0."""
    rows, columns = matrix.shape
    step = _step(matrix.dtype)
    padded = functional.pad(matrix, (0, -columns % step, 0, -rows % LANES)).contiguous()
    units = padded.view(torch.int32).numpy().reshape(-1, LANES, -(-columns // step))
    shape = len(units), units.shape[2]
    strips = np.empty((*shape, LANES), np.int32) if memory is None else memory.take(*shape)
    np.copyto(strips, units.transpose(0, 2, 1))
    return strips


def _step(dtype: torch.dtype) -> int:
    return inner_step("bfloat16" if dtype == torch.bfloat16 else "float32")


def _even(rank: int) -> int:
    return rank + rank % 2


def whole_strips(rows: int) -> int:
    """Round up to whole strips."""
    return -(-rows // LANES) * LANES
