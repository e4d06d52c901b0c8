"""The adapters' matrices on the device: for each linear, memory for as many adapters as one batch may have.

The scale, the rank and both matrices of a part lie at the adapter's place. Memory is for the largest rank, in blocks of
16; the kernels read the blocks of the actual rank only. An adapter is packed in the same order in the host's memory, so
that a place takes a few copies: one for a of each part, one for b, and two for ranks and scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.device.adapters import AdapterPart
from executor_svc.gpu.kernels.lora.tables import RowTable
from executor_svc.gpu.kernels.rows import DTYPES

RANKS = 16
"""Ranks of a block."""
FEATURES = 128
"""Rows of a linear's output that one program of `expand` computes."""
OUT_TILE_WORDS = 4
_ALIGNED = 16
_PIECE = 64
"""Packed pieces begin at multiples of so many bytes."""


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Implements `AdapterPart`."""

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
class PackedPairs:
    """The parts of one linear of an adapter, as they lie at a place, in the host's memory."""

    a: tuple[tuple[int, Tensor], ...]
    """The number of each part that there is, and its a [rank, in_features]."""
    b: Tensor
    """[blocks of the largest rank, out_features, 16]; 0 where a part has no rank."""
    ranks: Tensor
    """[parts] int32."""
    scales: Tensor
    """[parts] float32."""


class Taker:
    """Hands out packed memory, piece by piece."""

    def __init__(self, memory: Tensor) -> None:
        """memory: [num_bytes] uint8, zeros."""
        self._memory = memory

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return the next piece; its zeros are kept until it is written."""
        num_bytes = piece_bytes(dtype, *shape)
        assert num_bytes <= len(self._memory), "packed_bytes says how much is needed"
        piece, self._memory = self._memory[:num_bytes].view(dtype), self._memory[num_bytes:]
        return piece[: torch.Size(shape).numel()].view(shape)


def piece_bytes(dtype: torch.dtype, *shape: int) -> int:
    """Return the bytes of a piece: a multiple of 64."""
    return -(-torch.Size(shape).numel() * dtype.itemsize // _PIECE) * _PIECE


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
        parts, blocks = len(shape.parts), _blocks(max_rank)
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

    # ------------------------------------------------------------------ adapters on the host

    def packed_bytes(self, ranks: Sequence[int]) -> int:
        """Return the memory that `pack` takes for parts of these ranks; none: 0."""
        return sum(piece_bytes(dtype, *shape) for dtype, shape in self._pieces(ranks))

    def pack(self, parts: Sequence[AdapterPart], memory: Taker) -> PackedPairs:
        """Copy parts, at least one, to memory, rounded to the dtype of the places. Raises ValueError as `check`."""
        numbers, kept = self.check(parts), []
        ranks = [part.a.shape[0] for part in parts]
        *firsts, b, all_ranks, scales = (memory.take(dtype, *shape) for dtype, shape in self._pieces(ranks))
        for number, part, rank, a in zip(numbers, parts, ranks, firsts, strict=True):
            kept.append((number, a.copy_(part.a)))
            first, end = self.shape.parts[number]
            for block, start in enumerate(range(0, rank, RANKS)):
                source = part.b[:, start : start + RANKS]
                b[block, first:end, : source.shape[1]].copy_(source)
            all_ranks[number], scales[number] = rank, part.scale
        return PackedPairs(tuple(kept), b, all_ranks, scales)

    def check(self, parts: Sequence[AdapterPart]) -> list[int]:
        """Return the number of each part; raises ValueError for one that the linear does not have, or too large."""
        numbers = [self._part_of(each) for each in parts]
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"parts {numbers}: a part twice")
        return numbers

    def _pieces(self, ranks: Sequence[int]) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
        """Yield the dtypes and shapes of the tensors of an adapter."""
        if ranks:
            yield from ((self.a.dtype, (rank, self.shape.in_features)) for rank in ranks)
            yield self.b.dtype, (_blocks(max(ranks)), self.shape.out_features, RANKS)
            yield torch.int32, (self.num_parts,)
            yield torch.float32, (self.num_parts,)

    def _part_of(self, part: AdapterPart) -> int:
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

    # ------------------------------------------------------------------ places

    def set(self, place: int, packed: PackedPairs | None) -> None:
        """Enqueue the copy of an adapter to a place, in place of what was there; None: nothing, so its rows stay.

        Steps that were enqueued before still read the former adapter.
        """
        if packed is None:
            self.ranks[place].zero_()
            return
        for number, a in packed.a:
            self.a[place, number, : len(a)].copy_(a, non_blocking=True)
        # Whole blocks: the kernel multiplies them, and what a former adapter left in them may not be finite.
        self.b[place, : len(packed.b)].copy_(packed.b, non_blocking=True)
        self.ranks[place].copy_(packed.ranks, non_blocking=True)
        self.scales[place].copy_(packed.scales, non_blocking=True)

    def check_table(self, table: RowTable, num_rows: int) -> None:
        """Raise ValueError unless a table may be of so many rows, and of as many places as there are."""
        if table.max_loras != self.max_loras or table.rows.numel() < num_rows:
            raise ValueError(
                f"table: of {table.rows.numel()} rows and {table.max_loras} places, "
                f"not of {num_rows} and {self.max_loras}"
            )


def _blocks(rank: int) -> int:
    return -(-rank // RANKS)
