"""Linear layers with weights in few bits and up to 128 16-bit rows: weights are unpacked in registers.

Up to 16 rows, codes are multiplied as they are and sums take the scales, in float32: `few_rows`. With more rows, or
groups of 16 columns, the weight's numbers are those of `device.dequantize`, rounded to the dtype of x, and sums are
float32: the product is that of the same weight kept dense in this dtype. Still more rows are faster by cuBLAS:
`widening`.

A program computes 64 features, or a part of their columns where they are too few to fill the GPU; a second launch adds
the parts in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.interface import is_interpreted
from executor_svc.device.stored_linear import QuantFormat
from executor_svc.gpu.kernels.experts.blocks import RowBlocks, block_of
from executor_svc.gpu.kernels.few_bits.assembly import assembly_of, center_of
from executor_svc.gpu.kernels.few_bits.few_rows import linear_few_rows
from executor_svc.gpu.kernels.few_bits.layout import TILE, FewBitsLayout, FewBitsWeight, plane_arguments, stored_as
from executor_svc.gpu.kernels.few_bits.numbers import weight_of_step
from executor_svc.gpu.kernels.splits import sum_splits
from executor_svc.gpu.kernels.variant import Variant


@dataclass(frozen=True, slots=True)
class FewBitsTile:
    """Tiles of rows of x, each with a tile of 64 rows of the weight, by the number of rows."""

    rows: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """Wanted, before a product is divided no further."""
    scaled_sums: bool = False
    """Whether codes are multiplied as they are."""


_TILES = (
    FewBitsTile(rows=8, num_warps=2, num_stages=3, programs_per_sm=6, scaled_sums=True),
    FewBitsTile(rows=16, num_warps=2, num_stages=3, programs_per_sm=6, scaled_sums=True),
    FewBitsTile(rows=32, num_warps=4, num_stages=3, programs_per_sm=4),
    FewBitsTile(rows=64, num_warps=4, num_stages=3, programs_per_sm=4),
    FewBitsTile(rows=128, num_warps=4, num_stages=3, programs_per_sm=2),
)
"""Measured on an H200."""
_GROUPS_OF_16 = FewBitsTile(rows=16, num_warps=4, num_stages=4, programs_per_sm=4)
"""A product of 16 columns is too small for its instruction."""
_128_OF_EXPERTS = replace(_TILES[-1], num_warps=8)
"""Theirs are not widened for more rows. With 4 warps registers are spilled on sm_80."""
TILE_ROWS = tuple(tile.rows for tile in _TILES)
"""Maximum rows of each kernel, ascending."""
MOST_ROWS = TILE_ROWS[-1]

_MOST_PARTS = 8
_LEAST_STEPS = 4
"""Of a part."""


def tile_of(rows: int, kind: QuantFormat) -> FewBitsTile:
    """Return the tile for so many rows, up to MOST_ROWS."""
    found = next(tile for tile in _TILES if rows <= tile.rows)
    return _GROUPS_OF_16 if found.scaled_sums and kind.group == 16 else found


def tile_of_experts(rows: int, kind: QuantFormat) -> FewBitsTile:
    """Return the tile for blocks of so many rows."""
    tile = tile_of(rows, kind)
    return _128_OF_EXPERTS if tile is _TILES[-1] else tile


def num_parts(tile: FewBitsTile, out_features: int, steps: int, num_sms: int) -> int:
    """Return the parts of a tile's product, each a program with equally many steps, but for the last."""
    wanted = -(-tile.programs_per_sm * num_sms // -(-out_features // TILE))
    part_steps = -(-steps // max(1, min(wanted, _MOST_PARTS, steps // _LEAST_STEPS)))
    return -(-steps // part_steps)


def workspace_size(weight: FewBitsWeight, num_sms: int) -> int:
    """Return the float32 numbers that `linear_few_bits` needs as workspace for any number of rows."""
    tiles = _tiles(weight.layout.kind)
    parts = [(tile.rows, num_parts(tile, weight.rows, weight.layout.steps, num_sms)) for tile in tiles]
    return max((count * rows * weight.rows for rows, count in parts if count > 1), default=0)


@triton.jit
def _add_half(total, weight, x, rows_at, row_inside, column, end):
    """Add the product of half a step, [F, HALF] @ [HALF, ROWS]; columns from `end` on are zeros."""
    inside = row_inside[:, None] & (column < end)[None, :]
    some = tl.load(x + rows_at[:, None] + column[None, :], mask=inside, other=0.0)
    return tl.dot(weight.to(x.dtype.element_ty), tl.trans(some), total)


@triton.jit(do_not_specialize=["rows"])
def _linear_few_bits(
    x, codes, high, numbers, zeros, above, bias, out, blocks, num_blocks,
    rows, out_features, in_features, out_stride, steps, span, super_span, part_steps,
    BITS: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, PAIRED: tl.constexpr,
    SUPERS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr,
    PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute 64 features of up to ROWS rows over `part_steps` steps; with PARTIAL, out is [parts, M, N].

    With blocks: of one of them, in the weight of its expert.
    """
    row = tl.arange(0, ROWS)
    tile, lane = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    feature = tile * TILE + lane
    part, added = tl.program_id(1), bias + feature
    if blocks is not None:
        if part >= tl.load(num_blocks):
            return
        expert, start, rows = block_of(blocks, part)
        tile += expert * tl.cdiv(out_features, TILE)
        added += expert * out_features
        x += start * in_features
        out += start * out_stride
        part = 0
    row_inside = row < rows
    rows_at = row.to(tl.int64) * in_features

    first_step = part * part_steps
    last_step = tl.minimum(first_step + part_steps, steps)
    end = tl.minimum(in_features, last_step * (2 * HALF))
    total = tl.zeros((TILE, ROWS), tl.float32)
    # Else ptxas serializes wgmma.
    tl.assume(first_step < last_step)
    for step in range(first_step, last_step):
        first, second = weight_of_step(
            codes, high, numbers, zeros, above, tile, lane, step, steps, span, super_span,
            BITS, VALUES, ZERO, OFFSETS, PAIRED, SUPERS, GROUPS, HALF, TILE, PACKED,
        )  # fmt: skip
        column = step * (2 * HALF) + tl.arange(0, HALF)
        total = _add_half(total, first, x, rows_at, row_inside, column, end)
        total = _add_half(total, second, x, rows_at, row_inside, column + HALF, end)

    inside = (feature < out_features)[:, None] & row_inside[None, :]
    if PARTIAL:
        out_at = out + (part * rows + row).to(tl.int64)[None, :] * out_features + feature[:, None]
    else:
        out_at = out + row.to(tl.int64)[None, :] * out_stride + feature[:, None]
        total += tl.load(added, mask=feature < out_features, other=0.0)[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)


def linear_few_bits(
    x: Tensor, weight: FewBitsWeight, bias: Tensor, out: Tensor, workspace: Tensor | None, num_sms: int
) -> None:
    """Write x @ weight.T + bias into out, summed in float32 and rounded once.

    Args:
        x: [M, in_features] bfloat16 or float16, contiguous; M up to MOST_ROWS.
        weight: on the device of x.
        bias: [out_features] float32; zeros without a bias.
        out: [M, out_features] in the dtype of x or float32, columns adjacent, rows of any stride.
        workspace: float32, `workspace_size` or more numbers, with any content; None if that is 0. Other work on the
        same stream may share it.
        num_sms: multiprocessors of the GPU.

    Raises ValueError naming the argument.
    """
    if len(x) > MOST_ROWS:
        raise ValueError(f"x: has {len(x)} rows, more than {MOST_ROWS}")
    check_arguments(x, weight, bias, out)
    rows = x.shape[0]
    if not rows:
        return
    tile = tile_of(rows, weight.layout.kind)
    parts = num_parts(tile, weight.rows, weight.layout.steps, num_sms)
    needed = parts * rows * weight.rows
    if parts > 1 and (workspace is None or workspace.dtype != torch.float32 or workspace.numel() < needed):
        raise ValueError(f"workspace: must be {needed} float32")
    launch(x, weight, bias, out, workspace, tile, parts)


def few_bits_of_experts(x: Tensor, weight: FewBitsWeight, bias: Tensor, out: Tensor, blocks: RowBlocks) -> None:
    """Write x @ weight[expert].T + bias[expert] into out for the rows of each block, as `linear_few_bits` does.

    Columns are in one part, whatever the number of rows.

    Args:
        x: [R, in_features] bfloat16 or float16, contiguous, in blocks.
        weight: `FewBitsWeight.together` of those of E experts.
        bias: [E, out_features] float32.
        out: as of `linear_few_bits`.
        blocks: of the R rows.

    Raises ValueError naming the argument.
    """
    check_arguments(x, weight, bias, out, weight.num_experts)
    if len(x):
        launch(x, weight, bias, out, None, tile_of_experts(blocks.rows, weight.layout.kind), 1, blocks)


def launch(
    x: Tensor,
    weight: FewBitsWeight,
    bias: Tensor,
    out: Tensor,
    workspace: Tensor | None,
    tile: FewBitsTile,
    parts: int,
    blocks: RowBlocks | None = None,
) -> None:
    """Write the product with a given tile and number of parts; arguments as of `linear_few_bits`, not checked.

    blocks: of the rows, each with its expert; None: of one weight.
    """
    rows, layout = x.shape[0], weight.layout
    programs = -(-weight.rows // TILE)
    kernel = linear_few_rows if tile.scaled_sums else _linear_few_bits
    kernel[(programs, parts if blocks is None else blocks.most)](
        x,
        *weight.planes,
        bias,
        workspace if parts > 1 else out,
        None if blocks is None else blocks.table,
        None if blocks is None else blocks.count,
        rows,
        weight.rows,
        weight.columns,
        out.stride(0),
        layout.steps,
        layout.span,
        layout.super_span,
        -(-layout.steps // parts),
        **_constants(layout, tile, x.dtype == torch.bfloat16, partial=parts > 1),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    if parts > 1:
        assert workspace is not None
        sum_splits(workspace, parts, None, bias, out)


def _constants(layout: FewBitsLayout, tile: FewBitsTile, is_bfloat16: bool, *, partial: bool) -> dict[str, Any]:
    own: dict[str, Any]
    if tile.scaled_sums:
        assembly = "" if is_interpreted() else assembly_of(layout.kind, is_bfloat16)
        own = {"CENTER": center_of(layout.kind), "ASSEMBLY": assembly}
    else:
        own = {"PACKED": not is_interpreted()}
    return layout.constants() | own | {"ROWS": tile.rows, "PARTIAL": partial}


def check_arguments(
    x: Tensor, weight: FewBitsWeight, bias: Tensor, out: Tensor, num_experts: int | None = None
) -> None:
    """Raise ValueError, naming the argument, for arguments that no product with few bits takes."""
    shape = (weight.rows,) if num_experts is None else (num_experts, weight.rows)
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16) or x.shape[1] != weight.columns:
        raise ValueError(f"x: must be [M, {weight.columns}] bfloat16 or float16, is {list(x.shape)} {x.dtype}")
    if not x.is_contiguous():
        raise ValueError("x: must be contiguous")
    if bias.dtype != torch.float32 or bias.shape != shape or not bias.is_contiguous():
        raise ValueError(f"bias: must be {list(shape)} float32, is {list(bias.shape)} {bias.dtype}")
    if out.shape != (x.shape[0], weight.rows) or out.dtype not in (x.dtype, torch.float32) or out.stride(1) != 1:
        raise ValueError(f"out: must be [{x.shape[0]}, {weight.rows}] {x.dtype} or float32, with adjacent columns")


_COLUMNS = 4096
COMMON = (
    QuantFormat("Q4_K", 4, 32, super_group=256, offsets="minimum"),
    QuantFormat("Q6_K", 6, 16, zero=32, super_group=256),
    QuantFormat("Q4_0", 4, 32, zero=8),
    QuantFormat("Q8_0", 8, 32, zero=128),
    QuantFormat("gptq", 4, 128, offsets="zero_point"),
    QuantFormat("fp8", 8, 128, values="e4m3", scale="float32"),
    QuantFormat("w8a8", 8, _COLUMNS, zero=128, scale="bfloat16"),
)
"""Formats that models have most."""
RARE = (
    QuantFormat("Q4_1", 4, 32, offsets="minimum"),
    QuantFormat("Q5_0", 5, 32, zero=16),
    QuantFormat("Q5_1", 5, 32, offsets="minimum"),
    QuantFormat("Q5_K", 5, 32, super_group=256, offsets="minimum"),
    QuantFormat("w4a16", 4, 32, offsets="zero_point", scale="bfloat16"),
    QuantFormat("fp8_rows", 8, _COLUMNS, values="e4m3", scale="float32"),
    QuantFormat("mxfp4", 4, 32, values="e2m1", scale="e8m0"),
    stored_as(QuantFormat("Q2_K", 2, 16, super_group=256, offsets="minimum")),
    stored_as(QuantFormat("Q3_K", 3, 16, zero=4, super_group=256)),
    stored_as(QuantFormat("IQ4_XS", 4, 32, "table", super_group=256, table=(0,) * 16)),
    stored_as(QuantFormat("IQ2_S", 4, 16, "table", scale="float32", super_group=256, table=(0,) * 16)),
)


def variants() -> list[Variant]:
    """Return common formats with every tile, rare ones with the least and the largest."""
    found = [variant_of(kind, tile, "bf16", "bf16") for kind in COMMON for tile in _tiles(kind)]
    found += [variant_of(kind, tile, "bf16", "bf16") for kind in RARE for tile in (_tiles(kind)[0], _tiles(kind)[-1])]
    for kind in COMMON:
        found.append(variant_of(kind, _tiles(kind)[0], "bf16", "fp32", partial=True))
        found.append(variant_of(kind, _tiles(kind)[0], "fp16", "fp16"))
    # To logits; and with halves of 32 columns.
    found += [variant_of(COMMON[1], tile, "bf16", "fp32") for tile in _tiles(COMMON[1])]
    found += [variant_of(kind, _TILES[0], "bf16", "bf16", columns=576) for kind in COMMON[2:4]]
    of_experts = [(kind, TILE_ROWS) for kind in (COMMON[0], RARE[6])]
    of_experts += [(kind, (TILE_ROWS[0], TILE_ROWS[-1])) for kind in COMMON[1:]]
    for kind, counts in of_experts:
        tiles = [tile_of_experts(rows, kind) for rows in counts]
        found += [variant_of(kind, tile, "bf16", "bf16", experts=True) for tile in tiles]
    return found


def _tiles(kind: QuantFormat) -> list[FewBitsTile]:
    return list(dict.fromkeys(tile_of(rows, kind) for rows in TILE_ROWS))


def variant_of(
    kind: QuantFormat,
    tile: FewBitsTile,
    rows: str,
    out: str,
    *,
    partial: bool = False,
    columns: int = _COLUMNS,
    experts: bool = False,
) -> Variant:
    """Return the product of a format by a tile, rows and results of these types; partial: of a part of the columns."""
    layout = FewBitsLayout(kind, columns)
    planes, known = plane_arguments(layout)
    constants = _constants(layout, tile, rows == "bf16", partial=partial) | known
    pointers = {"x": f"*{rows}", **planes, "bias": "*fp32", "out": f"*{out}"}
    if experts:
        pointers |= {"blocks": "*i32", "num_blocks": "*i32"}
    else:
        constants |= {"blocks": None, "num_blocks": None}
    sizes = ("rows", "out_features", "in_features", "out_stride", "steps", "span", "super_span", "part_steps")
    what = "of experts" if experts else "parts" if partial else f"to {out}"
    return Variant(
        name=f"linear_few_bits {rows} {kind.name} rows{tile.rows} {what}{'' if layout.half == 64 else ' narrow'}",
        kernel=linear_few_rows if tile.scaled_sums else _linear_few_bits,
        signature={
            **pointers,
            **{name: "i32" for name in sizes if name not in constants},
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        divisible=(*pointers, "out_features", "in_features", "out_stride"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        fp_fusion=False,
        no_spills=experts,
        wgmma=not tile.scaled_sums,
        quick=kind.name == "Q4_K" and (rows, out, experts) == ("bf16", "bf16", False) and tile.rows == 16,
    )
