"""The second product of LoRA: y += scale * t @ b.T, with t the sums of `shrink`, for all parts of a linear at once.

A row's bits come from that row and its adapter alone: splits are added in their order, then ranks in theirs, 16 at a
time. t stays in float32: beside b in 16 bits, which tf32 holds exactly, it is multiplied as the sum of two numbers in
tf32, which leaves an error of 2**-21 of t at most. Products of float32 are float32. y is rounded once, to the dtype of
b, where it is float32 too. Tiles are of 16 or 32 rows, with the same mma.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.lora.places import FEATURES, OUT_TILE_WORDS, RANKS, LoraPlaces
from executor_svc.gpu.kernels.lora.tables import TILE_ROWS, TILE_WORDS, RowTable, num_tiles, tile_rows
from executor_svc.gpu.kernels.rows import DTYPES
from executor_svc.gpu.kernels.variant import Variant

_TILE_WORDS = tl.constexpr(TILE_WORDS)
_OUT_TILE_WORDS = tl.constexpr(OUT_TILE_WORDS)
_WARPS, _STAGES = 4, 2
_PLAIN = ("num_rows", "parts", "blocks", "num_sums")
_SIZES = (*_PLAIN, "out_features", "y_stride")


@triton.jit
def _add_splits(at, inside, num_sums, stride, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """Return the sum of the splits' sums [ROWS, RANKS], beginning with the first."""
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for _ in range(num_sums):
        total += tl.load(at, inside, other=0.0)
        at += stride
    return total


@triton.jit
def _add_product(total, t, weight, TWO: tl.constexpr):
    """Add t @ weight.T; TWO: by two products in tf32, the larger one last."""
    turned = tl.trans(weight)
    if TWO:
        # The 10 bits of tf32 behind the first, and the rest.
        high = (t.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        total = tl.dot(t - high, turned, total, input_precision="tf32")
        return tl.dot(high, turned, total, input_precision="tf32")
    return tl.dot(t, turned, total, input_precision="ieee")


@triton.jit(do_not_specialize=_PLAIN)
def _expand(
    y, b, ranks, scales, rows, tiles, out_tiles, sums, num_rows, parts, blocks, num_sums, out_features, y_stride,
    ALIGNED: tl.constexpr, TWO: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Add to some rows of one place, in up to 128 features of one part. ALIGNED: as `LoraShape.is_aligned`."""
    out_tile = out_tiles + tl.program_id(0) * _OUT_TILE_WORDS
    tile = tiles + tl.program_id(1) * _TILE_WORDS
    part = tl.load(out_tile)
    place = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    rank = tl.load(ranks + place * parts + part)
    if (count > 0) & (rank > 0):
        start = tl.load(out_tile + 1)
        end = tl.load(out_tile + 2)
        if ALIGNED:
            start = tl.multiple_of(start, 16)
            end = tl.multiple_of(end, 16)
        lane = tl.arange(0, ROWS)
        within = (lane < count)[:, None]
        feature = start + tl.arange(0, FEATURES)
        which = tl.arange(0, RANKS)
        padded = blocks * RANKS
        sums_at = sums + ((first + lane).to(tl.int64) * parts + part)[:, None] * padded + which[None, :]
        b_at = b + place.to(tl.int64) * blocks * out_features * RANKS + feature[:, None] * RANKS + which[None, :]
        stride = num_rows.to(tl.int64) * parts * padded
        total = tl.zeros((ROWS, FEATURES), tl.float32)
        for _ in range(0, rank, RANKS):
            t = _add_splits(sums_at, within, num_sums, stride, ROWS, RANKS)
            weight = tl.load(b_at, (feature < end)[:, None], other=0.0).to(tl.float32)
            total = _add_product(total, t, weight, TWO)
            sums_at += RANKS
            b_at += out_features.to(tl.int64) * RANKS
        row = tl.load(rows + first + lane, lane < count, other=0)
        y_at = y + row.to(tl.int64)[:, None] * y_stride + feature[None, :]
        inside = within & (feature < end)[None, :]
        old = tl.load(y_at, inside, other=0.0).to(tl.float32)
        new = old + total * tl.load(scales + place * parts + part)
        # Rounded once, to the type of b, in which a float32 y holds numbers then.
        tl.store(y_at, new.to(b.dtype.element_ty).to(y.dtype.element_ty), inside)


def expand(sums: Tensor, num_sums: int, places: LoraPlaces, table: RowTable, y: Tensor) -> None:
    """Add to y [R, out_features]; arguments as in `lora.add_lora`, which checks them.

    num_sums: as `shrink.num_sums`.
    """
    rows = tile_rows(len(y))
    _expand[(len(places.out_tiles), num_tiles(len(y), table.max_loras))](
        y, places.b, places.ranks, places.scales, table.rows, table.tiles, places.out_tiles, sums, len(y),
        places.num_parts, places.blocks, num_sums, places.shape.out_features, y.stride(0),
        **_constants(DTYPES[places.b.dtype], rows, places.shape.is_aligned), num_warps=_WARPS, num_stages=_STAGES,
        enable_fp_fusion=False,
    )  # fmt: skip


def _constants(dtype: str, rows: int, aligned: bool) -> dict[str, Any]:
    two = dtype != DTYPES[torch.float32]
    return {"ALIGNED": aligned, "TWO": two, "ROWS": rows, "FEATURES": FEATURES, "RANKS": RANKS}


def variants() -> list[Variant]:
    """Return each dtype with each tile; and float32 results beside 16-bit weights, of logits."""
    dtypes = DTYPES.values()
    results = [(kind, kind) for kind in dtypes] + [(kind, "fp32") for kind in dtypes if kind != "fp32"]
    return [_variant(dtype, out, rows) for dtype, out in results for rows in TILE_ROWS]


def _variant(dtype: str, out: str, rows: int) -> Variant:
    words = dict.fromkeys(("rows", "tiles", "out_tiles"), "*i32")
    pointers = {"y": f"*{out}", "b": f"*{dtype}", "ranks": "*i32", "scales": "*fp32", **words, "sums": "*fp32"}
    constants = _constants(dtype, rows, aligned=True)
    return Variant(
        name=f"lora_expand {dtype} rows{rows}{'' if out == dtype else f' to {out}'}",
        kernel=_expand,
        signature={**pointers, **dict.fromkeys(_SIZES, "i32"), **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=(*pointers, "out_features", "y_stride"),
        num_warps=_WARPS,
        num_stages=_STAGES,
        fp_fusion=False,
        no_spills=True,
        quick=(dtype, out, rows) == ("bf16", "bf16", 16),
    )
