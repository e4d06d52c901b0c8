"""Products in tiles: the tile for a number of rows, splits of the inner dimension, and the sum of their parts.

With few rows the time is that of reading the weight once: tiles are narrow, and if they are too few to occupy the GPU,
the inner dimension is split, and a second launch sums the parts in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.variant import Variant


@dataclass(frozen=True, slots=True)
class Tile:
    """Tiles of rows of x and of the weight, by the number of rows."""

    rows: int
    features: int
    inner: int
    num_warps: int
    num_stages: int
    may_split: bool


_SUM_COLUMNS = 512
"""Columns of a program of `sum_splits`."""
_SUM_WARPS, _SUM_STAGES = 4, 2


@dataclass(frozen=True, slots=True)
class Configuration:
    """The launch of a product."""

    tile: Tile
    splits: int
    split_size: int
    """Inner dimension of each split; a multiple of the tile's."""


def configuration(tiles: Sequence[Tile], rows: int, out_features: int, in_features: int, num_sms: int) -> Configuration:
    """Return the launch of a product of `rows` rows on a GPU with num_sms multiprocessors.

    tiles: by their most rows, ascending; the last serves more rows too.
    """
    tile = next((tile for tile in tiles if rows <= tile.rows), tiles[-1])
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


def workspace_size(tiles: Sequence[Tile], out_features: int, in_features: int, num_sms: int) -> int:
    """Return the float32 numbers that a product needs as workspace for any number of rows."""
    sizes = [
        found.splits * found.tile.rows * out_features
        for found in (configuration(tiles, tile.rows, out_features, in_features, num_sms) for tile in tiles)
        if found.splits > 1
    ]
    return max(sizes, default=0)


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
    total = total * tl.load(scale + column, mask=inside, other=0.0) + tl.load(bias + column, mask=inside, other=0.0)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=inside)


def sum_splits(parts: Tensor, scale: Tensor, bias: Tensor, out: Tensor, splits: int) -> None:
    """Write the sum of parts [splits, M, N] * scale [N] + bias [N] into out [M, N], whose rows may be further apart.

    parts: float32, with anything behind these numbers.
    """
    rows, out_features = out.shape
    _sum_splits[(rows, -(-out_features // _SUM_COLUMNS))](
        parts,
        scale,
        bias,
        out,
        rows,
        out_features,
        out.stride(0),
        splits,
        COLUMNS=_SUM_COLUMNS,
        num_warps=_SUM_WARPS,
        num_stages=_SUM_STAGES,
        enable_fp_fusion=True,
    )


def variants() -> list[Variant]:
    """Return the sum for each dtype of the result."""
    return [_sum_variant(out) for out in ("bf16", "fp16", "fp32")]


def _sum_variant(out: str) -> Variant:
    return Variant(
        name=f"sum of splits to {out}",
        kernel=_sum_splits,
        signature={
            **dict.fromkeys(("parts", "scale", "bias"), "*fp32"),
            "out": f"*{out}",
            **dict.fromkeys(("rows", "out_features", "out_stride", "splits"), "i32"),
            "COLUMNS": "constexpr",
        },
        constants={"COLUMNS": _SUM_COLUMNS},
        divisible=("parts", "scale", "bias", "out", "out_features", "out_stride"),
        num_warps=_SUM_WARPS,
        num_stages=_SUM_STAGES,
        no_spills=True,
        quick=out == "bf16",
    )
