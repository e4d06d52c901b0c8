"""What a linear must give, whatever its weights are stored in: some of its columns, at both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from executor_svc.device import reference
from executor_svc.gpu.exact.linear import ExactLinear
from executor_svc.gpu.kernels.few_bits.layout import TILE
from executor_svc.gpu.kernels.few_bits.widening import widen
from executor_svc.gpu.linear import Fp8Linear, PlainLinear, W8Linear
from executor_svc.gpu.stored_linear import GpuStoredLinear, PackedRows

_COLUMNS = 4 * TILE
"""Results of a row that are compared at the beginning of a weight, and as many at its end."""
Dense = PlainLinear | W8Linear | Fp8Linear | ExactLinear


def product_of(values: Mapping[str, Any], n: int, to: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the compared results of the first n rows; a weight in few bits is what it is widened to."""
    x = values["x"][:n]
    found = []
    for _, first, last, part in _compared(values["linear"]):
        weight, bias, order = _rows_of(part, first, last, x.dtype)
        rows = x if order is None else x.index_select(1, order)
        found.append(reference.linear(to(rows), to(weight), None if bias is None else to(bias)))
    return found


def results_of_product(values: Mapping[str, Any], result: Any, n: int) -> list[Tensor]:
    """Return the same results of the linear itself."""
    return [result[:n, at : at + last - first] for at, first, last, _ in _compared(values["linear"])]


def repeated(x: Tensor, rows: int) -> Tensor:
    """Return so many rows: those of x [n, columns], over and over."""
    return x.repeat(-(-rows // len(x)), 1)[:rows]


def narrow_rows(linear: object) -> bool:
    """Return whether rows are rounded to fp8 before the product."""
    return isinstance(linear, Fp8Linear) or (isinstance(linear, ExactLinear) and linear.narrow_rows)


def dense_rows(linear: object, dtype: torch.dtype) -> Tensor:
    """Return the whole weight of a linear with 8-bit weights as a matrix in dtype."""
    assert isinstance(linear, Dense)
    return _dense(linear, 0, linear.out_features).to(dtype)


def _compared(linear: object) -> Iterator[tuple[int, int, int, PackedRows | Dense]]:
    """Yield the compared columns of the results: where they are, which rows of which part of the weight they are of."""
    begin = 0
    assert isinstance(linear, Dense | GpuStoredLinear), f"no weight is known of {linear}"
    for part in linear.parts if isinstance(linear, GpuStoredLinear) else [linear]:
        rows = part.weight.rows if isinstance(part, PackedRows) else part.out_features
        end = max(0, rows - _COLUMNS) // TILE * TILE
        for first, last in ((0, min(_COLUMNS, rows)), (max(end, _COLUMNS), rows)):
            if first < last:
                yield begin + first, first, last, part
        begin += rows


def _rows_of(
    part: PackedRows | Dense, first: int, last: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return rows of a weight, of its bias, and the order of columns that they multiply."""
    if isinstance(part, PackedRows):
        wide = torch.empty(last - first, part.weight.columns, dtype=dtype, device=part.added.device)
        widen(part.weight, first, wide)
        return wide, part.added[first:last], part.order
    bias = part.bias
    return _dense(part, first, last), None if bias is None else bias[first:last], None


def _dense(part: Dense, first: int, last: int) -> Tensor:
    rows = part.weight[first:last, : part.in_features]
    scale = None if isinstance(part, PlainLinear) else part.scale
    return rows if scale is None else rows.float() * scale.view(-1)[first:last, None]
