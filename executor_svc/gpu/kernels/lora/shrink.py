"""The first product of LoRA: rows of x by A of their adapters, x @ a.T, to the adapter's rank in float32.

A row's bits come from that row and its adapter alone. The columns of x are in a number of splits that depends on
in_features only. A split's sum is one chain from its first column on; splits are added in their order, by `expand`
where each is a program of its own (few rows), else here. Ranks are computed 16 at a time, of rows in tiles of 16 or 32:
with mma m16n8k16, never wgmma, which needs 64.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.lora.places import RANKS, LoraPlaces
from executor_svc.gpu.kernels.lora.tables import FEW_ROWS, TILE_ROWS, TILE_WORDS, RowTable, num_tiles, tile_rows
from executor_svc.gpu.kernels.rows import DTYPES
from executor_svc.gpu.kernels.variant import Variant

COLUMNS = 128
"""Columns of one step of a sum."""
MAX_SPLITS = 8
_LEAST_SPLIT = 256

_TILE_WORDS = tl.constexpr(TILE_WORDS)
_STAGES = 4
_WARPS = {16: 2, 32: 4}
"""By the rows of a tile."""
_PLAIN = ("num_rows", "parts", "blocks", "splits")
_SIZES = (*_PLAIN, "in_features", "x_stride", "split_columns")


def split_columns(in_features: int) -> int:
    """Return the columns of a split."""
    return max(_LEAST_SPLIT, -(-in_features // (MAX_SPLITS * COLUMNS)) * COLUMNS)


def num_splits(in_features: int) -> int:
    """Return the number of splits: at most MAX_SPLITS."""
    return -(-in_features // split_columns(in_features))


def num_sums(num_rows: int, in_features: int) -> int:
    """Return the sums per rank that `shrink` writes: one of each split, or their sum where rows are many."""
    return num_splits(in_features) if num_rows <= FEW_ROWS else 1


@triton.jit
def sum_columns(
    x_at, a_at, x_inside, a_inside, start, end, in_features, ROWS: tl.constexpr, RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the products [ROWS, RANKS] over columns from start on, in one chain."""
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for first in range(start, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (column < in_features)[None, :]
        some = tl.load(x_at + column[None, :], x_inside & inside, other=0.0)
        weight = tl.load(a_at + column[None, :], a_inside & inside, other=0.0)
        total = tl.dot(some, tl.trans(weight), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=_PLAIN)
def _shrink(
    x, a, ranks, rows, tiles, sums, num_rows, parts, blocks, splits, in_features, x_stride, split_columns,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute 16 ranks of a part for a tile of rows; with SPLIT, over one split."""
    tile = tiles + tl.program_id(0) * _TILE_WORDS
    place = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    part = tl.program_id(1) // blocks
    start = tl.program_id(1) % blocks * RANKS
    rank = tl.load(ranks + place * parts + part)
    if (count > 0) & (start < rank):
        lane = tl.arange(0, ROWS)
        within = lane < count
        row = tl.load(rows + first + lane, within, other=0)
        which = start + tl.arange(0, RANKS)
        x_at = x + row.to(tl.int64)[:, None] * x_stride
        base = (place * parts + part).to(tl.int64) * (blocks * RANKS)
        a_at = a + (base + which)[:, None] * in_features
        first_split = tl.program_id(2) if SPLIT else 0
        last_split = tl.program_id(2) + 1 if SPLIT else splits
        total = tl.zeros((ROWS, RANKS), tl.float32)
        for split in range(first_split, last_split):
            begin = split * split_columns
            total += sum_columns(
                x_at, a_at, within[:, None], (which < rank)[:, None], begin,
                tl.minimum(begin + split_columns, in_features), in_features, ROWS, RANKS, COLUMNS,
            )  # fmt: skip
        # 0 for ranks that the adapter does not have.
        at = first_split * num_rows + first + lane
        at = (at.to(tl.int64) * parts + part) * (blocks * RANKS)
        tl.store(sums + at[:, None] + which[None, :], total, within[:, None])


def shrink(x: Tensor, places: LoraPlaces, table: RowTable, sums: Tensor) -> None:
    """Write the sums of x [R, in_features] for `expand`; arguments as in `lora.add_lora`, which checks them."""
    num_rows, in_features = x.shape
    splits, rows = num_splits(in_features), tile_rows(num_rows)
    split = num_rows <= FEW_ROWS
    programs = (num_tiles(num_rows, table.max_loras), places.num_parts * places.blocks, splits if split else 1)
    _shrink[programs](
        x, places.a, places.ranks, table.rows, table.tiles, sums, num_rows, places.num_parts, places.blocks, splits,
        in_features, x.stride(0), split_columns(in_features), **_constants(rows), num_warps=_WARPS[rows],
        num_stages=_STAGES, enable_fp_fusion=False,
    )  # fmt: skip


def _constants(rows: int) -> dict[str, Any]:
    return {"SPLIT": rows == TILE_ROWS[0], "ROWS": rows, "RANKS": RANKS, "COLUMNS": COLUMNS}


def variants() -> list[Variant]:
    """Return each dtype with each tile."""
    return [_variant(dtype, rows) for dtype in DTYPES.values() for rows in TILE_ROWS]


def _variant(dtype: str, rows: int) -> Variant:
    pointers = {"x": f"*{dtype}", "a": f"*{dtype}", "ranks": "*i32", "rows": "*i32", "tiles": "*i32", "sums": "*fp32"}
    constants = _constants(rows)
    return Variant(
        name=f"lora_shrink {dtype} rows{rows}",
        kernel=_shrink,
        signature={**pointers, **dict.fromkeys(_SIZES, "i32"), **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=(*pointers, "in_features", "x_stride", "split_columns"),
        num_warps=_WARPS[rows],
        num_stages=_STAGES,
        fp_fusion=False,
        no_spills=True,
        quick=(dtype, rows) == ("bf16", 16),
    )
