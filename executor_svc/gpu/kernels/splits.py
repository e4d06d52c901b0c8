"""The sum of the parts of a product whose inner dimension was split among programs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.variant import Variant

_COLUMNS, _WARPS, _STAGES = 512, 4, 2
"""Columns of a program, and how it is launched."""


@triton.jit(do_not_specialize=["rows", "splits"])
def _sum_splits(parts, scale, bias, out, rows, out_features, out_stride, splits, COLUMNS: tl.constexpr):
    """Sum some columns of a row of parts [splits, rows, out_features], beginning with the first split."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < out_features
    at = parts + row * out_features + column
    total = tl.zeros((COLUMNS,), tl.float32)
    for _ in range(splits):
        total += tl.load(at, mask=inside, other=0.0)
        at += rows.to(tl.int64) * out_features
    if scale is not None:
        total *= tl.load(scale + column, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=inside)


def sum_splits(
    parts: Tensor, splits: int, scale: Tensor | None, bias: Tensor | None, out: Tensor, fused: bool = True
) -> None:
    """Write the sum of parts, in their order, * scale + bias into out.

    Args:
        parts: float32, [splits, M, N] and then anything.
        splits: their number.
        scale, bias: [N] float32; without a scale the sum is not multiplied, without a bias nothing is added.
        out: [M, N], columns adjacent, rows of any stride.
        fused: whether product and sum may be rounded once.
    """
    rows, out_features = out.shape
    _sum_splits[(rows, -(-out_features // _COLUMNS))](
        parts,
        scale,
        bias,
        out,
        rows,
        out_features,
        out.stride(0),
        splits,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=fused,
    )


def variants() -> list[Variant]:
    """Return the sum with a scale and without one, for each dtype of the result."""
    outs = ("bf16", "fp16", "fp32")
    found = [_variant(out, scaled) for out in outs for scaled in (True, False)]
    exact = [(scaled, biased) for scaled in (True, False) for biased in (True, False)]
    return found + [_variant(out, scaled, biased=biased, fused=False) for out in outs for scaled, biased in exact]


def _variant(out: str, scaled: bool, *, biased: bool = True, fused: bool = True) -> Variant:
    optional = {"scale": scaled, "bias": biased}
    there = {name: "*fp32" for name, given in optional.items() if given}
    pointers = {"parts": "*fp32", **there, "out": f"*{out}"}
    constants = {"COLUMNS": _COLUMNS} | {name: None for name, given in optional.items() if not given}
    marks = "".join(f"{mark} " for mark, given in (("scaled", scaled), ("biased", biased and not fused)) if given)
    return Variant(
        name=f"sum_splits {marks}to {out}{'' if fused else ' exact'}",
        kernel=_sum_splits,
        signature={
            **pointers,
            **dict.fromkeys(("rows", "out_features", "out_stride", "splits"), "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        divisible=(*pointers, "out_features", "out_stride"),
        num_warps=_WARPS,
        num_stages=_STAGES,
        fp_fusion=fused,
        no_spills=True,
        quick=fused and out == "bf16" and scaled,
    )
