"""Linear layers with weights in few bits and up to 256 rows: a program has all rows, so each number is unpacked once.

Features are the M of products, 128 for a program, and rows of x their N. A step of the weight is unpacked to 16 bits in
the registers from which tensor cores read it; they multiply while the next step is unpacked. That is wgmma, of compute
capability 9.0; before it warps would divide the rows of x, and unpack a weight again for each share. The weight's
numbers are those of `device.dequantize`, rounded to the dtype of x, and sums are float32.

As many programs as run at once share all steps of all tiles evenly, in their order. So a tile may be in parts, of
programs that follow each other, and the last of them that ends adds the parts in their order (decision 0053).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.interface import is_interpreted
from executor_svc.device.stored_linear import QuantFormat
from executor_svc.gpu.kernels.few_bits.all_rows_tiles import (
    MOST_ROWS,
    TILE_ROWS,
    TILES,
    AllRowsTile,
    all_rows_tile,
    share_of,
)
from executor_svc.gpu.kernels.few_bits.in_place import step_in_place
from executor_svc.gpu.kernels.few_bits.layout import FewBitsLayout, FewBitsWeight, plane_arguments
from executor_svc.gpu.kernels.few_bits.linear import COMMON, RARE, check_arguments
from executor_svc.gpu.kernels.variant import Variant


def all_rows_sums_size(weight: FewBitsWeight, num_sms: int) -> int:
    """Return the float32 numbers that `linear_all_rows` needs as workspace for any number of rows."""
    return max(_sums_size(weight, tile, num_sms) for tile in TILES)


def all_rows_counters(weight: FewBitsWeight) -> int:
    """Return the int32 counters, zeros at first, that `linear_all_rows` needs."""
    return -(-weight.rows // min(tile.features for tile in TILES))


def _sums_size(weight: FewBitsWeight, tile: AllRowsTile, num_sms: int) -> int:
    """Of the parts that a program may begin and end with."""
    return 2 * share_of(tile, weight.rows, weight.layout.steps, num_sms).programs * tile.features * tile.rows


@triton.jit
def _anew(index, PACKED: tl.constexpr):
    """Return an index that a compiler cannot know: else it keeps what follows from it in registers, tile after tile."""
    if PACKED:
        index = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [index], tl.int32, False, 1)
    return index


@triton.jit
def write_sums(total, bias, out, feature, row, out_features, rows, out_stride):
    """Write sums [FEATURES, ROWS] and the bias."""
    there = feature < out_features
    total += tl.load(bias + feature, mask=there, other=0.0)[:, None]
    out_at = out + row.to(tl.int64)[None, :] * out_stride + feature[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=there[:, None] & (row < rows)[None, :])


@triton.jit
def _write_merged(
    sums, bias, out, feature, place, first_unit, each, begin, after, out_features, rows, out_stride,
    ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Write a tile whose steps, from `first_unit` on, programs `begin` to `after` - 1 have shared; in their order."""
    CHUNK: tl.constexpr = 16
    for first_row in range(0, ROWS, CHUNK):
        row = first_row + tl.arange(0, CHUNK)
        at = place[:, None] * ROWS + row[None, :]
        total = tl.zeros((FEATURES, CHUNK), tl.float32)
        for other in range(begin, after):
            part = other * 2 + (first_unit >= other * each).to(tl.int32)
            # Past the L1 cache: other programs have just written them.
            total += tl.load(sums + part.to(tl.int64) * (FEATURES * ROWS) + at, cache_modifier=".cg")
        write_sums(total, bias, out, feature, row, out_features, rows, out_stride)


