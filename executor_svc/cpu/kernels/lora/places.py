"""Adapters in memory in the order in which kernels read them, and places that point to them.

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
from executor_svc.cpu.kernels.panel_layout import UNIT_BYTES, inner_step
from executor_svc.device.adapters import AdapterPart, EmbeddingPair, PackedPart, ReplacedRows
from executor_svc.plan.arrays import IntArray

Units = NDArray[np.int32]

PLACE_FIELDS = 6
"""Of a place's row: strips of a, address of a, number of parts; number of replaced rows, addresses of their indexes and
of the rows; then the fields of each part."""

PART_FIELDS = 6
"""First of its sums, units of a row of b, first column of the result, columns, address of b, scale (a float)."""

_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class CpuPackedPart:
    """Implements `device.adapters.PackedPart`."""

    fields: IntArray
    """A place's row."""
    memory: Tensor
    """What the fields have addresses of."""


class _PlaceTable:
    """A row for each place: what a kernel reads of it."""

    def __init__(self, num_places: int, num_parts: int) -> None:
        self._fields = np.zeros((num_places, PLACE_FIELDS + num_parts * PART_FIELDS), np.int64)
        self._held: list[PackedPart | None] = [None] * num_places

    @property
    def address(self) -> int:
        return int(self._fields.ctypes.data)

    @property
    def row_bytes(self) -> int:
        return self._fields.strides[0]

    def new_row(self) -> IntArray:
        return np.zeros(self._fields.shape[1], np.int64)

    def set(self, place: int, packed: PackedPart | None) -> None:
        if not 0 <= place < len(self._held):
            raise ValueError(f"adapter place {place}: there are {len(self._held)}")
        assert packed is None or isinstance(packed, CpuPackedPart)
        self._fields[place] = 0 if packed is None else packed.fields
        self._held[place] = packed


class CpuAdapterPlaces:
    """Implements `device.adapters.AdapterPlaces`: a place has the addresses of an adapter's packed parts."""

    def __init__(
        self,
        num_places: int,
        max_rank: int,
        in_features: int,
        part_columns: Sequence[int],
        dtype: torch.dtype,
        replaces_rows: bool = False,
    ) -> None:
        """Arguments as in `AdapterKernels.new_adapter_places`."""
        self.in_features, self.out_features = in_features, sum(part_columns)
        self._max_rank, self._part_columns, self._dtype = max_rank, sorted(part_columns), dtype
        self.replaces_rows = replaces_rows
        self.max_sums = whole_strips(len(part_columns) * _even(max_rank))
        """Sums of a row at most, over all parts: a multiple of 16."""
        self.table = _PlaceTable(num_places, len(part_columns))

    def bytes_of_rank(self, rank: int) -> int:
        """As in `AdapterPlaces`."""
        a = _strip_bytes(len(self._part_columns) * _even(rank), self.in_features, self._dtype)
        return a + sum(_strip_bytes(columns, rank, self._dtype) for columns in self._part_columns)

    def packed_bytes(self, parts: Sequence[AdapterPart], replaced: ReplacedRows | None = None) -> int:
        """As in `AdapterPlaces`."""
        self._check(parts, replaced)
        total = _strip_bytes(sum(_even(part.a.shape[0]) for part in parts), self.in_features, self._dtype)
        total += sum(_strip_bytes(len(part.b), part.b.shape[1], self._dtype) for part in parts)
        if replaced is None:
            return total
        num_rows = len(replaced.token_ids)
        return total + _aligned(8 * num_rows) + _strip_bytes(num_rows, self.in_features, self._dtype)

    def pack(self, parts: Sequence[AdapterPart], replaced: ReplacedRows | None, memory: Tensor) -> CpuPackedPart:
        """As in `AdapterPlaces`."""
        self._check(parts, replaced)
        row, taker = self.table.new_row(), _Taker(memory)
        if parts:
            wide = [functional.pad(part.a.to(self._dtype), (0, 0, 0, part.a.shape[0] % 2)) for part in parts]
            strips = _write(torch.cat(wide), taker)
            row[:3] = len(strips), strips.ctypes.data, len(parts)
            first_sum = 0
            for which, part in enumerate(parts):
                b = _write(part.b.to(self._dtype), taker)
                _set_part(row, which, first_sum, part.first_row, b, part.b.shape[0], part.scale)
                first_sum += _even(part.a.shape[0])
        if replaced is not None:
            row[3], row[4] = len(replaced.token_ids), taker.copy_of(replaced.token_ids)
            row[5] = _write(replaced.rows.to(self._dtype), taker).ctypes.data
        return CpuPackedPart(row, memory)

    def set(self, place: int, packed: PackedPart | None) -> None:
        """As in `AdapterPlaces`."""
        self.table.set(place, packed)

    def _check(self, parts: Sequence[AdapterPart], replaced: ReplacedRows | None) -> None:
        if len(parts) > len(self._part_columns):
            raise ValueError(f"{len(parts)} parts of an adapter: the linear has {len(self._part_columns)}")
        for part in parts:
            (rank, inner), (columns, other) = part.a.shape, part.b.shape
            if rank != other or inner != self.in_features or part.first_row + columns > self.out_features:
                raise ValueError(
                    f"a {list(part.a.shape)} and b {list(part.b.shape)} from row {part.first_row} on: the linear is "
                    f"{self.out_features} by {self.in_features}"
                )
            _check_rank(rank, self._max_rank)
        if replaced is not None:
            if not self.replaces_rows:
                raise ValueError("rows of this linear's weight cannot be replaced")
            _check_rows(replaced, (self.out_features, self.in_features))


