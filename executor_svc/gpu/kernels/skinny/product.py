"""Products of 1 to 16 rows and a weight in 16 bits, with what stands beside them in a layer, in one launch.

With so few rows the time is that of reading the weight, which each program reads once, 16 bytes at a time. Where tiles
are too few to fill the GPU, a tile's columns are in parts; the last of its programs to end adds them in their order,
as in decision 0053. Before the product a row is normalized, by sums of squares that the kernel before has left; behind
it a gate is applied, or the residual added. All rounds where transformers rounds.

A tile always has 16 rows, and tiles and parts depend on the weight and the GPU alone: so a row's bits do not depend on
the rows beside it, up to 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import triton
from torch import Tensor

from executor_svc.device.kernels import GatedActivation
from executor_svc.gpu.kernels.dependent import LEAST_ARCH, dependent_options
from executor_svc.gpu.kernels.rows import DTYPES, check
from executor_svc.gpu.kernels.skinny.product_kernel import skinny_kernel, square_rows_kernel
from executor_svc.gpu.kernels.skinny.tiles import (
    GATED_NARROW,
    GATED_WIDE,
    NARROW,
    ROWS,
    WIDE,
    SkinnyPlan,
    SkinnyScratch,
    SkinnyTile,
)
from executor_svc.gpu.kernels.variant import ALL_ARCHS, Variant

Ending = Literal["plain", "residual", "silu", "gelu_tanh"]
"""What becomes of a product: itself, a sum with the residual, or a gated activation."""
_ENDINGS: tuple[Ending, ...] = get_args(Ending)
MOST_SQUARES = 512
"""Tiles of a residual: their sums of squares are read at once."""


@dataclass(frozen=True, slots=True)
class RowNorm:
    """The RMS norm that rows of x are given first."""

    weight: Tensor
    """[in_features], in the dtype of x or float32, with the meaning of `norm.rms_norm`."""
    eps: float
    squares: Tensor
    """[tiles, 16] float32: the sum of the squares of each row, by tiles of columns."""


def square_rows(x: Tensor, squares: Tensor, plan: SkinnyPlan, dependents: bool = False) -> None:
    """Write the sums of squares of x [T, columns], T up to 16, by the tiles of a product whose result has its columns.

    squares: [tiles, 16] float32. dependents: whether the kernel behind it may be a dependent one.
    """
    _check_rows(x)
    check("squares", squares, (plan.num_tiles, ROWS), torch.float32)
    if len(x):
        constants = _square_constants(plan.tile, dependents)
        square_rows_kernel[(plan.num_tiles,)](x, squares, len(x), x.shape[1], **constants, **_SQUARE_OPTIONS)


def skinny_product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scratch: SkinnyScratch,
    plan: SkinnyPlan,
    norm: RowNorm | None = None,
    bias: Tensor | None = None,
    activation: GatedActivation | None = None,
    squares: Tensor | None = None,
    scale: float = 1.0,
    dependent: bool = False,
) -> None:
    """Write a product of x to out: of its norm, if there is one, and with what follows a product in a layer.

    Args:
        x: [T, in_features] in 16 bits, T from 0 to 16; in_features is a multiple of 16.
        weight: [out_features, in_features]; with an activation [2 * out_features, in_features], gates first.
        out: [T, out_features]: the product, rounded once; with an activation activation(gate) * up; with squares the
            residual, to which the product times scale is added.
        scratch: of any products of the stream.
        plan: of the weight.
        bias: [rows of the weight] in the dtype of x.
        squares: [tiles, 16] float32, for the sums of squares of the new residual.
        dependent: begin before the kernel before has ended, and let the next do so: see `kernels.dependent`. No kernel
            that may still run may write to weight.

    All are in the dtype of x and contiguous, but for what norm has. Raises ValueError naming the argument.
    """
    ending: Ending = activation or ("plain" if squares is None else "residual")
    _check(x, weight, out, scratch, plan, norm, bias, squares, ending)
    if not len(x):
        return
    skinny_kernel[(plan.num_tiles, plan.parts)](
        x,
        weight,
        None if norm is None else norm.weight,
        None if norm is None else norm.squares,
        bias,
        out,
        squares,
        scratch.sums,
        scratch.counters,
        len(x),
        out.shape[1],
        x.shape[1],
        plan.part,
        0 if norm is None else len(norm.squares),
        0.0 if norm is None else float(norm.eps),
        float(scale),
        **_constants(plan.tile, plan.parts, ending, scale != 1.0, 0 if norm is None else len(norm.squares), dependent),
        **dependent_options(dependent),
        num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages,
        enable_fp_fusion=True,
    )


def _constants(
    tile: SkinnyTile, parts: int, ending: Ending, scaled: bool, num_squares: int, dependent: bool
) -> dict[str, Any]:
    return {
        "SCALED": scaled,
        "ENDING": _ENDINGS.index(ending),
        "PARTS": parts,
        "SQUARES": triton.next_power_of_2(max(1, num_squares)),
        "ROWS": ROWS,
        "FEATURES": tile.features,
        "INNER": tile.inner,
        "AHEAD": tile.num_stages - 1 if dependent else 0,
    }


def _square_constants(tile: SkinnyTile, dependents: bool) -> dict[str, Any]:
    return {"ROWS": ROWS, "FEATURES": tile.features, "DEPENDENTS": dependents}


_SQUARE_OPTIONS: dict[str, Any] = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": True}


def _check_rows(x: Tensor) -> None:
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16) or len(x) > ROWS:
        raise ValueError(f"x: must be [0 to {ROWS}, columns] bfloat16 or float16, is {list(x.shape)} {x.dtype}")
    check("x", x, tuple(x.shape), x.dtype)


def _check(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scratch: SkinnyScratch,
    plan: SkinnyPlan,
    norm: RowNorm | None,
    bias: Tensor | None,
    squares: Tensor | None,
    ending: Ending,
) -> None:
    _check_rows(x)
    (rows, in_features), gated = x.shape, _ENDINGS.index(ending) >= 2
    if in_features % 16:
        raise ValueError(f"x: in_features must be a multiple of 16, is {in_features}")
    if out.dim() != 2:
        raise ValueError("out: must be [T, out_features]")
    check("out", out, (rows, out.shape[1]), x.dtype)
    stored = (1 + gated) * out.shape[1]
    check("weight", weight, (stored, in_features), x.dtype)
    if plan.num_tiles * plan.tile.features < out.shape[1] or plan.parts * plan.part < in_features:
        raise ValueError(f"plan: is of another weight than {list(weight.shape)}")
    if norm is not None:
        check("norm.weight", norm.weight, (in_features,), x.dtype, torch.float32)
        check("norm.squares", norm.squares, (len(norm.squares), ROWS), torch.float32)
        if len(norm.squares) > MOST_SQUARES:
            raise ValueError(f"norm.squares: must have at most {MOST_SQUARES} tiles")
    if bias is not None:
        check("bias", bias, (stored,), x.dtype)
    if squares is not None:
        if gated:
            raise ValueError("squares: are of a residual, and a gated product is not added to one")
        check("squares", squares, (plan.num_tiles, ROWS), torch.float32)
    if scratch.sums.numel() < plan.sums_size(gated) or scratch.counters.numel() < plan.num_tiles:
        raise ValueError("scratch: is too small")
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name}: must be at a multiple of 16 bytes")


def variants() -> list[Variant]:
    """Return what a layer of the common families launches, with and without parts, and sums of squares."""
    found = []
    for dtype in (name for name in DTYPES.values() if name != "fp32"):
        for tile in (NARROW, WIDE):
            for parts in (1, 2, 8):
                found.append(_variant(tile, parts, "plain", dtype, normed=True, quick=parts == 2 and tile is NARROW))
                found.append(_variant(tile, parts, "residual", dtype, normed=False))
        found.append(_variant(NARROW, 2, "plain", dtype, normed=True, biased=True))
        found.append(_variant(NARROW, 2, "plain", dtype, normed=True, wide_norm=True))
        found.append(_variant(NARROW, 2, "residual", dtype, normed=False, scaled=True))
        for tile in (GATED_NARROW, GATED_WIDE):
            for parts in (1, 2, 8):
                found.append(_variant(tile, parts, "silu", dtype, normed=True))
            found.append(_variant(tile, 1, "gelu_tanh", dtype, normed=True))
            found.append(_variant(tile, 2, "silu", dtype, normed=True, dependent=True, quick=tile is GATED_NARROW))
        for tile in (NARROW, WIDE):
            for parts in (1, 2):
                found.append(_variant(tile, parts, "plain", dtype, normed=True, dependent=True))
                found.append(_variant(tile, parts, "residual", dtype, normed=False, dependent=True))
        found += [_square_variant(tile, dtype, each) for tile in (NARROW, WIDE) for each in (False, True)]
    return found


def _variant(
    tile: SkinnyTile,
    parts: int,
    ending: Ending,
    dtype: str,
    *,
    normed: bool,
    biased: bool = False,
    wide_norm: bool = False,
    scaled: bool = False,
    dependent: bool = False,
    quick: bool = False,
) -> Variant:
    there = {"norm": normed, "squares": normed, "bias": biased, "squares_out": ending == "residual"}
    pointers = {"x": f"*{dtype}", "weight": f"*{dtype}", "norm": "*fp32" if wide_norm else f"*{dtype}"}
    pointers |= {"squares": "*fp32", "bias": f"*{dtype}", "out": f"*{dtype}", "squares_out": "*fp32"}
    pointers |= {"sums": "*fp32", "counters": "*i32"}
    pointers = {name: kind for name, kind in pointers.items() if there.get(name, True)}
    sizes = ("rows", "out_features", "in_features", "part", "num_squares")
    constants = _constants(tile, parts, ending, scaled, 128 if normed else 0, dependent)
    constants |= {name: None for name, given in there.items() if not given}
    marks = {"biased": biased, "wide norm": wide_norm, "scaled": scaled, "dependent": dependent}
    named = "".join(f" {mark}" for mark, given in marks.items() if given)
    return Variant(
        name=f"skinny {ending} {dtype} features{tile.features} parts{parts}{named}",
        kernel=skinny_kernel,
        signature={
            **pointers,
            **dict.fromkeys(sizes, "i32"),
            **dict.fromkeys(("eps", "scale"), "fp32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        divisible=(*pointers, "out_features", "in_features", "part"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        no_spills=True,
        narrow_loads=6 if wide_norm else 2,
        archs=_archs(dependent),
        dependent=dependent,
        quick=quick and dtype == "bf16",
    )


def _archs(dependent: bool) -> tuple[int, ...]:
    return tuple(arch for arch in ALL_ARCHS if arch >= LEAST_ARCH or not dependent)


def _square_variant(tile: SkinnyTile, dtype: str, dependents: bool) -> Variant:
    constants = _square_constants(tile, dependents)
    return Variant(
        name=f"square_rows {dtype} features{tile.features}{' dependents' if dependents else ''}",
        kernel=square_rows_kernel,
        signature={
            "x": f"*{dtype}",
            "squares": "*fp32",
            "rows": "i32",
            "columns": "i32",
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        divisible=("x", "squares", "columns"),
        num_warps=_SQUARE_OPTIONS["num_warps"],
        num_stages=_SQUARE_OPTIONS["num_stages"],
        archs=_archs(dependents),
        no_spills=True,
    )
