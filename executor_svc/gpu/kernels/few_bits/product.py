"""Linear layers with weights in few bits and 16-bit rows: w4a16, w8a16, fp8, K-quants.

A tile of the weight is unpacked in registers, rounded to the dtype of x and multiplied by the tensor cores; sums are
fp32. Tiles and splits depend on the number of rows, as in `linear_w8`: for `--numerics fast` only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.stored_linear import QuantFormat
from executor_svc.gpu.kernels import splits
from executor_svc.gpu.kernels.few_bits.dequantize import constants, dequantized
from executor_svc.gpu.kernels.few_bits.formats import COMMON, plane_types
from executor_svc.gpu.kernels.few_bits.packed import PackedWeight
from executor_svc.gpu.kernels.splits import Configuration, Tile, sum_splits
from executor_svc.gpu.kernels.variant import ALL_ARCHS, Variant

TILES = (
    Tile(rows=16, features=64, inner=64, num_warps=4, num_stages=3, may_split=True),
    Tile(rows=32, features=64, inner=64, num_warps=4, num_stages=3, may_split=True),
    Tile(rows=64, features=128, inner=64, num_warps=8, num_stages=3, may_split=True),
    Tile(rows=128, features=128, inner=64, num_warps=8, num_stages=3, may_split=False),
)
_GROUP = 8
"""Tiles of rows that run concurrently, so that they read a tile of the weight from memory only once."""


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    codes,
    high,
    scales,
    super_scales,
    minimums,
    super_minimums,
    zero_points,
    bias,
    out,
    rows,
    out_features,
    columns,
    group,
    super_group,
    out_stride,
    split_size,
    PARTIAL: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    ZERO: tl.constexpr,
    EXPONENTS: tl.constexpr,
    GRANULE: tl.constexpr,
    INNER: tl.constexpr,
):
    """Compute a tile of the product; with PARTIAL, one split's part without bias, and out is [splits, M, N]."""
    row_tiles, feature_tiles = tl.cdiv(rows, ROWS), tl.cdiv(out_features, FEATURES)
    # As many row tiles as run at once cover all feature tiles before the next ones.
    program, split = tl.program_id(0), tl.program_id(1)
    at_once = TILES_AT_ONCE * feature_tiles
    first_row_tile = program // at_once * TILES_AT_ONCE
    some_tiles = tl.minimum(row_tiles - first_row_tile, TILES_AT_ONCE)
    row = (first_row_tile + program % at_once % some_tiles) * ROWS + tl.arange(0, ROWS)
    feature = program % at_once // some_tiles * FEATURES + tl.arange(0, FEATURES)
    known = tl.minimum(feature, out_features - 1).to(tl.int64)

    begin = split * split_size
    end = tl.minimum(begin + split_size, columns)
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    for start in range(begin, end, INNER):
        weight = dequantized(
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
            known,
            start,
            BITS,
            VALUES,
            ZERO,
            EXPONENTS,
            GRANULE,
            INNER,
        )
        at = start + tl.arange(0, INNER)
        there = (row < rows)[:, None] & (at < end)[None, :]
        some = tl.load(x + row.to(tl.int64)[:, None] * columns + at[None, :], mask=there, other=0.0)
        total = tl.dot(some, tl.trans(weight.to(x.dtype.element_ty)), total)

    out_at = out + row.to(tl.int64)[:, None] * out_stride + feature[None, :]
    inside = (row < rows)[:, None] & (feature < out_features)[None, :]
    if PARTIAL:
        out_at += split.to(tl.int64) * rows * out_features
    else:
        total += tl.load(bias + known)[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)


def configuration(rows: int, weight: PackedWeight, num_sms: int) -> Configuration:
    """Return the launch of a product of `rows` rows on a GPU with num_sms multiprocessors."""
    return splits.configuration(TILES, rows, *weight.shape, num_sms)


def workspace_size(weight: PackedWeight, num_sms: int) -> int:
    """Return the float32 numbers that `product` needs as workspace for any number of rows."""
    return splits.workspace_size(TILES, *weight.shape, num_sms)


