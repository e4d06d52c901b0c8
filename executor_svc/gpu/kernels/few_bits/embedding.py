"""Gathers rows of a table of embeddings in few bits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.stored_linear import QuantFormat
from executor_svc.gpu.kernels.few_bits.dequantize import constants, dequantized
from executor_svc.gpu.kernels.few_bits.formats import COMMON, plane_types
from executor_svc.gpu.kernels.few_bits.packed import PackedWeight
from executor_svc.gpu.kernels.rows import DTYPES, check
from executor_svc.gpu.kernels.variant import Variant

_TOKENS, _INNER = 4, 256
"""Of a tile."""
_WARPS = 4


@triton.jit(do_not_specialize=["tokens"])
def _take_rows(
    ids,
    codes,
    high,
    scales,
    super_scales,
    minimums,
    super_minimums,
    zero_points,
    out,
    tokens,
    columns,
    group,
    super_group,
    scale,
    SCALED: tl.constexpr,
    TOKENS: tl.constexpr,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    ZERO: tl.constexpr,
    EXPONENTS: tl.constexpr,
    GRANULE: tl.constexpr,
    INNER: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    start = tl.program_id(1) * INNER
    row = tl.load(ids + token, mask=token < tokens, other=-1)
    number = dequantized(
        codes,
        high,
        scales,
        super_scales,
        minimums,
        super_minimums,
        zero_points,
        columns,
        group,
        super_group,
        tl.maximum(row, 0),
        start,
        BITS,
        VALUES,
        ZERO,
        EXPONENTS,
        GRANULE,
        INNER,
    )
    number = tl.where((row >= 0)[:, None], number, 0.0).to(out.dtype.element_ty)
    if SCALED:
        number = (number.to(tl.float32) * scale).to(out.dtype.element_ty)
    at = start + tl.arange(0, INNER)
    inside = (token < tokens)[:, None] & (at < columns)[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * columns + at[None, :], number, mask=inside)


def embed(table: PackedWeight, token_ids: Tensor, scale: float, out: Tensor) -> None:
    """Write table[token_ids] * scale to out [T, hidden], rounded to its dtype; as `rows.embed` of a dense table."""
    check("out", out, (token_ids.shape[0], table.shape[1]), *DTYPES)
    check("token_ids", token_ids, (token_ids.shape[0],), torch.int64)
    if not len(out):
        return
    _take_rows[(-(-len(out) // _TOKENS), -(-table.shape[1] // _INNER))](
        ids=token_ids,
        out=out,
        tokens=len(out),
        scale=float(scale),
        **table.arguments(),
        **_constants(table.kind, table.shape[1], scale != 1.0),
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )


def _constants(kind: QuantFormat, columns: int, scaled: bool) -> dict[str, Any]:
    return {"SCALED": scaled, "TOKENS": _TOKENS, **constants(kind, columns, _INNER)}


def variants() -> list[Variant]:
    """Return the kernel for each common format, to bf16, and for one to other dtypes and with a scale."""
    first = next(iter(COMMON))
    others = [_variant(first, COMMON[first], *each) for each in (("fp16", False), ("fp32", False), ("bf16", True))]
    return [*(_variant(name, kind, "bf16", False) for name, kind in COMMON.items()), *others]


def _variant(name: str, kind: QuantFormat, out: str, scaled: bool) -> Variant:
    planes = plane_types(kind)
    pointers = {"ids": "*i64", **planes, "out": f"*{out}"}
    settings: dict[str, Any] = {plane: None for plane, kind_of in planes.items() if kind_of == "constexpr"}
    settings |= _constants(kind, 4096, scaled)
    sizes = {**dict.fromkeys(("tokens", "columns", "group", "super_group"), "i32"), "scale": "fp32"}
    return Variant(
        name=f"embedding in few bits {name} to {out}{' scaled' if scaled else ''}",
        kernel=_take_rows,
        signature={**pointers, **sizes, **dict.fromkeys(settings, "constexpr")},
        constants=settings,
        divisible=(
            *(each for each, kind_of in pointers.items() if kind_of != "constexpr"),
            *("columns", "group", "super_group"),
        ),
        num_warps=_WARPS,
        fp_fusion=False,
        no_spills=True,
        quick=name == "Q4_0" and out == "bf16" and not scaled,
    )
