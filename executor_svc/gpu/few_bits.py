"""Linear layers and embeddings of a GPU whose weights are in few bits in its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from executor_svc.device.dense_rows import DequantizedRows
from executor_svc.device.few_bits import FewBits
from executor_svc.device.kernels import WeightRows
from executor_svc.device.stored_linear import QuantRows, StoredLinear
from executor_svc.gpu.kernels.few_bits.packed import PackedWeight, is_supported, pack
from executor_svc.gpu.kernels.few_bits.product import product, workspace_size
from executor_svc.gpu.kernels.gpu_kernels import GpuKernels
from executor_svc.gpu.linear import PlainLinear, Workspace, multiprocessors, new_out, result_dtype

_DTYPES = (torch.bfloat16, torch.float16)
_Into = Callable[[Tensor, Tensor], object]
"""Writes the product of x [M, K] with some rows [n, K] of a weight, plus bias, into columns [M, n] of the result."""


class FewBitsLinear:
    """x @ weight.T + bias, the weight in parts in few bits that are unpacked in the product, or dense."""

    def __init__(self, weight: StoredLinear, bias: Tensor | None, workspace: Workspace, few_bits: FewBits) -> None:
        """Read the parts into the workspace's device; bias [out_features] or None. Raises LoaderError."""
        self.out_features, self.in_features = weight.shape
        self._pieces: list[tuple[slice, _Into]] = []
        first = 0
        for parts in _runs(weight):
            rows = slice(first, first := first + sum(part.shape[0] for part in parts))
            some = None if bias is None else bias[rows]
            self._pieces.append((rows, _piece(parts, weight.dtype, some, workspace, few_bits)))

    def __call__(self, x: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """Map [rows, in_features] to [rows, out_features], into `out` if given; out_dtype: that of x, or float32."""
        dtype = result_dtype(x, out, out_dtype)
        out = new_out(x, self.out_features, dtype) if out is None else out
        for rows, into in self._pieces:
            into(x, out[:, rows])
        return out


class PackedLinear:
    """x @ weight.T + bias with a packed weight, which others may hold too; for results with any distance of rows."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, workspace: Workspace, order: Tensor | None = None):
        """order: [K] int64, as `QuantRows.column_order`; bias [out_features] or None."""
        self.out_features, self.in_features = weight.shape
        self._weight, self._order, self._workspace = weight, order, workspace
        self._ones = torch.ones(self.out_features, dtype=torch.float32, device=workspace.device)
        self._bias = torch.zeros_like(self._ones) if bias is None else bias.float().contiguous()
        self._num_sms = multiprocessors(workspace.device)
        workspace.reserve(workspace_size(weight, self._num_sms))

    def __call__(self, x: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """As in `FewBitsLinear`."""
        dtype = result_dtype(x, out, out_dtype)
        out = new_out(x, self.out_features, dtype) if out is None else out
        ordered = x if self._order is None else x.index_select(1, self._order)
        product(ordered, self._weight, self._ones, self._bias, out, self._workspace.memory, self._num_sms)
        return out


class PackedEmbedding:
    """Implements `device.kernels.Embedding`: a table in few bits."""

    def __init__(self, table: PackedWeight, dtype: torch.dtype, kernels: GpuKernels) -> None:
        """dtype: of the model."""
        self._table, self._dtype, self._kernels = table, dtype, kernels

    def __call__(self, token_ids: Tensor, scale: float) -> Tensor:
        return self._kernels.embed_packed(self._table, self._dtype, token_ids, scale)


def packed_table(weight: object, workspace: Workspace, few_bits: FewBits) -> PackedWeight | None:
    """Return a table of one format in few bits, read into the workspace's device; None if it is held dense."""
    if not isinstance(weight, StoredLinear) or not has_kernels(weight):
        return None
    runs = _runs(weight)
    parts = [part for part in runs[0] if isinstance(part, QuantRows)]
    if len(runs) > 1 or not parts or parts[0].column_order is not None:
        return None
    return _packed(parts, weight.dtype, workspace, few_bits)


def has_kernels(weight: StoredLinear) -> bool:
    """Return whether a part of a weight can stay in few bits."""
    return weight.dtype in _DTYPES and any(_stays(part) for part in weight.parts)


def _stays(part: QuantRows | WeightRows) -> bool:
    return isinstance(part, QuantRows) and is_supported(part.format, part.shape[1])


def _runs(weight: StoredLinear) -> list[list[QuantRows | WeightRows]]:
    """Return the parts, those that follow each other in one format and in the order of x together."""

    def key(numbered: tuple[int, QuantRows | WeightRows]) -> object:
        number, part = numbered
        if isinstance(part, QuantRows) and part.column_order is None and _stays(part):
            return part.format
        return number

    return [[part for _, part in run] for _, run in groupby(enumerate(weight.parts), key)]


def _piece(
    parts: Sequence[QuantRows | WeightRows],
    dtype: torch.dtype,
    bias: Tensor | None,
    workspace: Workspace,
    few_bits: FewBits,
) -> _Into:
    stored = [part for part in parts if isinstance(part, QuantRows) and _stays(part)]
    if stored:
        order = stored[0].column_order
        order = None if order is None else order.to(workspace.device)
        return PackedLinear(_packed(stored, dtype, workspace, few_bits), bias, workspace, order)
    (part,) = parts
    if isinstance(part, QuantRows):
        few_bits.add_dense(part)
        part = DequantizedRows(part, dtype, workspace.device)
    dense = PlainLinear(part.whole(), bias)
    return lambda x, out: out.copy_(dense(x, out_dtype=out.dtype))


def _packed(parts: Sequence[QuantRows], dtype: torch.dtype, workspace: Workspace, few_bits: FewBits) -> PackedWeight:
    packed = pack(parts, workspace.device)
    for part in parts:
        few_bits.add(part, dtype, "weights alone", packed.num_bytes * part.shape[0] // packed.shape[0])
    return packed
