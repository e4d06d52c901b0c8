"""Rows of a weight in few bits as 16-bit numbers, for products of many rows by cuBLAS."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.interface import is_interpreted
from executor_svc.device.stored_linear import QuantFormat
from executor_svc.gpu.kernels.few_bits.layout import TILE, FewBitsLayout, FewBitsWeight, plane_arguments
from executor_svc.gpu.kernels.few_bits.numbers import weight_of_step
from executor_svc.gpu.kernels.variant import Variant

_WARPS, _STAGES = 4, 1
_WIDE_BYTES = 1 << 27
"""Of a weight in 16 bits that many rows are multiplied with at a time."""


@triton.jit
def _widen(
    codes, high, numbers, zeros, above, out, first_tile, end, columns, steps, span, super_span,
    BITS: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, PAIRED: tl.constexpr,
    SUPERS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write a step of a tile."""
    tile, step = (first_tile + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, TILE)
    first, second = weight_of_step(
        codes, high, numbers, zeros, above, tile, lane, step, steps, span, super_span,
        BITS, VALUES, ZERO, OFFSETS, PAIRED, SUPERS, GROUPS, HALF, TILE, PACKED,
    )  # fmt: skip
    column = (step * (2 * HALF) + tl.arange(0, HALF))[None, :]
    row = (tl.program_id(0) * TILE + lane)[:, None]
    at, inside = out + row.to(tl.int64) * columns + column, tile * TILE + lane[:, None] < end
    tl.store(at, first.to(out.dtype.element_ty), mask=inside & (column < columns))
    tl.store(at + HALF, second.to(out.dtype.element_ty), mask=inside & (column + HALF < columns))


def rows_at_once(weight: FewBitsWeight) -> int:
    """Return how many rows of a weight are widened at a time: a multiple of tiles, or all."""
    rows = max(TILE, _WIDE_BYTES // (2 * weight.columns) // TILE * TILE)
    return min(rows, weight.rows)


def widen(weight: FewBitsWeight, first: int, out: Tensor) -> None:
    """Write the numbers of consecutive rows from `first`, a multiple of 64, to out [R, columns], rounded to its dtype.

    Raises ValueError naming the argument.
    """
    if first % TILE or not 0 <= first <= weight.rows - len(out):
        raise ValueError(f"first: {first} is no multiple of {TILE} from which {weight.rows} rows have {len(out)}")
    if out.dim() != 2 or out.shape[1] != weight.columns or not out.is_contiguous():
        raise ValueError(f"out: must be [R, {weight.columns}], contiguous, is {list(out.shape)}")
    layout = weight.layout
    _widen[(-(-len(out) // TILE), layout.steps)](
        *weight.planes,
        out,
        first // TILE,
        first + len(out),
        weight.columns,
        layout.steps,
        layout.span,
        layout.super_span,
        **_constants(layout),
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=False,
    )


def _constants(layout: FewBitsLayout) -> dict[str, Any]:
    return layout.constants() | {"PACKED": not is_interpreted()}


_COLUMNS = 4096
_KINDS = (
    QuantFormat("Q4_K", 4, 32, super_group=256, offsets="minimum"),
    QuantFormat("Q6_K", 6, 16, zero=32, super_group=256),
    QuantFormat("Q8_0", 8, 32, zero=128),
    QuantFormat("gptq", 4, 128, offsets="zero_point"),
    QuantFormat("fp8", 8, 128, values="e4m3", scale="float32"),
)


def variants() -> list[Variant]:
    """Return common formats."""
    return [_variant(kind, dtype) for kind in _KINDS for dtype in ("bf16", "fp16")]


def _variant(kind: QuantFormat, dtype: str) -> Variant:
    layout = FewBitsLayout(kind, _COLUMNS)
    planes, known = plane_arguments(layout)
    constants = _constants(layout) | known
    numbers = ("first_tile", "end", "columns", "steps", "span", "super_span")
    return Variant(
        name=f"widen_few_bits {dtype} {kind.name}",
        kernel=_widen,
        signature={
            **planes,
            "out": f"*{dtype}",
            **{name: "i32" for name in numbers if name not in constants},
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        divisible=(*planes, "out", "columns"),
        num_warps=_WARPS,
        num_stages=_STAGES,
        fp_fusion=False,
        no_spills=True,
        quick=(kind.name, dtype) == ("Q4_K", "bf16"),
    )
