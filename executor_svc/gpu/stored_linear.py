"""A linear of a GPU whose weight is stored in parts, in few bits or dense, and the same weight as embeddings."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import torch
from torch import Tensor

from executor_svc.device.dense_rows import DequantizedRows
from executor_svc.device.kernels import WeightRows
from executor_svc.device.stored_linear import FewBits, QuantFormat, QuantRows, StoredLinear
from executor_svc.gpu.choices.few_bits import FewBitsChoices, FewBitsProduct, FewBitsWays
from executor_svc.gpu.exact.linear import ExactLinear, FewBitsTiles, multiply_few_bits
from executor_svc.gpu.exact.products import ExactProducts
from executor_svc.gpu.kernels.exact.few_bits import few_bits_sums_size
from executor_svc.gpu.kernels.few_bits.layout import TILE, FewBitsWeight, is_supported
from executor_svc.gpu.kernels.few_bits.linear import workspace_size
from executor_svc.gpu.kernels.few_bits.widening import rows_at_once
from executor_svc.gpu.kernels.gpu_kernels import GpuKernels
from executor_svc.gpu.linear import PlainLinear, SumsWorkspace, multiprocessors, new_out, result_dtype

_BLOCK_BYTES = 1 << 22
"""Of a weight's rows that are read at a time."""
_log = logging.getLogger(__name__)


