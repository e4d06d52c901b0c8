"""A linear layer on the CPU: the weight packed for oneDNN once, rows run in tiles of proven size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MAX_ROW_TILE = 4096
"""Rows of a linear keep their bits from 2 to this many rows (measured; probed at start up to the step's size)."""

_MAX_TILE_ELEMENTS = 1 << 25


def packing_available(dtype: torch.dtype) -> bool:
    """Return whether oneDNN can run linears of this dtype on packed weights here."""
    if not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class CpuLinear:
    """x @ weight.T + bias, on a weight packed for oneDNN where that is available, else with PyTorch's own linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None, packed: bool) -> None:
        """Take weight [out_features, in_features] and bias [out_features] or None, both in the model's dtype."""
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.packed = packed
        self.bias = bias
        # A vocabulary-wide result of many rows is large: it is made, and probed, in smaller tiles.
        self.row_tile = max(64, min(MAX_ROW_TILE, _MAX_TILE_ELEMENTS // self.out_features))
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if packed else weight

    def _tile(self, x: Tensor) -> Tensor:
        if self.packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return out
        return functional.linear(x, self._weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [rows, in_features], contiguous, at least two rows, to [rows, out_features]."""
        rows = x.shape[0]
        if rows <= self.row_tile:
            return self._tile(x)
        num_tiles = -(-rows // self.row_tile)
        return torch.cat([self._tile(part) for part in x.tensor_split(num_tiles)])
