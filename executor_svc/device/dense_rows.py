"""Weights in few bits as dense rows: for linears without a kernel for their format, and for columns to be widened."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from executor_svc.device.dequantize import dequantize
from executor_svc.device.kernels import WeightRows
from executor_svc.device.stored_linear import QuantRows, StoredLinear


class DequantizedRows:
    """Implements `WeightRows`: the numbers of `dequantize`, rounded to the model's dtype, in the order of x."""

    def __init__(
        self,
        rows: QuantRows,
        dtype: torch.dtype,
        device: torch.device,
        *,
        shape: tuple[int, int] | None = None,
        widen: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """device: of `whole`; widen: applied to each block of rows; shape: of the whole after it."""
        self._rows = rows
        self._device = device
        self._widen = widen
        self.dtype = dtype
        self.shape = shape or rows.shape

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[Tensor]:
        """As in `WeightRows`."""
        for block in self._rows.blocks(num_bytes // self.dtype.itemsize, multiple):
            dense = dequantize(block, self._rows.format)
            if self._rows.column_order is not None:
                dense = torch.empty_like(dense).index_copy_(1, self._rows.column_order, dense)
            dense = dense.to(self.dtype)
            yield dense if self._widen is None else self._widen(dense)

    def whole(self) -> Tensor:
        """As in `WeightRows`."""
        return _gathered(self, self._device)


class DenseRows:
    """Implements `WeightRows`: a stored linear with its parts in few bits dequantized."""

    def __init__(self, linear: StoredLinear, device: torch.device) -> None:
        """device: of `whole`."""
        self._parts = [
            DequantizedRows(part, linear.dtype, device) if isinstance(part, QuantRows) else part
            for part in linear.parts
        ]
        self._device = device
        self.dtype = linear.dtype
        self.shape = linear.shape

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[Tensor]:
        """As in `WeightRows`."""
        for part in self._parts:
            yield from part.blocks(num_bytes, multiple)

    def whole(self) -> Tensor:
        """As in `WeightRows`."""
        return _gathered(self, self._device)


_BLOCK_BYTES = 1 << 22
"""Of dense rows that are in memory beside the whole weight."""


def _gathered(rows: WeightRows, device: torch.device) -> Tensor:
    """Return a weight on a device, of blocks on the CPU."""
    whole, first = torch.empty(rows.shape, dtype=rows.dtype, device=device), 0
    for block in rows.blocks(_BLOCK_BYTES, 1):
        whole[first : first + len(block)] = block
        first += len(block)
    return whole
