"""The adapters' matrices on the device: for each linear, memory for as many adapters as one batch may have.

The scale, the rank and both matrices of a part lie at the adapter's place. Memory is for the largest rank, in blocks of
16; the kernels read the blocks of the actual rank only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.gpu.kernels.lora.tables import RowTable
from executor_svc.gpu.kernels.rows import DTYPES

RANKS = 16
"""Ranks of a block."""
FEATURES = 128
"""Rows of a linear's output that one program of `expand` computes."""
OUT_TILE_WORDS = 4
_ALIGNED = 16


class Matrices(Protocol):
    """What an adapter adds to some rows of a linear's output: scale * (x @ a.T @ b.T)."""

    @property
    def a(self) -> Tensor:
        """[r, in_features]."""
        ...

    @property
    def b(self) -> Tensor:
        """[rows, r]."""
        ...

    @property
    def scale(self) -> float: ...

    @property
    def first_row(self) -> int:
        """Of its rows among those of the linear."""
        ...


@dataclass(frozen=True, slots=True)
class Pair:
    """Implements `Matrices`."""

    a: Tensor
    b: Tensor
    scale: float
    first_row: int


@dataclass(frozen=True, slots=True)
class LoraShape:
    """A linear and its parts: several linears of the checkpoint may run as one, and have adapters of their own."""

    in_features: int
    out_features: int
    first_rows: tuple[int, ...]
    """Of each part, ascending from 0: a part ends where the next begins."""

    def __post_init__(self) -> None:
        """Raise ValueError for parts that are not in the linear, or not in their order."""
        ends = (*self.first_rows[1:], self.out_features)
        if not self.first_rows or self.first_rows[0] or any(a >= b for a, b in self.parts):
            raise ValueError(f"first_rows: {self.first_rows} must ascend from 0 up to below {ends[-1]}")

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The first row and the end of each part."""
        return list(zip(self.first_rows, (*self.first_rows[1:], self.out_features), strict=True))

    @property
    def is_aligned(self) -> bool:
        """Whether all parts begin and end at multiples of 16 rows, so that their rows are read 16 bytes at a time."""
        return not any(row % _ALIGNED for part in self.parts for row in part)


@dataclass(frozen=True, slots=True)
class LoraPlaces:
    """The matrices of the adapters of one linear; or b alone, with in_features 0, of a table of embeddings."""

    shape: LoraShape
    max_rank: int
    a: Tensor
    """[max_loras, parts, max_rank padded, in_features] in the dtype of the linear's rows."""
    b: Tensor
    """[max_loras, blocks, out_features, 16]: the ranks of a block of each row; blocks = max_rank padded / 16."""
    ranks: Tensor
    """[max_loras, parts] int32; 0: the adapter does not have this part."""
    scales: Tensor
    """[max_loras, parts] float32."""
    out_tiles: Tensor
    """[N, 4] int32: part, first row and end of the rows of one program of `expand`, 0."""

    @classmethod
    def empty(
        cls, shape: LoraShape, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> LoraPlaces:
        """Return places without adapters. Raises ValueError naming the argument."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype: must be one of activations, is {dtype}")
        if max_loras < 1 or max_rank < 1:
            raise ValueError(f"--max-loras {max_loras}, --max-lora-rank {max_rank}: must be at least 1")
        parts, blocks = len(shape.parts), -(-max_rank // RANKS)
        tiles = [
            (part, first, min(first + FEATURES, end), 0)
            for part, (start, end) in enumerate(shape.parts)
            for first in range(start, end, FEATURES)
        ]
        return cls(
            shape,
            max_rank,
            torch.zeros(max_loras, parts, blocks * RANKS, shape.in_features, dtype=dtype, device=device),
            torch.zeros(max_loras, blocks, shape.out_features, RANKS, dtype=dtype, device=device),
            torch.zeros(max_loras, parts, dtype=torch.int32, device=device),
            torch.zeros(max_loras, parts, dtype=torch.float32, device=device),
            torch.tensor(tiles, dtype=torch.int32, device=device),
        )

    @property
    def max_loras(self) -> int:
        return self.a.shape[0]

    @property
    def num_parts(self) -> int:
        return self.a.shape[1]

    @property
    def blocks(self) -> int:
        """Blocks of 16 ranks of each part."""
        return self.b.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.a, self.b, self.ranks, self.scales, self.out_tiles))

    def load(self, place: int, parts: Sequence[Matrices]) -> None:
        """Put an adapter in a place, in place of what was there; numbers are rounded to the dtype of the places.

        Enqueues copies on the current stream: steps that were enqueued before still read the former adapter. Parts on
        the CPU must stay as they are until the copies are done.

        Raises ValueError, before anything is written, for a part that the linear does not have or that is too large.
        """
        numbers = [self._part_of(each) for each in parts]
        if not 0 <= place < self.max_loras or len(set(numbers)) < len(numbers):
            raise ValueError(f"place {place}, parts {numbers}: no such place, or a part twice")
        self.clear(place)
        for number, each in zip(numbers, parts, strict=True):
            self._write_part(place, number, each)

    def clear(self, place: int) -> None:
        """Take the adapter out of a place: rows of this place are then untouched."""
        self.ranks[place].zero_()

    def check_table(self, table: RowTable, num_rows: int) -> None:
        """Raise ValueError unless a table may be of so many rows, and of as many places as there are."""
        if table.max_loras != self.max_loras or table.rows.numel() < num_rows:
            raise ValueError(
                f"table: of {table.rows.numel()} rows and {table.max_loras} places, "
                f"not of {num_rows} and {self.max_loras}"
            )

    def _part_of(self, part: Matrices) -> int:
        (rank, in_features), (num_rows, same) = part.a.shape, part.b.shape
        bounds = (part.first_row, part.first_row + num_rows)
        if rank != same or in_features != self.shape.in_features or bounds not in self.shape.parts:
            raise ValueError(
                f"a {list(part.a.shape)}, b {list(part.b.shape)} of rows from {part.first_row} on: "
                f"no part of {self.shape}"
            )
        if not 1 <= rank <= self.max_rank:
            raise ValueError(f"--max-lora-rank {self.max_rank}: a part has rank {rank}")
        return self.shape.parts.index(bounds)

    def _write_part(self, place: int, number: int, part: Matrices) -> None:
        rank, (first, end) = part.a.shape[0], self.shape.parts[number]
        self.a[place, number, :rank].copy_(part.a, non_blocking=True)
        for block, start in enumerate(range(0, rank, RANKS)):
            target, source = self.b[place, block, first:end], part.b[:, start : start + RANKS]
            target[:, : source.shape[1]].copy_(source, non_blocking=True)
            # The kernel multiplies whole blocks: what a former adapter left here may not be finite.
            target[:, source.shape[1] :].zero_()
        self.ranks[place, number].fill_(rank)
        self.scales[place, number].fill_(part.scale)
