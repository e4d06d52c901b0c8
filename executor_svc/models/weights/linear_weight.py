"""The weight of a linear, made of stored tensors block by block, so that no second copy of it is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from executor_svc.device.dense_rows import DequantizedRows
from executor_svc.device.file_rows import FileRows, InFile
from executor_svc.device.kernels import AttentionShape, WeightRows
from executor_svc.device.stored_linear import QuantBlock, QuantRows, StoredLinear
from executor_svc.models.base import StoredWeight
from executor_svc.models.layers.attention import HeadRows, pad_output

StoredPart = StoredWeight | QuantRows
"""What a source opens as the weight of a linear."""


class LinearWeight:
    """Implements `device.kernels.WeightRows`: stored tensors [rows, columns], one below the other."""

    def __init__(
        self,
        parts: Sequence[StoredWeight],
        dtype: torch.dtype,
        *,
        shape: tuple[int, int] | None = None,
        widen: Sequence[Callable[[Tensor], Tensor]] = (),
        multiple: int | None = None,
    ) -> None:
        """Take parts with the same number of columns.

        widen: for each part, applied to each block of its rows; none: rows stay as they are. shape: of the whole after
        it; multiple: of the rows that it needs, None: any number.
        """
        self._parts = parts
        self._columns = parts[0].shape[1]
        self._widen = widen
        self._multiple = multiple
        self.dtype = dtype
        self.shape = shape or (sum(part.shape[0] for part in parts), self._columns)

    @property
    def stored(self) -> list[LinearWeight]:
        """The stored tensors, each as the weight of a linear of its own; their rows are not changed."""
        assert not self._widen
        return [LinearWeight([part], self.dtype) for part in self._parts]

    def in_file(self) -> FileRows | None:
        """As in `device.file_rows.InFile`."""
        (part,) = self._parts
        return part.in_file() if isinstance(part, InFile) and not self._widen else None

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[Tensor]:
        """As in `WeightRows`."""
        unit = self._multiple or multiple
        rows = unit * max(1, num_bytes // (unit * self._columns * self.dtype.itemsize))
        for index, part in enumerate(self._parts):
            for block in part.blocks(rows):
                yield self._widened(index, block)

    def whole(self) -> Tensor:
        """As in `WeightRows`."""
        wide = [self._widened(index, part.whole()) for index, part in enumerate(self._parts)]
        return wide[0] if len(wide) == 1 else torch.cat(wide)

    def _widened(self, index: int, block: Tensor) -> Tensor:
        return self._widen[index](block) if self._widen else block


def linear_weight(parts: Sequence[StoredPart], dtype: torch.dtype) -> LinearWeight | StoredLinear:
    """Return the weight of parts [rows, columns], one below the other."""
    if any(isinstance(part, QuantRows) for part in parts):
        return StoredLinear([_in_few_bits_or_dense(part, dtype) for part in parts], dtype)
    return LinearWeight([part for part in parts if not isinstance(part, QuantRows)], dtype)


def _in_few_bits_or_dense(part: StoredPart, dtype: torch.dtype) -> QuantRows | WeightRows:
    return part if isinstance(part, QuantRows) else LinearWeight([part], dtype)


def qkv_weight(
    parts: Sequence[StoredPart], dtype: torch.dtype, heads: Sequence[HeadRows]
) -> LinearWeight | StoredLinear:
    """Return the weight of q, k and v [heads * D, hidden]; heads: what becomes of the rows of each part."""
    if all(each.is_same for each in heads):
        return linear_weight(parts, dtype)
    if any(isinstance(part, QuantRows) for part in parts):
        return StoredLinear([_heads(part, dtype, rows) for part, rows in zip(parts, heads, strict=True)], dtype)
    return _dense_heads([part for part in parts if not isinstance(part, QuantRows)], dtype, heads)


def _heads(part: StoredPart, dtype: torch.dtype, heads: HeadRows) -> QuantRows | WeightRows:
    if isinstance(part, QuantRows):
        return part if heads.is_same else QuantHeads(part, heads)
    return _dense_heads([part], dtype, [heads])


def _dense_heads(parts: Sequence[StoredWeight], dtype: torch.dtype, heads: Sequence[HeadRows]) -> LinearWeight:
    size, padded = heads[0].head_size, heads[0].padded_head_size
    count = sum(part.shape[0] for part in parts) // size
    # Queries and their gates are read together; what follows them has fewer rows.
    unit = next((part.shape[0] for part, each in zip(parts, heads, strict=True) if each.gated), size)
    return LinearWeight(parts, dtype, shape=(count * padded, parts[0].shape[1]), widen=heads, multiple=unit)


def output_weight(
    part: StoredPart, dtype: torch.dtype, shape: AttentionShape, device: torch.device
) -> LinearWeight | StoredLinear:
    """Return an output weight [hidden, H * D] as [hidden, H * DP].

    With padding it is dense: groups of columns that share a scale may be parts of two heads.
    """
    if shape.head_size == shape.padded_head_size:
        return linear_weight([part], dtype)
    size = part.shape[0], shape.num_heads * shape.padded_head_size

    def widen(block: Tensor) -> Tensor:
        return pad_output(block, shape)

    if isinstance(part, QuantRows):
        return StoredLinear([DequantizedRows(part, dtype, device, shape=size, widen=widen)], dtype)
    return LinearWeight([part], dtype, shape=size, widen=[widen])


def head_gate_weight(
    part: StoredPart, dtype: torch.dtype, shape: AttentionShape, device: torch.device
) -> LinearWeight | StoredLinear:
    """Return a weight [H, hidden] as [H * DP, hidden], each row for all columns of its head; it is dense."""
    size = shape.num_heads * shape.padded_head_size, part.shape[1]

    def widen(block: Tensor) -> Tensor:
        return block.repeat_interleave(shape.padded_head_size, 0)

    if isinstance(part, QuantRows):
        return StoredLinear([DequantizedRows(part, dtype, device, shape=size, widen=widen)], dtype)
    return LinearWeight([part], dtype, shape=size, widen=[widen], multiple=1)


class QuantHeads:
    """Implements `QuantRows`: rows of heads in another order, and rows of zeros after those of each head.

    All numbers of the zeros are 0: with a scale of 0 every code is zero, and where scales are powers of 2 the code 0
    is.
    """

    def __init__(self, rows: QuantRows, heads: HeadRows) -> None:
        """rows: [heads * head_size, in_features]."""
        self._rows = rows
        self._heads = heads
        self.shape = rows.shape[0] // heads.head_size * heads.padded_head_size, rows.shape[1]
        self.format = rows.format
        self.column_order = rows.column_order
        self.whole_row_activations = rows.whole_row_activations

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        """As in `QuantRows`; whole heads at a time."""
        unit = self._heads.head_size if self._heads.is_padded else math.lcm(multiple, self._heads.head_size)
        unit = self._rows.shape[0] if self._heads.gated else unit
        for block in self._rows.blocks(num_bytes, unit):
            planes: dict[str, Any] = {each.name: self._placed(getattr(block, each.name)) for each in fields(block)}
            yield QuantBlock(**planes)

    def _placed(self, plane: Tensor | None) -> Tensor | None:
        return None if plane is None else self._heads(plane)
