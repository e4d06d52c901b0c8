"""The weight of a linear, made of stored tensors block by block, so that no second copy of it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionShape
from executor_svc.models.base import StoredWeight
from executor_svc.models.layers.attention import pad_heads, pad_output


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


def qkv_weight(parts: Sequence[StoredWeight], dtype: torch.dtype, shape: AttentionShape) -> LinearWeight:
    """Return the weight of q, k and v [heads * D, hidden], each head widened to the padded size."""
    size, padded = shape.head_size, shape.padded_head_size
    if size == padded:
        return LinearWeight(parts, dtype)
    heads = sum(part.shape[0] for part in parts) // size
    return LinearWeight(
        parts,
        dtype,
        shape=(heads * padded, parts[0].shape[1]),
        widen=lambda block: pad_heads(block, size, padded),
        multiple=size,
    )


def output_weight(part: StoredWeight, dtype: torch.dtype, shape: AttentionShape) -> LinearWeight:
    """Return an output weight [hidden, H * D] as [hidden, H * DP]."""
    if shape.head_size == shape.padded_head_size:
        return LinearWeight([part], dtype)
    width = shape.num_heads * shape.padded_head_size
    return LinearWeight([part], dtype, shape=(part.shape[0], width), widen=lambda block: pad_output(block, shape))
