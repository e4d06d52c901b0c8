"""Weight-only linear layers: 8-bit weights with a scale per output channel, multiplied with 16-bit rows (W8A16).

bfloat16 and float16 represent int8 and fp8 e4m3 exactly, so tiles of the weight are converted unscaled, and the scale
is applied to the fp32 sum. With few rows the time is that of reading the weight once: tiles are narrow, and if they are
too few to occupy the GPU, the inner dimension is split, and a second launch sums the parts in order.

Tiles and splits depend on the number of rows, and with them the order of a sum: a row's bits depend on its batch, so
this is for `--numerics fast` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.product_tile import product_tile
from executor_svc.gpu.kernels.splits import sum_splits
from executor_svc.gpu.kernels.variant import ALL_ARCHS, Variant


@dataclass(frozen=True, slots=True)
class W8Tile:
    """Tiles of rows of x and of the weight, by the number of rows."""

    rows: int
    features: int
    inner: int
    num_warps: int
    num_stages: int
    may_split: bool


# At most 82 KiB of shared memory, so that a multiprocessor has two blocks or more: one converts while another waits.
TILES = (
    W8Tile(rows=16, features=64, inner=128, num_warps=4, num_stages=5, may_split=True),
    W8Tile(rows=32, features=64, inner=128, num_warps=4, num_stages=4, may_split=True),
    W8Tile(rows=64, features=128, inner=64, num_warps=4, num_stages=4, may_split=True),
    W8Tile(rows=128, features=128, inner=64, num_warps=8, num_stages=3, may_split=False),
)
TILE_ROWS = tuple(tile.rows for tile in TILES)
"""Maximum rows of each kernel, ascending; the last kernel also serves more rows."""

_GROUP = 8
"""Tiles of rows that run concurrently, so that they read a tile of the weight from memory only once."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The launch of a product."""

    tile: W8Tile
    splits: int
    split_size: int
    """Inner dimension of each split; a multiple of the tile's."""