def product(
    x: Tensor, weight: PackedWeight, ones: Tensor, bias: Tensor, out: Tensor, workspace: Tensor | None, num_sms: int
) -> None:
    """Write x @ weight.T + bias into out, the weight rounded to the dtype of x, summed in fp32 and rounded once.

    Args:
        x: [M, K] bfloat16 or float16, contiguous.
        weight: [N, K], as `packed.is_supported`.
        ones, bias: [N] float32; zeros without a bias.
        out: [M, N] in the dtype of x or float32; columns of a wider matrix are possible.
        workspace: float32, `workspace_size` or more numbers, with any content; None if that is 0. Other work on the
        same stream may share it.
        num_sms: multiprocessors of the GPU.

    Raises ValueError naming the argument.
    """
    _check(x, weight, bias, out)
    rows, (out_features, columns) = len(x), weight.shape
    if not rows:
        return
    chosen = configuration(rows, weight, num_sms)
    tile, partial = chosen.tile, chosen.splits > 1
    needed = chosen.splits * rows * out_features
    if partial and (workspace is None or workspace.dtype != torch.float32 or workspace.numel() < needed):
        raise ValueError(f"workspace: must be {needed} float32")
    programs = -(-rows // tile.rows) * -(-out_features // tile.features)
    _product[(programs, chosen.splits)](
        x=x,
        bias=bias,
        out=workspace if partial else out,
        rows=rows,
        out_features=out_features,
        out_stride=out_features if partial else out.stride(0),
        split_size=chosen.split_size,
        **weight.arguments(),
        **_constants(tile, weight.kind, columns, partial),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    if partial:
        assert workspace is not None
        sum_splits(workspace, ones, bias, out, chosen.splits)


def _constants(tile: Tile, kind: QuantFormat, columns: int, partial: bool) -> dict[str, Any]:
    tiles = {"PARTIAL": partial, "ROWS": tile.rows, "FEATURES": tile.features, "TILES_AT_ONCE": _GROUP}
    return tiles | constants(kind, columns, tile.inner)


def _check(x: Tensor, weight: PackedWeight, bias: Tensor, out: Tensor) -> None:
    out_features, columns = weight.shape
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16) or x.shape[1] != columns or not x.is_contiguous():
        raise ValueError(f"x: must be [M, {columns}] bfloat16 or float16, is {list(x.shape)} {x.dtype}")
    if bias.dtype != torch.float32 or bias.shape != (out_features,):
        raise ValueError(f"bias: must be [{out_features}] float32, is {list(bias.shape)} {bias.dtype}")
    if out.shape != (x.shape[0], out_features) or out.dtype not in (x.dtype, torch.float32) or out.stride(1) != 1:
        raise ValueError(f"out: must be [{x.shape[0]}, {out_features}] {x.dtype} or float32")


def variants() -> list[Variant]:
    """Return every tile for each common format with rows in bf16, whole and split; one format for other dtypes."""
    found = []
    for name, kind in COMMON.items():
        for tile in TILES:
            found.append(_variant(tile, name, kind, "bf16", "bf16"))
            if tile.may_split:
                found.append(_variant(tile, name, kind, "bf16", "fp32", partial=True))
    first = next(iter(COMMON))
    found += [_variant(tile, first, COMMON[first], "fp16", "fp16") for tile in TILES]
    return [*found, *(_variant(tile, first, COMMON[first], "bf16", "fp32") for tile in TILES)]


def _variant(tile: Tile, name: str, kind: QuantFormat, rows: str, out: str, *, partial: bool = False) -> Variant:
    planes = plane_types(kind)
    pointers = {"x": f"*{rows}", **planes, "bias": "*fp32", "out": f"*{out}"}
    sizes = ("rows", "out_features", "columns", "group", "super_group", "out_stride", "split_size")
    fixed = {plane: None for plane, kind_of in planes.items() if kind_of == "constexpr"}
    settings = fixed | _constants(tile, kind, 4096, partial)
    what = "parts" if partial else f"to {out}"
    return Variant(
        name=f"few bits {name} {rows} rows{tile.rows} {what}",
        kernel=_product,
        signature={**pointers, **dict.fromkeys(sizes, "i32"), **dict.fromkeys(settings, "constexpr")},
        constants=settings,
        divisible=(
            *(each for each, kind_of in pointers.items() if kind_of != "constexpr"),
            *("columns", "out_features", "group", "super_group", "out_stride", "split_size"),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        fp_fusion=False,
        archs=ALL_ARCHS,
        no_spills=True,
        wgmma=tile.rows >= 64,
        quick=name in ("Q4_0", "Q6_K") and tile.rows == 16 and not partial and (rows, out) == ("bf16", "bf16"),
    )
