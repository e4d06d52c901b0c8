"""The linears of all experts in one place of a layer, on a GPU: one launch for each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from executor_svc.gpu.choices.few_bits import FewBitsWays, write_of_experts
from executor_svc.gpu.exact.linear import ExactLinear
from executor_svc.gpu.kernels.exact.few_bits import exact_few_bits_of_experts
from executor_svc.gpu.kernels.exact.product import exact_product_of_experts
from executor_svc.gpu.kernels.experts.blocks import RowBlocks
from executor_svc.gpu.kernels.experts.order import order_columns
from executor_svc.gpu.kernels.experts.product import linear_of_experts
from executor_svc.gpu.kernels.few_bits.layout import FewBitsWeight
from executor_svc.gpu.kernels.quantize import quantize_rows
from executor_svc.gpu.linear import Fp8Linear, GpuLinear, PlainLinear
from executor_svc.gpu.stored_linear import GpuStoredLinear, PackedRows

_Dense = GpuLinear | ExactLinear
_Part = PackedRows | _Dense


@runtime_checkable
class StackableLinear(Protocol):
    """A linear as the GPU device prepares it."""

    linear: _Dense | GpuStoredLinear


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """Weights of 8, 16 or 32 bits of all experts."""

    weight: Tensor
    """[E, out_features, columns]"""
    scale: Tensor | None
    bias: Tensor | None
    """[E, out_features] float32."""
    narrow_rows: bool
    """Whether rows are in fp8, too."""
    exact: bool
    """Whether a row's bits must not depend on the number of rows."""

    @classmethod
    def of(cls, linears: Sequence[_Dense]) -> Self:
        """Take the weights, which are copied."""
        scales = [
            each.scale.flatten() for each in linears if not isinstance(each, PlainLinear) and each.scale is not None
        ]
        biases = [each.bias.float() for each in linears if each.bias is not None]
        exact = isinstance(linears[0], ExactLinear)
        return cls(
            torch.stack([each.weight for each in linears]),
            torch.stack(scales) if scales else None,
            torch.stack(biases) if biases else None,
            linears[0].narrow_rows if isinstance(linears[0], ExactLinear) else isinstance(linears[0], Fp8Linear),
            exact,
        )

    @property
    def rows(self) -> int:
        """Of the weight of an expert."""
        return self.weight.shape[1]

    def multiply(self, x: Tensor, out: Tensor, blocks: RowBlocks, narrow: Tensor, scales: Tensor, _: Tensor) -> None:
        """As of `StackedExperts`."""
        multiply = exact_product_of_experts if self.exact else linear_of_experts
        if self.narrow_rows:
            quantize_rows(x, narrow, scales)
            multiply(narrow, self.weight, self.scale, self.bias, out, blocks, scales)
        else:
            multiply(x, self.weight, self.scale, self.bias, out, blocks)


@dataclass(frozen=True, slots=True)
class FewBitsExperts:
    """Weights in few bits of all experts."""

    weight: FewBitsWeight
    added: Tensor
    """[E, out_features] float32."""
    exact: bool
    """Whether a row's bits must not depend on the number of rows."""
    ways: FewBitsWays
    """By which blocks of rows are multiplied, but in exact mode."""
    orders: Tensor | None = None
    """[E, in_features] int64: stored column j multiplies x[:, orders[expert, j]]; None: all are in order."""

    @classmethod
    def of(cls, parts: Sequence[PackedRows]) -> Self:
        """Take the weights, which are copied."""
        weight = FewBitsWeight.together([part.weight for part in parts])
        added = torch.stack([part.added for part in parts])
        exact, of_experts = parts[0].exact is not None, parts[0].ways.of_experts
        ways = FewBitsWays() if of_experts is None else of_experts(weight)
        if all(part.order is None for part in parts):
            return cls(weight, added, exact, ways)
        in_order = torch.arange(weight.columns, device=added.device)
        orders = torch.stack([in_order if part.order is None else part.order for part in parts])
        return cls(weight, added, exact, ways, orders)

    @property
    def rows(self) -> int:
        """Of the weight of an expert."""
        return self.weight.rows

    def multiply(self, x: Tensor, out: Tensor, blocks: RowBlocks, _: Tensor, __: Tensor, ordered: Tensor) -> None:
        """As of `StackedExperts`."""
        if self.orders is not None:
            order_columns(x, self.orders, ordered, blocks)
            x = ordered
        if self.exact:
            exact_few_bits_of_experts(x, self.weight, self.added, out, blocks)
        else:
            write_of_experts(self.ways.of(blocks.rows), x, self.weight, self.added, out, blocks)


class StackedExperts:
    """The weights of experts of one shape and format, part by part, and their products with routed rows."""

    def __init__(self, linears: Sequence[StackableLinear]) -> None:
        """Raises ValueError for linears that are not alike."""
        parts = [_parts(each.linear) for each in linears]
        if any([_kind(part) for part in each] != [_kind(part) for part in parts[0]] for each in parts):
            raise ValueError("the experts of a layer differ in shape or format")
        self.in_features, self.out_features = linears[0].linear.in_features, linears[0].linear.out_features
        self.parts = [_stacked([each[place] for each in parts]) for place in range(len(parts[0]))]
        self.has_orders = any(isinstance(part, FewBitsExperts) and part.orders is not None for part in self.parts)
        self.narrow_rows = any(isinstance(part, DenseExperts) and part.narrow_rows for part in self.parts)

    def multiply(
        self, x: Tensor, out: Tensor, blocks: RowBlocks, narrow: Tensor, scales: Tensor, ordered: Tensor
    ) -> None:
        """Write the products of routed rows x [R, in_features] to out [R, out_features].

        narrow, scales: if `narrow_rows`, memory for x in fp8 and its scales. ordered: if `has_orders`, memory for x.
        """
        first = 0
        for part in self.parts:
            part.multiply(x, out[:, first : first + part.rows], blocks, narrow, scales, ordered)
            first += part.rows


def _parts(linear: _Dense | GpuStoredLinear) -> Sequence[_Part]:
    return linear.parts if isinstance(linear, GpuStoredLinear) else [linear]


def _kind(part: _Part) -> tuple[object, ...]:
    if isinstance(part, PackedRows):
        return part.weight.layout, part.weight.rows
    return type(part), part.weight.shape, part.weight.dtype, part.bias is None


def _stacked(parts: Sequence[_Part]) -> DenseExperts | FewBitsExperts:
    packed = [part for part in parts if isinstance(part, PackedRows)]
    if packed:
        return FewBitsExperts.of(packed)
    return DenseExperts.of([part for part in parts if not isinstance(part, PackedRows)])