@triton.jit
def sums_of_steps(
    x, codes, high, numbers, zeros, above, rows, out_features, in_features, steps, span, super_span,
    first_tile, feature, row, first_step, last_step,
    BITS: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, PAIRED: tl.constexpr,
    SUPERS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the product of some steps for features [F] and rows [R] of x: [F, R] float32.

    first_tile: where the weight begins.
    """
    # Features beyond the weight's last tile read it again.
    tile = first_tile + tl.minimum(feature // TILE, tl.cdiv(out_features, TILE) - 1).to(tl.int64)
    lane = feature % TILE
    row_at = x + (row * in_features)[:, None]
    row_inside = (row < rows)[:, None]
    total = tl.zeros((feature.shape[0], row.shape[0]), tl.float32)
    # Else ptxas serializes wgmma.
    tl.assume(first_step < last_step)
    for step in range(first_step, last_step):
        weight = step_in_place(
            codes, high, numbers, zeros, above, tile, lane, step, steps, span, super_span, x.dtype.element_ty,
            BITS, VALUES, ZERO, OFFSETS, PAIRED, SUPERS, GROUPS, HALF, TILE, PACKED,
        )  # fmt: skip
        column = (step * (2 * HALF) + tl.arange(0, 2 * HALF))[None, :]
        inside = row_inside if WHOLE else row_inside & (column < in_features)
        some = tl.load(row_at + column, mask=inside, other=0.0)
        # One product for a step: it goes on while the next step is unpacked.
        total = tl.dot(weight, tl.trans(some), total)
    return total


@triton.jit(do_not_specialize=["rows", "each", "units"])
def _linear_all_rows(
    x, codes, high, numbers, zeros, above, bias, out, sums, counters,
    rows, out_features, in_features, out_stride, steps, span, super_span, each, units,
    BITS: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, PAIRED: tl.constexpr,
    SUPERS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute `each` of the `units` steps of all tiles of FEATURES features of up to ROWS rows.

    WHOLE: columns fill all steps. sums: [programs, 2, FEATURES, ROWS], of the tiles that a program ends and begins
    with, if others have steps of them, too.
    """
    row, place = tl.arange(0, ROWS), tl.arange(0, FEATURES)
    program = tl.program_id(0)
    unit = program * each
    end = tl.minimum(unit + each, units)
    while unit < end:
        tile = unit // steps
        first_step = unit - tile * steps
        last_step = tl.minimum(first_step + end - unit, steps)
        feature = tile * FEATURES + place
        total = sums_of_steps(
            x, codes, high, numbers, zeros, above, rows, out_features, in_features, steps, span, super_span,
            0, feature, _anew(row, PACKED), first_step, last_step,
            BITS, VALUES, ZERO, OFFSETS, PAIRED, SUPERS, GROUPS, HALF, TILE, PACKED, WHOLE,
        )  # fmt: skip
        if last_step - first_step == steps:
            write_sums(total, bias, out, feature, _anew(row, PACKED), out_features, rows, out_stride)
        else:
            # Of a program the tile is the first, or begins in it.
            own = program * 2 + (first_step == 0).to(tl.int32)
            at = _anew(place, PACKED)[:, None] * ROWS + row[None, :]
            tl.store(sums + own.to(tl.int64) * (FEATURES * ROWS) + at, total)
            begin, after = tile * steps // each, (tile * steps + steps - 1) // each + 1
            # Sums of all threads are written before one thread counts, and read after.
            tl.debug_barrier()
            if tl.atomic_add(counters + tile, 1, sem="acq_rel") == after - begin - 1:
                tl.store(counters + tile, 0)
                _write_merged(
                    sums, bias, out, feature, _anew(place, PACKED), tile * steps, each, begin, after,
                    out_features, rows, out_stride, ROWS, FEATURES,
                )  # fmt: skip
        unit += last_step - first_step


def linear_all_rows(
    x: Tensor,
    weight: FewBitsWeight,
    bias: Tensor,
    out: Tensor,
    workspace: Tensor,
    counters: Tensor,
    num_sms: int,
) -> None:
    """Write x @ weight.T + bias into out, summed in float32 and rounded once.

    Args:
        x: [M, in_features] bfloat16 or float16, contiguous; M up to MOST_ROWS.
        weight: on the device of x.
        bias: [out_features] float32; zeros without a bias.
        out: [M, out_features] in the dtype of x or float32, columns adjacent, rows of any stride.
        workspace: float32, `all_rows_sums_size` or more numbers, with any content. Other work on the same stream may
            share it.
        counters: int32, `all_rows_counters` or more zeros, which they are again afterwards.
        num_sms: multiprocessors of the GPU.

    Raises ValueError naming the argument.
    """
    rows, layout = len(x), weight.layout
    if rows > MOST_ROWS:
        raise ValueError(f"x: has {rows} rows, more than {MOST_ROWS}")
    check_arguments(x, weight, bias, out)
    if not rows:
        return
    tile = all_rows_tile(rows, layout.kind)
    share, needed = share_of(tile, weight.rows, layout.steps, num_sms), _sums_size(weight, tile, num_sms)
    if workspace.dtype != torch.float32 or workspace.numel() < needed:
        raise ValueError(f"workspace: must be {needed} float32")
    if counters.dtype != torch.int32 or counters.numel() < all_rows_counters(weight):
        raise ValueError(f"counters: must be {all_rows_counters(weight)} int32")
    _linear_all_rows[(share.programs,)](
        x,
        *weight.planes,
        bias,
        out,
        workspace,
        counters,
        rows,
        weight.rows,
        weight.columns,
        out.stride(0),
        layout.steps,
        layout.span,
        layout.super_span,
        share.steps,
        -(-weight.rows // tile.features) * layout.steps,
        **constants_of(layout, tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.max_registers,
        enable_fp_fusion=False,
    )


def constants_of(layout: FewBitsLayout, tile: AllRowsTile) -> dict[str, Any]:
    return layout.constants() | {
        "PACKED": not is_interpreted(),
        "WHOLE": layout.columns % (2 * layout.half) == 0,
        "ROWS": tile.rows,
        "FEATURES": tile.features,
    }


_COLUMNS = 4096


def variants() -> list[Variant]:
    """Return common formats with every tile, rare ones with the largest."""
    largest = TILES[-1]
    found = [_variant(kind, all_rows_tile(rows, kind), "bf16", "bf16") for kind in COMMON for rows in TILE_ROWS]
    found += [_variant(kind, largest, "bf16", "bf16") for kind in RARE]
    found += [_variant(kind, largest, "fp16", "fp16") for kind in COMMON]
    # To logits; and with halves of 32 columns.
    narrow = _variant(COMMON[2], largest, "bf16", "bf16", columns=544)
    return [*found, *(_variant(COMMON[1], tile, "bf16", "fp32") for tile in TILES), narrow]


def _variant(kind: QuantFormat, tile: AllRowsTile, rows: str, out: str, columns: int = _COLUMNS) -> Variant:
    layout = FewBitsLayout(kind, columns)
    return variant_of(
        f"linear_all_rows {rows} {kind.name} rows{tile.rows} to {out}{'' if layout.half == 64 else ' narrow'}",
        _linear_all_rows,
        layout,
        tile,
        (f"*{rows}", f"*{out}"),
        {"sums": "*fp32", "counters": "*i32", "rows": "i32", "each": "i32", "units": "i32"},
        no_spills=tile.rows == 128,  # others up to 84 bytes, where a tile ends
        quick=(kind.name, rows, tile.rows) == ("Q4_K", "bf16", 256),
    )


def variant_of(
    name: str,
    kernel: Any,
    layout: FewBitsLayout,
    tile: AllRowsTile,
    dtypes: tuple[str, str],
    more: dict[str, str],
    *,
    no_spills: bool,
    quick: bool,
) -> Variant:
    """Return the variant of a kernel of `sums_of_steps`.

    dtypes: pointers to rows and results. more: types of arguments beside the weight's, rows, results and bias.
    """
    planes, known = plane_arguments(layout)
    constants = constants_of(layout, tile) | known
    pointers = {"x": dtypes[0], **planes, "bias": "*fp32", "out": dtypes[1]}
    pointers |= {name: kind for name, kind in more.items() if kind.startswith("*")}
    sizes = dict.fromkeys(("out_features", "in_features", "out_stride", "steps", "span", "super_span"), "i32") | more
    return Variant(
        name=name,
        kernel=kernel,
        signature={
            **pointers,
            **{name: kind for name, kind in sizes.items() if name not in constants and name not in pointers},
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        divisible=(*pointers, "out_features", "in_features", "out_stride"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        fp_fusion=False,
        max_registers=tile.max_registers,
        archs=(90,),
        no_spills=no_spills,
        wgmma=True,
        quick=quick,
    )
