"""Scales and zero points, which groups of columns share, in the shapes of checkpoints: read as rows [R, G]."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from executor_svc.models.quantized.rows import row_ranges, unpack_words
from executor_svc.models.quantized.tensors import CheckpointTensors, check_group, checked

Strategy = Literal["tensor", "channel", "group", "block"]
RowBlocks = Callable[[int], Iterator[Tensor]]
"""Yields [R, G], at most this number of rows at a time, as `LazyRows.read`."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """The numbers of a weight [N, K] that share a scale: all, a row, a group of columns of a row, or a block."""

    strategy: Strategy
    size: tuple[int, int] = (1, 1)
    """[rows, columns] of a group or block."""

    def columns(self, name: str, shape: tuple[int, int]) -> int:
        """Return the columns of a row that share a scale; raises LoaderError, by name, if no kernel has them."""
        if self.strategy in ("tensor", "channel"):
            return shape[1]
        # The last block of a row may be a part: smaller groups divide both the block and the row.
        group = math.gcd(self.size[1], shape[1]) if self.strategy == "block" else self.size[1]
        check_group(name, group, shape[1])
        return group

    @property
    def rows(self) -> int:
        """Consecutive rows that share their scales, where not all do."""
        return self.size[0] if self.strategy == "block" else 1

    def stored_shapes(self, shape: tuple[int, int]) -> list[tuple[int, ...]]:
        """Return the shapes that a tensor of the scales may have."""
        rows, columns = shape
        if self.strategy == "tensor":
            return [(1,), (), (1, 1)]
        if self.strategy == "channel":
            return [(rows, 1), (rows,)]
        return [(-(-rows // self.size[0]), -(-columns // self.size[1]))]


def group_numbers(
    tensors: CheckpointTensors, name: str, shape: tuple[int, int], grouping: Grouping, dtypes: list[torch.dtype]
) -> tuple[torch.dtype, RowBlocks]:
    """Check a tensor of one number for each group of a weight [N, K]; return its dtype and its rows, read later."""
    stored = checked(tensors, name, grouping.stored_shapes(shape), dtypes)
    assert stored.dtype is not None

    def by_rows(rows: int) -> Iterator[Tensor]:
        for block in tensors.raw_blocks(name, rows):
            yield block.reshape(len(block), -1)

    def one(rows: int) -> Iterator[Tensor]:
        number = tensors.raw(name).reshape(1, 1)
        for part in row_ranges(shape[0], rows):
            yield number.repeat(part.stop - part.start, 1)

    def by_blocks(rows: int) -> Iterator[Tensor]:
        table, height, width = tensors.raw(name), *grouping.size
        group = grouping.columns(name, shape)
        columns = torch.arange(shape[1] // group) * group // width
        for part in row_ranges(shape[0], rows):
            yield table[torch.arange(part.start, part.stop) // height][:, columns]

    return stored.dtype, {"tensor": one, "block": by_blocks}.get(grouping.strategy, by_rows)


def packed_zero_points(
    tensors: CheckpointTensors, name: str, shape: tuple[int, int], grouping: Grouping, bits: int
) -> RowBlocks:
    """Check zero points of a weight [N, K] that are packed along N: [N * bits / 32, G] int32; return them [R, G]."""
    groups = shape[1] // grouping.columns(name, shape)
    checked(tensors, name, [(-(-shape[0] * bits // 32), groups)], [torch.int32])

    def read(rows: int) -> Iterator[Tensor]:
        zeros = unpack_words(tensors.raw(name).t(), bits)[:, : shape[0]].t()
        for part in row_ranges(shape[0], rows):
            yield zeros[part].contiguous()

    return read


def signed_zero_points(
    tensors: CheckpointTensors, name: str, shape: tuple[int, int], grouping: Grouping, zero: int
) -> RowBlocks:
    """Check zero points in int8; return them as codes: with `zero` added."""
    _, read_signed = group_numbers(tensors, name, shape, grouping, [torch.int8])

    def read(rows: int) -> Iterator[Tensor]:
        for block in read_signed(rows):
            yield (block.to(torch.int16) + zero).to(torch.uint8)

    return read
