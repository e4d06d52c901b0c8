"""Products whose rows have the same bits beside any other rows: of `--numerics exact`.

A number of the result is one chain of tensor-core instructions over the columns of its row, in ascending order, from 0.
The weight's rows are the M of the instruction and the rows of x its N. So a tile of any number of rows of x is made of
the same instructions, wgmma m64nNk16 on a Hopper GPU (k32 in fp8), mma.sync m16n8k16 before it, and the columns that
one of them adds are the same. Rows as M would be multiplied by mma.sync where they are few and by wgmma where they are
many, and these add the columns of a step in different orders. A tile is filled up with rows of zeros, which are not
loaded. float32 is multiplied by fused multiply-adds, one after the other.

A weight with few rows has too few tiles for a GPU, so its columns are in parts, as many as its shape says: a part is a
chain from 0, and parts are added in their order, by one program or, for few rows, by `sum_splits` after programs of
their own. No number of rows, and no number of multiprocessors, changes which columns are a part.

That N does not matter is how the hardware behaves as far as is known, not what a manual promises: `gpu.exact.probe`
compares the tiles with each other on the GPU at hand before they are used.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.exact.tiles import EXPERT_ROWS, SPLIT_ROWS, part_columns, product_tiles, reference_tile
from executor_svc.gpu.kernels.experts.blocks import RowBlocks, block_of
from executor_svc.gpu.kernels.linear_w8 import W8Tile
from executor_svc.gpu.kernels.product_tile import widened
from executor_svc.gpu.kernels.rows import DTYPES
from executor_svc.gpu.kernels.splits import sum_splits
from executor_svc.gpu.kernels.variant import ALL_ARCHS, Variant

_FP8 = torch.float8_e4m3fn
_GROUP = 8
"""Tiles of rows that run concurrently, so that they read a tile of the weight from memory only once."""


class Parts(IntEnum):
    """What a program does with the parts of the columns."""

    ONE = 0
    """There is one."""
    ADDED = 1
    """It computes and adds all."""
    APART = 2
    """It computes one, for `sum_splits`."""


@triton.jit
def chain(total, x_at, weight_at, row_inside, begin, end, INNER: tl.constexpr):
    """Add weight @ x.T [FEATURES, ROWS] of the columns from begin to end - 1, INNER at a time in their order.

    x_at, weight_at: [ROWS, INNER] and [FEATURES, INNER], where column 0 is.
    """
    inner = tl.arange(0, INNER)
    # Else ptxas serializes wgmma.
    tl.assume(begin < end)
    for first in range(begin, end, INNER):
        there = first + inner < end
        narrow = tl.load(weight_at + first, mask=there[None, :], other=0.0)
        some = tl.load(x_at + first, mask=row_inside[:, None] & there[None, :], other=0.0)
        total = tl.dot(widened(narrow, some.dtype), tl.trans(some), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def exact_product_kernel(
    x, weight, row_scale, scale, bias, out, blocks, num_blocks,
    rows, out_features, in_features, columns, x_stride, out_stride, x_batch, out_batch, part,
    PARTS: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the product; with parts APART, a part of its columns, and out is [parts, M, N] float32.

    The grid's second axis has blocks, if there are any, else parts, or the products of a batch.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    feature_tiles = tl.cdiv(out_features, FEATURES)
    # A group of row tiles covers all feature tiles before the next group.
    program = tl.program_id(0)
    in_group = GROUP * feature_tiles
    first_row_tile = program // in_group * GROUP
    group = tl.minimum(row_tiles - first_row_tile, GROUP)
    row = (first_row_tile + program % in_group % group) * ROWS + tl.arange(0, ROWS)
    feature = program % in_group // group * FEATURES + tl.arange(0, FEATURES)
    beside = tl.program_id(1).to(tl.int64)
    known = tl.minimum(feature, out_features - 1).to(tl.int64)
    if blocks is not None:
        if beside >= tl.load(num_blocks):
            return
        expert, start, rows = block_of(blocks, beside)
        row = start + tl.arange(0, ROWS)
        row_inside = tl.arange(0, ROWS) < rows
        known += expert * out_features
    else:
        row_inside = row < rows
        row = row.to(tl.int64)
        if PARTS != 2:
            x += beside * x_batch
            out += beside * out_batch
            known += beside * out_features
    x_at = x + row[:, None] * x_stride + tl.arange(0, INNER)[None, :]
    weight_at = weight + known[:, None] * columns + tl.arange(0, INNER)[None, :]
    total = tl.zeros((FEATURES, ROWS), tl.float32)
    if PARTS == 2:
        begin = tl.program_id(1) * part
        total = chain(total, x_at, weight_at, row_inside, begin, tl.minimum(begin + part, in_features), INNER)
    elif PARTS == 1:
        for begin in range(0, in_features, part):
            nothing = tl.zeros((FEATURES, ROWS), tl.float32)
            end = tl.minimum(begin + part, in_features)
            total += chain(nothing, x_at, weight_at, row_inside, begin, end, INNER)
    else:
        total = chain(total, x_at, weight_at, row_inside, 0, in_features, INNER)

    out_at = out + row[None, :] * out_stride + feature[:, None]
    if PARTS == 2:
        out_at += beside * rows * out_features
    else:
        if row_scale is not None:
            total *= tl.load(row_scale + row, row_inside, other=0.0)[None, :]
        if scale is not None:
            total *= tl.load(scale + known)[:, None]
        if bias is not None:
            total += tl.load(bias + known)[:, None]
    inside = row_inside[None, :] & (feature < out_features)[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)


def exact_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    workspace: Tensor | None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    tile: W8Tile | None = None,
    part: int | None = None,
) -> None:
    """Write x @ (weight * scale[:, None]).T + bias into out, summed in float32 and rounded once.

    Args:
        x: [M, in_features] in 16 bits or float32, or in fp8 with row_scale; columns adjacent, rows of any stride.
        weight: [out_features, columns] of the dtype of x or of 8 bits; columns from in_features on are not read.
        bias: [out_features] float32.
        out: [M, out_features], columns adjacent, rows of any stride.
        workspace: float32, `tiles.sums_size` or more numbers, with any content; None if that is 0. Other work on the
        same stream may share it.
        scale: [out_features] float32, for weights of 8 bits.
        row_scale: [M] float32.
        tile: of `tiles.product_tiles`; default: the one that defines the bits.
        part: columns of a part; default: by the weight's shape.

    Raises ValueError naming the argument.
    """
    (rows, in_features), out_features = x.shape, len(weight)
    _check(x, weight, scale, bias, out, row_scale, weight.shape[:1])
    tile = tile or reference_tile(product_tiles(weight.element_size(), row_scale is not None))
    if not rows:
        return
    # Their scale is applied once, to the sum.
    part = in_features if row_scale is not None else part or part_columns(out_features, in_features)
    count = -(-in_features // part)
    kind = Parts.ONE if count == 1 else Parts.APART if rows <= SPLIT_ROWS and tile.may_split else Parts.ADDED
    if kind is Parts.APART:
        needed = count * rows * out_features
        if workspace is None or workspace.dtype != torch.float32 or workspace.numel() < needed:
            raise ValueError(f"workspace: must be {needed} float32")
        _launch(x, weight, None, None, None, workspace, tile, kind, part, beside=count, out_stride=out_features)
        sum_splits(workspace, count, scale, bias, out, fused=False)
    else:
        _launch(x, weight, row_scale, scale, bias, out, tile, kind, part)


def exact_product_of_heads(x: Tensor, weight: Tensor, out: Tensor, tile: W8Tile | None = None) -> None:
    """Write x[:, h] @ weight[h].T to out[:, h] for each head.

    Args:
        x: [T, H, in_features] and out: [T, H, out_features] in 16 bits or float32, columns adjacent, other strides any.
        weight: [H, out_features, in_features], contiguous.
        tile: as of `exact_product`.

    Raises ValueError naming the argument.
    """
    heads, out_features, in_features = weight.shape
    if x.shape[1:] != (heads, in_features) or out.shape != (len(x), heads, out_features):
        raise ValueError(f"x, out: must be [T, {heads}, {in_features}] and [T, {heads}, {out_features}]")
    _check(x[:, 0], weight[0], None, None, out[:, 0], None, (out_features,))
    tile = tile or reference_tile(product_tiles(weight.element_size()))
    if len(x):
        weight = weight.view(heads * out_features, in_features)
        _launch(
            x, weight, None, None, None, out, tile, Parts.ONE, in_features, beside=heads, out_features=out_features,
            x_batch=x.stride(1), out_batch=out.stride(1),
        )  # fmt: skip


def exact_product_of_experts(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    blocks: RowBlocks,
    row_scale: Tensor | None = None,
) -> None:
    """Write x @ weight[expert].T + bias[expert] into out for the rows of each block, of EXPERT_ROWS at most.

    Arguments as of `product.linear_of_experts`. Raises ValueError naming the argument.
    """
    experts, out_features, columns = weight.shape
    _check(x, weight[0], scale, bias, out, row_scale, (experts, out_features))
    if blocks.rows != EXPERT_ROWS:
        raise ValueError(f"blocks: must have up to {EXPERT_ROWS} rows, not {blocks.rows}")
    tile = reference_tile(product_tiles(weight.element_size(), row_scale is not None))
    if len(x):
        weight = weight.view(experts * out_features, columns)
        _launch(
            x, weight, row_scale, scale, bias, out, tile, Parts.ONE, x.shape[1], beside=blocks.most,
            out_features=out_features, blocks=blocks,
        )  # fmt: skip


def _launch(
    x: Tensor,
    weight: Tensor,
    row_scale: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tile: W8Tile,
    kind: Parts,
    part: int,
    *,
    beside: int = 1,
    out_features: int | None = None,
    out_stride: int | None = None,
    x_batch: int = 0,
    out_batch: int = 0,
    blocks: RowBlocks | None = None,
) -> None:
    """Launch with `beside` programs of each tile: blocks, parts or products of a batch."""
    features = len(weight) if out_features is None else out_features
    row_tiles = 1 if blocks is not None else -(-len(x) // tile.rows)
    exact_product_kernel[(row_tiles * -(-features // tile.features), beside)](
        x, weight, row_scale, scale, bias, out,
        None if blocks is None else blocks.table, None if blocks is None else blocks.count,
        tile.rows if blocks is not None else len(x), features, x.shape[-1], weight.shape[1], x.stride(0),
        out.stride(0) if out_stride is None else out_stride, x_batch, out_batch, part,
        **_constants(tile, kind), num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def _constants(tile: W8Tile, kind: Parts) -> dict[str, Any]:
    sizes = {"ROWS": tile.rows, "FEATURES": tile.features, "INNER": tile.inner, "GROUP": _GROUP}
    return {"PARTS": int(kind), **sizes}


def _check(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    row_scale: Tensor | None,
    shape: tuple[int, ...],
) -> None:
    """weight: of one expert or head; shape: of scales and biases."""
    narrow = weight.element_size() == 1
    if weight.dim() != 2 or not (weight.dtype == x.dtype or (narrow and row_scale is None and x.element_size() == 2)):
        raise ValueError(f"weight: must be [out_features, columns] {x.dtype} or of 8 bits, is {weight.dtype}")
    if x.dim() != 2 or x.shape[1] > weight.shape[1] or x.dtype not in (*DTYPES, _FP8) or x.stride(1) != 1:
        raise ValueError(f"x: must be [M, {weight.shape[1]} or fewer] with adjacent columns, is {list(x.shape)}")
    if narrow != (scale is not None) or (x.dtype == _FP8) != (row_scale is not None):
        raise ValueError("scale, row_scale: weights and rows of 8 bits have them, others do not")
    for name, vector, wanted in (("scale", scale, shape), ("bias", bias, shape), ("row_scale", row_scale, x.shape[:1])):
        if vector is not None and (vector.dtype != torch.float32 or vector.shape != wanted):
            raise ValueError(f"{name}: must be {list(wanted)} float32, is {list(vector.shape)} {vector.dtype}")
    if out.shape != (len(x), len(weight)) or out.stride(1) != 1 or out.dtype not in DTYPES:
        raise ValueError(f"out: must be [{len(x)}, {len(weight)}] with adjacent columns, is {list(out.shape)}")
    if not weight.is_contiguous():
        raise ValueError("weight: must be contiguous")


def variants() -> list[Variant]:
    """Return every tile for each dtype of rows and of weights, and what parts, heads and experts need."""
    found = []
    for rows, weights in (
        ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "i8"), ("fp16", "i8"), ("bf16", "fp8e4nv"),
        ("fp16", "fp8e4nv"), ("fp8e4nv", "fp8e4nv"),
    ):  # fmt: skip
        for tile in _tiles_of(rows, weights):
            kinds = (Parts.ONE, Parts.ADDED, *((Parts.APART,) if tile.may_split else ()))
            found += [_variant(tile, rows, weights, kind) for kind in kinds if kind is Parts.ONE or rows != "fp8e4nv"]
    for tile in _tiles_of("bf16", "bf16"):
        found.append(_variant(tile, "bf16", "bf16", Parts.ONE, out="fp32"))
        found.append(_variant(tile, "bf16", "bf16", Parts.ONE, biased=True))
    for rows, weights in (("bf16", "bf16"), ("bf16", "i8"), ("bf16", "fp8e4nv"), ("fp8e4nv", "fp8e4nv")):
        tile = reference_tile(_tiles_of(rows, weights))
        found.append(_variant(tile, rows, weights, Parts.ONE, biased=True, experts=True))
    return found


def _tiles_of(rows: str, weights: str) -> tuple[W8Tile, ...]:
    return product_tiles({"fp32": 4, "bf16": 2, "fp16": 2}.get(weights, 1), rows == "fp8e4nv")


def _instructions(tile: W8Tile, rows: str) -> dict[int, frozenset[str]]:
    """Return what a tile must be made of: the number of rows of x is N, and nothing else of it changes."""
    if rows == "fp32":
        return {}
    narrow = rows == "fp8e4nv"
    return {90: frozenset({f"wgmma m64n{tile.rows}k{32 if narrow else 16}"}), 80: frozenset({"mma m16n8k16"})}


def _variant(
    tile: W8Tile,
    rows: str,
    weights: str,
    kind: Parts,
    *,
    out: str | None = None,
    biased: bool = False,
    experts: bool = False,
) -> Variant:
    apart = kind is Parts.APART
    narrow = weights in ("i8", "fp8e4nv")
    optional = {"row_scale": rows == "fp8e4nv", "scale": narrow and not apart, "bias": biased or (narrow and not apart)}
    out = "fp32" if apart else out or ("bf16" if rows == "fp8e4nv" else rows)
    pointers = {"x": f"*{rows}", "weight": f"*{weights}", **{name: "*fp32" for name in optional if optional[name]}}
    pointers |= {"out": f"*{out}"} | ({"blocks": "*i32", "num_blocks": "*i32"} if experts else {})
    sizes = ("out_features", "in_features", "columns", "x_stride", "out_stride", "x_batch", "out_batch", "part")
    absent = [name for name in ("row_scale", "scale", "bias", "blocks", "num_blocks") if name not in pointers]
    constants = _constants(tile, kind) | dict.fromkeys(absent)
    what = "".join(f" {name}" for name, there in (("biased", biased), ("experts", experts)) if there)
    return Variant(
        name=f"exact_product {rows} {weights} rows{tile.rows} {kind.name.lower()} to {out}{what}",
        kernel=exact_product_kernel,
        signature={
            **pointers, **dict.fromkeys(("rows", *sizes), "i32"), **dict.fromkeys(constants, "constexpr")
        },
        constants=constants,
        divisible=(*pointers, *sizes),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        fp_fusion=False,
        archs=(90,) if "fp8e4nv" in (rows, weights) else ALL_ARCHS,
        # Sums of a part beside those of all may spill a few bytes, where a part ends.
        no_spills=kind is not Parts.ADDED,
        wgmma=rows != "fp32",
        products=_instructions(tile, rows),
        narrow_loads=0 if rows == weights in ("bf16", "fp16") and not (biased or experts) else None,
        quick=(rows, weights, out, biased) == ("bf16", "bf16", "bf16", False) and kind is Parts.ONE and tile.rows == 64,
    )  # fmt: skip