def configuration(rows: int, out_features: int, in_features: int, num_sms: int) -> Configuration:
    """Return the launch of a product of `rows` rows on a GPU with num_sms multiprocessors."""
    tile = next((tile for tile in TILES if rows <= tile.rows), TILES[-1])
    splits = 1
    if tile.may_split:
        # Splits pay while their traffic (8 bytes per sum) is at most a quarter of the weight's bytes.
        most = min(in_features // (32 * tile.rows), in_features // (4 * tile.inner))
        num_tiles = -(-out_features // tile.features)
        while num_tiles * splits * 4 < num_sms * 5 and splits * 2 <= most:
            splits *= 2
    steps = -(-in_features // tile.inner)
    split_size = -(-steps // splits) * tile.inner
    return Configuration(tile, -(-in_features // split_size), split_size)


def workspace_size(out_features: int, in_features: int, num_sms: int) -> int:
    """Return the float32 numbers that `linear_w8` needs as workspace for any number of rows."""
    sizes = [
        found.splits * found.tile.rows * out_features
        for found in (configuration(tile.rows, out_features, in_features, num_sms) for tile in TILES)
        if found.splits > 1
    ]
    return max(sizes, default=0)


@triton.jit(do_not_specialize=["rows"])
def _linear_w8(
    x,
    weight,
    scale,
    bias,
    out,
    rows,
    out_features,
    in_features,
    split_size,
    PARTIAL: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute a tile of the product; with PARTIAL, one split's unscaled part, and out is [splits, M, N]."""
    row_tiles = tl.cdiv(rows, ROWS)
    feature_tiles = tl.cdiv(out_features, FEATURES)
    # A group of row tiles covers all feature tiles before the next group.
    program = tl.program_id(0)
    in_group = GROUP * feature_tiles
    first_row_tile = program // in_group * GROUP
    group = tl.minimum(row_tiles - first_row_tile, GROUP)
    row = (first_row_tile + program % in_group % group) * ROWS + tl.arange(0, ROWS)
    feature = program % in_group // group * FEATURES + tl.arange(0, FEATURES)

    split = tl.program_id(1)
    start = split * split_size
    left = tl.minimum(in_features - start, split_size)
    inner = tl.arange(0, INNER)
    row_inside = row < rows
    feature_inside = feature < out_features
    known = tl.minimum(feature, out_features - 1).to(tl.int64)
    x_at = x + row.to(tl.int64)[:, None] * in_features + start + inner[None, :]
    weight_at = weight + known[:, None] * in_features + start + inner[None, :]
    total = product_tile(x_at, weight_at, row_inside, left, ROWS, FEATURES, INNER)

    out_at = out + row.to(tl.int64)[:, None] * out_features + feature[None, :]
    inside = row_inside[:, None] & feature_inside[None, :]
    if PARTIAL:
        out_at += split.to(tl.int64) * rows * out_features
    else:
        scales = tl.load(scale + known)
        added = tl.load(bias + known)
        total = total * scales[None, :] + added[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)


def linear_w8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, out: Tensor, workspace: Tensor | None, num_sms: int
) -> None:
    """Write x @ (weight * scale[:, None]).T + bias into out, summed in fp32 and rounded once.

    Args:
        x: [M, in_features] bfloat16 or float16; in_features a multiple of 16, to be read 16 bytes at a time.
        weight: [out_features, in_features] int8 or float8_e4m3fn.
        scale: [out_features] float32.
        bias: [out_features] float32; zeros without a bias.
        out: [M, out_features] in the dtype of x or float32.
        workspace: float32, `workspace_size` or more numbers, with any content; None if that is 0. Other work on the
        same stream may share it.
        num_sms: multiprocessors of the GPU.

    All are contiguous. Raises ValueError naming the argument.
    """
    _check(x, weight, scale, bias, out)
    rows, in_features = x.shape
    out_features = weight.shape[0]
    if not rows:
        return
    chosen = configuration(rows, out_features, in_features, num_sms)
    tile, needed = chosen.tile, chosen.splits * rows * out_features
    partial = chosen.splits > 1
    if partial and (workspace is None or workspace.dtype != torch.float32 or workspace.numel() < needed):
        raise ValueError(f"workspace: must be {needed} float32")
    programs = -(-rows // tile.rows) * -(-out_features // tile.features)
    _linear_w8[(programs, chosen.splits)](
        x,
        weight,
        scale,
        bias,
        workspace if partial else out,
        rows,
        out_features,
        in_features,
        chosen.split_size,
        PARTIAL=partial,
        ROWS=tile.rows,
        FEATURES=tile.features,
        INNER=tile.inner,
        GROUP=_GROUP,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )
    if partial:
        assert workspace is not None
        sum_splits(workspace, chosen.splits, scale, bias, out)


def _check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, out: Tensor) -> None:
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x: must be [M, in_features] bfloat16 or float16, is {list(x.shape)} {x.dtype}")
    if weight.dtype not in (torch.int8, torch.float8_e4m3fn) or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight: must be [out_features, {x.shape[1]}] int8 or float8_e4m3fn, is {list(weight.shape)}")
    if x.shape[1] % 16:
        raise ValueError(f"x: in_features must be a multiple of 16, is {x.shape[1]}")
    for name, vector in (("scale", scale), ("bias", bias)):
        if vector.dtype != torch.float32 or vector.shape != weight.shape[:1]:
            raise ValueError(f"{name}: must be [{weight.shape[0]}] float32, is {list(vector.shape)} {vector.dtype}")
    if out.shape != (x.shape[0], weight.shape[0]) or out.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"out: must be [{x.shape[0]}, {weight.shape[0]}] {x.dtype} or float32")
    for name, tensor in (("x", x), ("weight", weight), ("scale", scale), ("bias", bias), ("out", out)):
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(f"{name}: must be contiguous, at a multiple of 16 bytes")


def variants() -> list[Variant]:
    """Return every tile for each dtype of rows, weight and result, whole and split."""
    found = []
    for rows in ("bf16", "fp16"):
        for weight in ("i8", "fp8e4nv"):
            for tile in TILES:
                found += [_variant(tile, rows, weight, out) for out in (rows, "fp32")]
                if tile.may_split:
                    found.append(_variant(tile, rows, weight, "fp32", partial=True))
    odd = [_variant(tile, "bf16", "i8", "bf16", aligned=False) for tile in TILES]
    return [*found, *odd]


def _variant(tile: W8Tile, rows: str, weight: str, out: str, *, partial: bool = False, aligned: bool = True) -> Variant:
    pointers = {"x": rows, "weight": weight, "scale": "fp32", "bias": "fp32", "out": out}
    sizes = ("rows", "out_features", "in_features", "split_size")
    constants = {
        "PARTIAL": partial,
        "ROWS": tile.rows,
        "FEATURES": tile.features,
        "INNER": tile.inner,
        "GROUP": _GROUP,
    }
    kind = "parts" if partial else f"to {out}"
    return Variant(
        name=f"linear_w8 {rows} {weight} rows{tile.rows} {kind}{'' if aligned else ' odd features'}",
        kernel=_linear_w8,
        signature={
            **{name: f"*{dtype}" for name, dtype in pointers.items()},
            **dict.fromkeys(sizes, "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        divisible=(*pointers, "in_features", "split_size", *(("out_features",) if aligned else ())),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        archs=(90,) if weight == "fp8e4nv" else ALL_ARCHS,
        no_spills=True,
        wgmma=tile.rows >= 64,
        quick=(rows, weight, out, aligned) == ("bf16", "i8", "bf16", True) and tile.rows == 16 and not partial,
    )