def has_kernel(part: QuantRows | WeightRows, dtype: torch.dtype) -> bool:
    """Return whether products of a part are computed from its codes, in a model of this dtype."""
    if not isinstance(part, QuantRows) or dtype not in (torch.bfloat16, torch.float16):
        return False
    return is_supported(part.format, part.shape[1])


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of one format: multiplied by one launch, or many rows with what they are widened to."""

    product: FewBitsProduct
    ways: FewBitsWays
    """By which it is multiplied, but in exact mode."""
    order: Tensor | None
    """Stored column j multiplies x[:, order[j]]."""
    exact: FewBitsTiles | None = None
    """How it is multiplied in exact mode."""

    @classmethod
    def of(
        cls, weight: FewBitsWeight, bias: Tensor | None, order: Tensor | None, workspace: SumsWorkspace, num_sms: int,
        exact: FewBitsTiles | None = None, ways: FewBitsWays | None = None,
    ) -> Self:  # fmt: skip
        """Reserve the workspace that any number of rows needs. bias: in the model's dtype. ways: else the usual."""
        workspace.reserve(workspace_size(weight, num_sms) if exact is None else few_bits_sums_size(weight))
        workspace.reserve(-(-rows_at_once(weight) * weight.columns // 2))
        added = torch.zeros(weight.rows, device=workspace.device) if bias is None else bias.float().contiguous()
        ways = FewBitsWays() if ways is None else ways
        return cls(FewBitsProduct(weight, bias, added, workspace, num_sms, ways.counters), ways, order, exact)

    @property
    def weight(self) -> FewBitsWeight:
        return self.product.weight

    @property
    def bias(self) -> Tensor | None:
        """In the model's dtype."""
        return self.product.bias

    @property
    def added(self) -> Tensor:
        """The bias, or zeros, in float32."""
        return self.product.added

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Write x @ weight.T + bias to out, in its dtype."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if self.exact is None:
            self.product.write(self.ways.of(len(x)), x, out)
        else:
            multiply_few_bits(x, self.weight, self.added, out, self.product.workspace.memory, self.exact)


class GpuStoredLinear:
    """x @ weight.T + bias; parts in few bits stay so, others are multiplied by cuBLAS, in exact mode by our kernel."""

    def __init__(
        self,
        name: str,
        weight: StoredLinear,
        bias: Tensor | None,
        workspace: SumsWorkspace,
        few_bits: FewBits,
        exact: ExactProducts | None = None,
        choices: FewBitsChoices | None = None,
    ) -> None:
        """Read the weight; bias: [out_features] in the model's dtype, or None. Parts are noted in few_bits.

        exact: makes what multiplies in exact mode. choices: of ways that the start measures.
        """
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._workspace, self._num_sms = workspace, multiprocessors(workspace.device)
        self._exact, self._choices = exact, choices
        self.parts: list[PackedRows | PlainLinear | ExactLinear] = []
        first = 0
        for key, some in groupby(weight.parts, key=lambda part: _launch_of(part, weight.dtype)):
            sources = list(some)
            rows = sum(source.shape[0] for source in sources)
            own = None if bias is None else bias[first : first + rows]
            first += rows
            if key is None:
                self.parts += self._dense(name, sources, own, few_bits)
            else:
                self.parts.append(self._packed(name, sources, key[0], rows, own, few_bits))

    def _packed(
        self, name: str, sources: Sequence[QuantRows | WeightRows], kind: QuantFormat, rows: int, bias: Tensor | None,
        few_bits: FewBits,
    ) -> PackedRows:  # fmt: skip
        device = self._workspace.device
        weight, first, order = FewBitsWeight(kind, rows, self.in_features, device), 0, None
        for source in sources:
            assert isinstance(source, QuantRows)
            order = source.column_order
            for block in source.blocks(_BLOCK_BYTES, TILE):
                weight.write(first, block)
                first += len(block)
            few_bits.add(source, self.dtype, "weights alone", weight.num_bytes * source.shape[0] // rows)
        order = None if order is None else order.to(device)
        exact = None if self._exact is None else self._exact.few_bits(name, weight, self.dtype)
        ways = None if self._choices is None else self._choices.ways_of(name, weight, self.dtype)
        return PackedRows.of(weight, bias, order, self._workspace, self._num_sms, exact, ways)

    def _dense(
        self, name: str, sources: Sequence[QuantRows | WeightRows], bias: Tensor | None, few_bits: FewBits
    ) -> Iterator[PlainLinear | ExactLinear]:
        first = 0
        for source in sources:
            if isinstance(source, QuantRows):
                _log.warning("%s: no kernel for %s, kept in %s", name, source.format.name, self.dtype)
                few_bits.add_dense(source)
                source = DequantizedRows(source, self.dtype, self._workspace.device)
            own = None if bias is None else bias[first : first + source.shape[0]]
            whole = source.whole()
            yield PlainLinear(whole, own) if self._exact is None else self._exact.linear(name, whole, own)
            first += source.shape[0]

    def __call__(self, x: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """Map [rows, in_features] to [rows, out_features], into `out` if given; out_dtype: that of x, or float32."""
        dtype = result_dtype(x, out, out_dtype)
        out = new_out(x, self.out_features, dtype) if out is None else out
        first = 0
        for part in self.parts:
            last = first + (part.weight.rows if isinstance(part, PackedRows) else part.out_features)
            own = out[:, first:last]
            if isinstance(part, PackedRows):
                part.multiply(x, own)
            else:
                part(x, own, dtype)
            first = last
        return out


def _launch_of(part: QuantRows | WeightRows, dtype: torch.dtype) -> tuple[QuantFormat, int] | None:
    """Return what parts of one launch have in common: the format, and their order of columns; None: dense."""
    if not isinstance(part, QuantRows) or not has_kernel(part, dtype):
        return None
    return part.format, 0 if part.column_order is None else id(part)


class FewBitsEmbedding:
    """Implements `device.kernels.Embedding`: the rows of a stored linear's weight."""

    @staticmethod
    def is_possible(weight: StoredLinear) -> bool:
        """Return whether a weight is one part with a kernel, its columns in order."""
        (*others, part) = weight.parts
        return not others and has_kernel(part, weight.dtype) and getattr(part, "column_order", None) is None

    def __init__(self, linear: GpuStoredLinear, kernels: GpuKernels) -> None:
        """linear: of one part in few bits, without another order of columns."""
        (part,) = linear.parts
        assert isinstance(part, PackedRows)
        self._table, self._dtype, self._kernels = part.weight, linear.dtype, kernels

    def __call__(self, token_ids: Tensor, scale: float) -> Tensor:
        return self._kernels.embed_few_bits(self._table, token_ids, scale, self._dtype)
