"""Gathers rows of a table in few bits: token embeddings."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.stored_linear import QuantFormat
from executor_svc.gpu.kernels.few_bits.layout import FewBitsLayout, FewBitsWeight, plane_arguments
from executor_svc.gpu.kernels.few_bits.numbers import floats_of
from executor_svc.gpu.kernels.few_bits.unpacking import values_of
from executor_svc.gpu.kernels.rows import DTYPES, check
from executor_svc.gpu.kernels.variant import Variant

_CHUNK = 512
_WARPS, _STAGES = 4, 1


@triton.jit
def _code(
    codes, high, tile, lane, step, steps, second, place,
    BITS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return codes int32 of a row; second: 1 in the second half of a step, place: of the column in its half."""
    row = (tile * steps + step) * TILE + lane
    if BITS == 8:
        code = tl.load(codes + (((tile * steps + step) * 2 + second) * TILE + lane) * HALF + place).to(tl.int32)
    else:
        code = tl.load(codes + row * HALF + place).to(tl.int32) >> (4 * second) & 0xF
    if BITS == 5 or BITS == 6:
        count: tl.constexpr = 2 * HALF * (BITS - 4) // 8
        bits = tl.load(high + row * count + place % count).to(tl.int32)
        shift = (second * HALF + place) // count * (BITS - 4)
        code = code | (bits >> shift & ((1 << (BITS - 4)) - 1)) << 4
    return code


@triton.jit
def _embed_few_bits(
    codes, high, numbers, zeros, above, ids, out, factor, columns, steps, span, super_span,
    BITS: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, PAIRED: tl.constexpr,
    SUPERS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    source = tl.load(ids + tl.program_id(0))
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    known = tl.maximum(source, 0)
    tile, lane = known // TILE, known % TILE
    inner = tl.minimum(column, columns - 1)
    step, second, place = inner // (2 * HALF), inner // HALF % 2, inner % HALF
    code = _code(codes, high, tile, lane, step, steps, second, place, BITS, HALF, TILE)

    row = (tile * tl.cdiv(steps, span) + step // span) * TILE + lane
    tables: tl.constexpr = 2 if PAIRED else 1
    group = 0
    if GROUPS > 1:
        group = place // (2 * HALF // GROUPS) * 2 + second
    at = row * GROUPS + group
    scale = floats_of(tl.load(numbers + at * tables))
    offset = ZERO * 1.0
    if PAIRED:
        offset = floats_of(tl.load(numbers + at * 2 + 1))
    elif OFFSETS == "zero_point":
        offset = tl.load(zeros + at).to(tl.float32)
    if SUPERS:
        over = (tile * tl.cdiv(steps, super_span) + step // super_span) * TILE + lane
        scale *= floats_of(tl.load(above + over * tables))
        if PAIRED:
            offset *= floats_of(tl.load(above + over * 2 + 1))
    if OFFSETS == "minimum":
        value = values_of(code, 0.0, VALUES) * scale + offset
    else:
        value = values_of(code, offset, VALUES) * scale
    rounded = tl.where(source >= 0, value, 0.0).to(out.dtype.element_ty)
    found = (rounded.to(tl.float32) * factor).to(out.dtype.element_ty)
    tl.store(out + tl.program_id(0).to(tl.int64) * columns + column, found, mask=column < columns)


def embed_few_bits(table: FewBitsWeight, token_ids: Tensor, factor: float, out: Tensor) -> None:
    """Write the tokens' rows times factor to out [T, columns], rounded to its dtype before and after the product.

    token_ids: [T] int64; the row of id -1 is zeros, other ids are not checked. Raises ValueError naming the argument.
    """
    check("out", out, (token_ids.shape[0], table.columns), *DTYPES)
    check("token_ids", token_ids, (token_ids.shape[0],), torch.int64)
    if not token_ids.shape[0]:
        return
    layout = table.layout
    _embed_few_bits[(token_ids.shape[0], -(-table.columns // _CHUNK))](
        *table.planes,
        token_ids,
        out,
        float(factor),
        table.columns,
        layout.steps,
        layout.span,
        layout.super_span,
        **_constants(layout),
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=False,
    )


def _constants(layout: FewBitsLayout) -> dict[str, Any]:
    return layout.constants() | {"CHUNK": _CHUNK}


_COLUMNS = 4096
_KINDS = (
    QuantFormat("Q4_K", 4, 32, super_group=256, offsets="minimum"),
    QuantFormat("Q6_K", 6, 16, zero=32, super_group=256),
    QuantFormat("Q8_0", 8, 32, zero=128),
    QuantFormat("Q4_0", 4, 32, zero=8),
)


def variants() -> list[Variant]:
    """Return the formats that tables often have."""
    return [_variant(kind, dtype) for kind in _KINDS for dtype in ("bf16", "fp16")]


def _variant(kind: QuantFormat, dtype: str) -> Variant:
    layout = FewBitsLayout(kind, _COLUMNS)
    arguments, known = plane_arguments(layout)
    constants = _constants(layout) | known
    pointers = {**arguments, "ids": "*i64", "out": f"*{dtype}"}
    numbers = {name: "i32" for name in ("columns", "steps", "span", "super_span") if name not in constants}
    return Variant(
        name=f"embed_few_bits {dtype} {kind.name}",
        kernel=_embed_few_bits,
        signature={**pointers, "factor": "fp32", **numbers, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=(*pointers, "columns"),
        num_warps=_WARPS,
        num_stages=_STAGES,
        fp_fusion=False,
        no_spills=True,
        quick=(kind.name, dtype) == ("Q6_K", "bf16"),
    )
