"""The weight of a linear, made of stored tensors block by block, so that no second copy of it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from executor_svc.device.dense_rows import DequantizedRows
from executor_svc.device.kernels import AttentionShape, WeightRows
from executor_svc.device.stored_linear import QuantBlock, QuantRows, StoredLinear
from executor_svc.models.base import StoredWeight
from executor_svc.models.layers.attention import pad_heads, pad_output

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
        widen: Callable[[Tensor], Tensor] | None = None,
        multiple: int | None = None,
    ) -> None:
        """Take parts with the same number of columns.

        widen: applied to each block of rows; shape: of the whole after it; multiple: of the rows that it needs, None:
        any number.
        """
        self._parts = parts
        self._columns = parts[0].shape[1]
        self._widen = widen
        self._multiple = multiple
        self.dtype = dtype
        self.shape = shape or (sum(part.shape[0] for part in parts), self._columns)

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[Tensor]:
        """As in `WeightRows`."""
        unit = self._multiple or multiple
        rows = unit * max(1, num_bytes // (unit * self._columns * self.dtype.itemsize))
        for part in self._parts:
            for block in part.blocks(rows):
                yield self._widened(block)

    def whole(self) -> Tensor:
        """As in `WeightRows`."""
        wide = [self._widened(part.whole()) for part in self._parts]
        return wide[0] if len(wide) == 1 else torch.cat(wide)

    def _widened(self, block: Tensor) -> Tensor:
        return block if self._widen is None else self._widen(block)


def linear_weight(parts: Sequence[StoredPart], dtype: torch.dtype) -> LinearWeight | StoredLinear:
    """Return the weight of parts [rows, columns], one below the other."""
    if any(isinstance(part, QuantRows) for part in parts):
        return StoredLinear([_in_few_bits_or_dense(part, dtype) for part in parts], dtype)
    return LinearWeight([part for part in parts if not isinstance(part, QuantRows)], dtype)


def _in_few_bits_or_dense(part: StoredPart, dtype: torch.dtype) -> QuantRows | WeightRows:
    return part if isinstance(part, QuantRows) else LinearWeight([part], dtype)


def qkv_weight(parts: Sequence[StoredPart], dtype: torch.dtype, shape: AttentionShape) -> LinearWeight | StoredLinear:
    """Return the weight of q, k and v [heads * D, hidden], each head widened to the padded size."""
    if shape.head_size == shape.padded_head_size:
        return linear_weight(parts, dtype)
    if any(isinstance(part, QuantRows) for part in parts):
        return StoredLinear([_padded_heads(part, dtype, shape) for part in parts], dtype)
    return _dense_heads([part for part in parts if not isinstance(part, QuantRows)], dtype, shape)


def _padded_heads(part: StoredPart, dtype: torch.dtype, shape: AttentionShape) -> QuantRows | WeightRows:
    if isinstance(part, QuantRows):
        return PaddedHeads(part, shape.head_size, shape.padded_head_size)
    return _dense_heads([part], dtype, shape)


def _dense_heads(parts: Sequence[StoredWeight], dtype: torch.dtype, shape: AttentionShape) -> LinearWeight:
    size, padded = shape.head_size, shape.padded_head_size
    heads = sum(part.shape[0] for part in parts) // size
    return LinearWeight(
        parts,
        dtype,
        shape=(heads * padded, parts[0].shape[1]),
        widen=lambda block: pad_heads(block, size, padded),
        multiple=size,
    )


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
    return LinearWeight([part], dtype, shape=size, widen=widen)


class PaddedHeads:
    """Implements `QuantRows`: rows of zeros after those of each head.

    All their numbers are 0: with a scale of 0 every code is zero, and where scales are powers of 2 the code 0 is.
    """

    def __init__(self, rows: QuantRows, head_size: int, padded_head_size: int) -> None:
        """rows: [heads * head_size, in_features]."""
        self._rows = rows
        self._sizes = head_size, padded_head_size
        self.shape = rows.shape[0] // head_size * padded_head_size, rows.shape[1]
        self.format = rows.format
        self.column_order = rows.column_order
        self.whole_row_activations = rows.whole_row_activations

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        """As in `QuantRows`; whole heads at a time."""
        for block in self._rows.blocks(num_bytes, self._sizes[0]):
            planes: dict[str, Any] = {each.name: self._padded(getattr(block, each.name)) for each in fields(block)}
            yield QuantBlock(**planes)

    def _padded(self, plane: Tensor | None) -> Tensor | None:
        return None if plane is None else pad_heads(plane, *self._sizes)
