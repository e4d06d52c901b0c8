"""The linears of experts with dense weights or weights of 8 bits, for routed rows in blocks of one expert each.

A program computes a tile of features for the rows of a block, by the tile of the dense linears (`product_tile`): sums
are float32, over all columns in their order, and rounded once. A block's tile is chosen by the step's sizes, so a row's
bits depend on it, its expert, and how many tokens the step has room for, not on rows beside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.experts.blocks import BLOCK_ROWS, RowBlocks, block_of
from executor_svc.gpu.kernels.linear_w8 import TILES as W8_TILES
from executor_svc.gpu.kernels.linear_w8 import W8Tile
from executor_svc.gpu.kernels.product_tile import product_tile
from executor_svc.gpu.kernels.rows import DTYPES
from executor_svc.gpu.kernels.variant import ALL_ARCHS, Variant

_16_BITS = tuple(
    replace(tile, inner=64, num_stages=stages) for tile, stages in zip(W8_TILES, (5, 4, 3, 3), strict=True)
)
_32_BITS = tuple(
    W8Tile(rows, features=64, inner=inner, num_warps=warps, num_stages=2, may_split=False)
    for rows, inner, warps in ((16, 32, 4), (32, 32, 4), (64, 16, 4), (128, 16, 8))
)
"""Of products without tensor cores."""
_FP8 = torch.float8_e4m3fn


def tile_of(rows: int, weight_bytes: int) -> W8Tile:
    """Return the tile for blocks of so many rows, and weights of numbers of so many bytes."""
    tiles = {1: W8_TILES, 2: _16_BITS, 4: _32_BITS}[weight_bytes]
    return next(tile for tile in tiles if rows <= tile.rows)


@triton.jit
def _linear_of_experts(
    x, weight, row_scale, scale, bias, out, blocks, num_blocks,
    out_features, in_features, columns, out_stride,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute some features of a block."""
    block = tl.program_id(1)
    if block >= tl.load(num_blocks):
        return
    expert, start, rows = block_of(blocks, block)
    lane, inner = tl.arange(0, ROWS), tl.arange(0, INNER)
    row_inside, row = lane < rows, start + lane
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    known = expert * out_features + tl.minimum(feature, out_features - 1)
    x_at = x + row[:, None] * in_features + inner[None, :]
    weight_at = weight + known[:, None] * columns + inner[None, :]
    total = product_tile(x_at, weight_at, row_inside, in_features, ROWS, FEATURES, INNER)
    if row_scale is not None:
        total *= tl.load(row_scale + row, row_inside, other=0.0)[:, None]
    if scale is not None:
        total *= tl.load(scale + known)[None, :]
    if bias is not None:
        total += tl.load(bias + known)[None, :]
    inside = row_inside[:, None] & (feature < out_features)[None, :]
    tl.store(out + row[:, None] * out_stride + feature[None, :], total.to(out.dtype.element_ty), inside)