class CpuEmbeddingPlaces:
    """Implements `device.adapters.EmbeddingPlaces`. A row of a is padded to whole vectors, and b is in strips."""

    def __init__(self, num_places: int, max_rank: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Arguments as in `AdapterKernels.new_embedding_places`."""
        self.hidden_size, self._max_rank, self._dtype = hidden_size, max_rank, dtype
        self.max_sums = whole_strips(max_rank)
        self.table = _PlaceTable(num_places, 1)

    def bytes_of_rank(self, vocabulary: int, rank: int) -> int:
        """As in `EmbeddingPlaces`."""
        rows = _aligned(vocabulary * whole_strips(rank) * self._dtype.itemsize)
        return rows + _strip_bytes(self.hidden_size, rank, self._dtype)

    def packed_bytes(self, pair: EmbeddingPair | None, replaced: ReplacedRows | None = None) -> int:
        """As in `AdapterPlaces`."""
        self._check(pair, replaced)
        total = 0
        if pair is not None:
            total += self.bytes_of_rank(*pair.a.shape)
        if replaced is not None:
            total += _aligned(8 * len(replaced.token_ids)) + _aligned(replaced.rows.numel() * self._dtype.itemsize)
        return total

    def pack(self, pair: EmbeddingPair | None, replaced: ReplacedRows | None, memory: Tensor) -> CpuPackedPart:
        """As in `AdapterPlaces`."""
        self._check(pair, replaced)
        row, taker = self.table.new_row(), _Taker(memory)
        if pair is not None:
            rank = pair.a.shape[1]
            wide = functional.pad(pair.a.to(self._dtype), (0, whole_strips(rank) - rank))
            row[:3] = wide.shape[1] // LANES, taker.copy_of(wide), 1
            _set_part(row, 0, 0, 0, _write(pair.b.to(self._dtype), taker), self.hidden_size, pair.scale)
        if replaced is not None:
            row[3] = len(replaced.token_ids)
            row[4] = taker.copy_of(replaced.token_ids)
            row[5] = taker.copy_of(replaced.rows.to(self._dtype))
        return CpuPackedPart(row, memory)

    def set(self, place: int, packed: PackedPart | None) -> None:
        """As in `AdapterPlaces`."""
        self.table.set(place, packed)

    def _check(self, pair: EmbeddingPair | None, replaced: ReplacedRows | None) -> None:
        if pair is not None:
            rank = pair.a.shape[1]
            if pair.b.shape != (self.hidden_size, rank):
                raise ValueError(
                    f"a {list(pair.a.shape)} and b {list(pair.b.shape)} of embeddings of {self.hidden_size} numbers"
                )
            _check_rank(rank, self._max_rank)
        if replaced is not None:
            _check_rows(replaced, (None, self.hidden_size))


def _set_part(
    row: IntArray, which: int, first_sum: int, first_column: int, b: Units, columns: int, scale: float
) -> None:
    fields = row[PLACE_FIELDS + which * PART_FIELDS :][:PART_FIELDS]
    fields[:5] = first_sum, b.shape[1], first_column, columns, b.ctypes.data
    fields[5:].view(np.float32)[0] = scale


def _check_rank(rank: int, most: int) -> None:
    if not 1 <= rank <= most:
        raise ValueError(f"an adapter of rank {rank}: at most {most}")


def _check_rows(replaced: ReplacedRows, shape: tuple[int | None, int]) -> None:
    """Raise ValueError for replaced rows that do not fit a weight; without a number of rows any index does."""
    ids, (num_rows, columns) = replaced.token_ids, shape
    if replaced.rows.shape != (len(ids), columns):
        raise ValueError(f"replaced rows {list(replaced.rows.shape)}: {[len(ids), columns]} are expected")
    within = not len(ids) or (int(ids[0]) >= 0 and (num_rows is None or int(ids[-1]) < num_rows))
    if not within or bool((ids.diff() <= 0).any()):
        raise ValueError(f"indexes of replaced rows must ascend from 0 on, below {num_rows}")


class _Taker:
    """Hands out memory, one array after the other."""

    def __init__(self, memory: Tensor) -> None:
        self._left: NDArray[np.uint8] = memory.numpy()

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        taken, self._left = self._left[:num_bytes], self._left[_aligned(num_bytes) :]
        assert taken.size == num_bytes, "packed_bytes says how much is needed"
        return taken

    def copy_of(self, source: Tensor) -> int:
        """Copy a tensor; return the copy's address."""
        numbers = source.contiguous().view(torch.uint8).numpy().ravel()
        taken = self.take(numbers.size)
        np.copyto(taken, numbers)
        return int(taken.ctypes.data)


def _write(matrix: Tensor, memory: _Taker) -> Units:
    """Write a matrix in strips [strips, units, 16]; the last strip and units are filled up with 0."""
    rows, columns = matrix.shape
    step = _step(matrix.dtype)
    padded = functional.pad(matrix, (0, -columns % step, 0, -rows % LANES)).contiguous()
    units = padded.view(torch.int32).numpy().reshape(-1, LANES, -(-columns // step))
    strips = memory.take(units.nbytes).view(np.int32).reshape(len(units), units.shape[2], LANES)
    np.copyto(strips, units.transpose(0, 2, 1))
    return strips


def _strip_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    return whole_strips(rows) * -(-columns // _step(dtype)) * UNIT_BYTES


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _step(dtype: torch.dtype) -> int:
    return inner_step("bfloat16" if dtype == torch.bfloat16 else "float32")


def _even(rank: int) -> int:
    return rank + rank % 2


def whole_strips(rows: int) -> int:
    """Round up to whole strips."""
    return -(-rows // LANES) * LANES