def linear_of_experts(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    blocks: RowBlocks,
    row_scale: Tensor | None = None,
) -> None:
    """Write x @ weight[expert].T + bias[expert] into out for the rows of each block, rounded once.

    Args:
        x: [R, in_features], in blocks; with row_scale in fp8, else in 16 bits or float32.
        weight: [E, out_features, columns], of the dtype of x, or of 8 bits; columns from in_features on are not read.
        scale: [E, out_features] float32, for weights of 8 bits.
        bias: [E, out_features] float32.
        out: [R, out_features], columns adjacent, rows of any stride.
        blocks: of the R rows.
        row_scale: [R] float32.

    All but out are contiguous. Raises ValueError naming the argument.
    """
    _check(x, weight, scale, bias, out, row_scale)
    tile = tile_of(blocks.rows, weight.element_size())
    if not len(x):
        return
    _, out_features, columns = weight.shape
    _linear_of_experts[(-(-out_features // tile.features), blocks.most)](
        x, weight, row_scale, scale, bias, out, blocks.table, blocks.count,
        out_features, x.shape[1], columns, out.stride(0),
        **_constants(tile), num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


def _constants(tile: W8Tile) -> dict[str, Any]:
    return {"ROWS": tile.rows, "FEATURES": tile.features, "INNER": tile.inner}


def _check(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, out: Tensor, row_scale: Tensor | None
) -> None:
    narrow = weight.element_size() == 1
    if weight.dim() != 3 or not (weight.dtype == x.dtype or (narrow and row_scale is None and x.element_size() == 2)):
        raise ValueError(f"weight: must be [E, out_features, columns] {x.dtype} or of 8 bits, is {weight.dtype}")
    if x.dim() != 2 or x.shape[1] > weight.shape[2] or x.dtype not in (*DTYPES, _FP8):
        raise ValueError(f"x: must be [R, {weight.shape[2]} or fewer], is {list(x.shape)} {x.dtype}")
    if narrow != (scale is not None) or (x.dtype == _FP8) != (row_scale is not None):
        raise ValueError("scale, row_scale: weights and rows of 8 bits have them, others do not")
    for name, vector, shape in (
        ("scale", scale, weight.shape[:2]), ("bias", bias, weight.shape[:2]), ("row_scale", row_scale, x.shape[:1]),
    ):  # fmt: skip
        if vector is not None and (vector.dtype != torch.float32 or vector.shape != shape):
            raise ValueError(f"{name}: must be {list(shape)} float32, is {list(vector.shape)} {vector.dtype}")
    if out.shape != (len(x), weight.shape[1]) or out.stride(1) != 1 or out.dtype not in DTYPES:
        raise ValueError(f"out: must be [{len(x)}, {weight.shape[1]}] with adjacent columns, is {list(out.shape)}")
    for name, tensor in (("x", x), ("weight", weight)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous")


def variants() -> list[Variant]:
    """Return every tile for each dtype of rows and of weights; with biases those of gpt-oss."""
    found = []
    for rows, weights in (
        ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "i8"), ("fp16", "i8"), ("bf16", "fp8e4nv"),
        ("fp8e4nv", "fp8e4nv"),
    ):  # fmt: skip
        size = {"fp32": 4, "bf16": 2, "fp16": 2}.get(weights, 1)
        tiles = dict.fromkeys(tile_of(count, size) for count in BLOCK_ROWS)
        found += [_variant(tile, rows, weights, biased=False) for tile in tiles]
    found += [_variant(tile_of(count, 2), "bf16", "bf16", biased=True) for count in (BLOCK_ROWS[0], BLOCK_ROWS[-1])]
    return found


def _variant(tile: W8Tile, rows: str, weights: str, *, biased: bool) -> Variant:
    optional = {
        "row_scale": rows == "fp8e4nv", "scale": weights in ("i8", "fp8e4nv"), "bias": biased,
    }  # fmt: skip
    out = "bf16" if rows == "fp8e4nv" else rows
    pointers = {"x": f"*{rows}", "weight": f"*{weights}", **{name: "*fp32" for name in optional if optional[name]}}
    pointers |= {"out": f"*{out}", "blocks": "*i32", "num_blocks": "*i32"}
    sizes = ("out_features", "in_features", "columns", "out_stride")
    constants = _constants(tile) | {name: None for name in optional if not optional[name]}
    fp8 = "fp8e4nv" in (rows, weights)
    return Variant(
        name=f"linear_of_experts {rows} {weights} rows{tile.rows}{' biased' if biased else ''}",
        kernel=_linear_of_experts,
        signature={**pointers, **dict.fromkeys(sizes, "i32"), **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=(*pointers, *sizes),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        archs=(90,) if fp8 else ALL_ARCHS,
        no_spills=True,
        wgmma=tile.rows >= 64 and rows != "fp32",
        quick=(rows, weights, tile.rows, biased) == ("bf16", "bf16", 16, False),
    )
