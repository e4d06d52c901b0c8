"""Linear layers with weights in few bits and up to 256 rows: a program has all rows, so each number is unpacked once.

Features are the M of products, 128 for a program, and rows of x their N. A step of the weight is unpacked to 16 bits in
the registers from which tensor cores read it; they multiply while the next step is unpacked. That is wgmma, of compute
capability 9.0; before it warps would divide the rows of x, and unpack a weight again for each share. The weight's
numbers are those of `device.dequantize`, rounded to the dtype of x, and sums are float32.

Where tiles are too few to fill the GPU, parts of their columns are programs of their own, and the last of a tile's
programs adds the parts in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.interface import is_interpreted
from executor_svc.device.stored_linear import QuantFormat
from executor_svc.gpu.kernels.few_bits.in_place import step_in_place
from executor_svc.gpu.kernels.few_bits.layout import FewBitsLayout, FewBitsWeight, plane_arguments
from executor_svc.gpu.kernels.few_bits.linear import COMMON, RARE, check_arguments
from executor_svc.gpu.kernels.variant import Variant


@dataclass(frozen=True, slots=True)
class AllRowsTile:
    """All rows of x, up to `rows`, with some features, by the number of rows."""

    rows: int
    features: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """That run at once, by registers and shared memory."""


_TILES = (
    AllRowsTile(rows=32, features=128, num_warps=8, num_stages=4, programs_per_sm=2),
    AllRowsTile(rows=64, features=128, num_warps=8, num_stages=4, programs_per_sm=2),
    AllRowsTile(rows=128, features=128, num_warps=8, num_stages=4, programs_per_sm=1),
    AllRowsTile(rows=256, features=128, num_warps=8, num_stages=3, programs_per_sm=1),
)
"""Not measured: they compile without spills."""
TILE_ROWS = tuple(tile.rows for tile in _TILES)
"""Maximum rows of each kernel, ascending."""
MOST_ROWS = TILE_ROWS[-1]

_MOST_PARTS = 8
_LEAST_STEPS = 4
"""Of a part."""
_STEPS_OF_SUMS = 2
"""Steps that take as long as writing and reading the sums of a part: computed, by the bytes of a tile of sums."""


def all_rows_tile(rows: int) -> AllRowsTile:
    """Return the tile for so many rows, up to MOST_ROWS."""
    return next(tile for tile in _TILES if rows <= tile.rows)


def all_rows_parts(tile: AllRowsTile, out_features: int, steps: int, num_sms: int) -> int:
    """Return the parts of a tile's columns with which programs end first, by counting steps; none is empty."""
    tiles, at_once = -(-out_features // tile.features), tile.programs_per_sm * num_sms

    def steps_of(parts: int) -> int:
        beside = _STEPS_OF_SUMS if parts > 1 else 0
        return -(-tiles * parts // at_once) * (-(-steps // parts) + beside) + (parts if parts > 1 else 0)

    parts = min(range(1, max(1, min(_MOST_PARTS, steps // _LEAST_STEPS)) + 1), key=steps_of)
    return -(-steps // -(-steps // parts))


def all_rows_sums_size(weight: FewBitsWeight, num_sms: int) -> int:
    """Return the float32 numbers that `linear_all_rows` needs as workspace for any number of rows."""
    return max(_sums_size(weight, tile, num_sms) for tile in _TILES)


def all_rows_counters(weight: FewBitsWeight) -> int:
    """Return the int32 counters, zeros at first, that `linear_all_rows` needs."""
    return -(-weight.rows // min(tile.features for tile in _TILES))


def _sums_size(weight: FewBitsWeight, tile: AllRowsTile, num_sms: int) -> int:
    parts = all_rows_parts(tile, weight.rows, weight.layout.steps, num_sms)
    return 0 if parts == 1 else parts * -(-weight.rows // tile.features) * tile.features * tile.rows


@triton.jit
def _write(total, bias, out, feature, row, out_features, rows, out_stride):
    """Write sums [FEATURES, ROWS] and the bias."""
    there = feature < out_features
    total += tl.load(bias + feature, mask=there, other=0.0)[:, None]
    out_at = out + row.to(tl.int64)[None, :] * out_stride + feature[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=there[:, None] & (row < rows)[None, :])


@triton.jit(do_not_specialize=["rows", "parts"])
def _linear_all_rows(
    x, codes, high, numbers, zeros, above, bias, out, sums, counters,
    rows, out_features, in_features, out_stride, steps, span, super_span, part_steps, parts,
    BITS: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, PAIRED: tl.constexpr,
    SUPERS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute FEATURES features of up to ROWS rows over `part_steps` steps; the last of `parts` programs adds them.

    WHOLE: columns fill all steps.
    """
    row, place = tl.arange(0, ROWS), tl.arange(0, FEATURES)
    feature = tl.program_id(0) * FEATURES + place
    # Programs beyond the weight's last tile read it again.
    tile = tl.minimum(feature // TILE, tl.cdiv(out_features, TILE) - 1).to(tl.int64)
    lane = feature % TILE
    row_at = x + (row * in_features)[:, None]
    row_inside = (row < rows)[:, None]

    first_step = tl.program_id(1) * part_steps
    last_step = tl.minimum(first_step + part_steps, steps)
    total = tl.zeros((FEATURES, ROWS), tl.float32)
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

    if sums is None:
        _write(total, bias, out, feature, row, out_features, rows, out_stride)
    else:
        tile_of_sums = sums + tl.program_id(0).to(tl.int64) * parts * (FEATURES * ROWS)
        at = place[:, None] * ROWS + row[None, :]
        tl.store(tile_of_sums + tl.program_id(1) * (FEATURES * ROWS) + at, total)
        counter = counters + tl.program_id(0)
        # Sums of all threads are written before one thread counts, and read after.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            tl.store(counter, 0)
            total = tl.zeros((FEATURES, ROWS), tl.float32)
            for part in range(parts):
                total += tl.load(tile_of_sums + part * (FEATURES * ROWS) + at, cache_modifier=".cg")
            _write(total, bias, out, feature, row, out_features, rows, out_stride)


def linear_all_rows(
    x: Tensor,
    weight: FewBitsWeight,
    bias: Tensor,
    out: Tensor,
    workspace: Tensor | None,
    counters: Tensor,
    num_sms: int,
) -> None:
    """Write x @ weight.T + bias into out, summed in float32 and rounded once.

    Args:
        x: [M, in_features] bfloat16 or float16, contiguous; M up to MOST_ROWS.
        weight: on the device of x.
        bias: [out_features] float32; zeros without a bias.
        out: [M, out_features] in the dtype of x or float32, columns adjacent, rows of any stride.
        workspace: float32, `all_rows_sums_size` or more numbers, with any content; None if that is 0. Other work on
            the same stream may share it.
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
    tile = all_rows_tile(rows)
    parts = all_rows_parts(tile, weight.rows, layout.steps, num_sms)
    needed = _sums_size(weight, tile, num_sms)
    if needed and (workspace is None or workspace.dtype != torch.float32 or workspace.numel() < needed):
        raise ValueError(f"workspace: must be {needed} float32")
    if counters.dtype != torch.int32 or counters.numel() < all_rows_counters(weight):
        raise ValueError(f"counters: must be {all_rows_counters(weight)} int32")
    _linear_all_rows[(-(-weight.rows // tile.features), parts)](
        x,
        *weight.planes,
        bias,
        out,
        workspace if parts > 1 else None,
        counters if parts > 1 else None,
        rows,
        weight.rows,
        weight.columns,
        out.stride(0),
        layout.steps,
        layout.span,
        layout.super_span,
        -(-layout.steps // parts),
        parts,
        **_constants(layout, tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )


def _constants(layout: FewBitsLayout, tile: AllRowsTile) -> dict[str, Any]:
    return layout.constants() | {
        "PACKED": not is_interpreted(),
        "WHOLE": layout.columns % (2 * layout.half) == 0,
        "ROWS": tile.rows,
        "FEATURES": tile.features,
    }


_COLUMNS = 4096


def variants() -> list[Variant]:
    """Return common formats with every tile in parts, and whole with the largest; rare ones with the largest."""
    largest = _TILES[-1]
    found = [_variant(kind, tile, "bf16", "bf16", True) for kind in COMMON for tile in _TILES]
    found += [_variant(kind, largest, "bf16", "bf16", False) for kind in COMMON]
    found += [_variant(kind, largest, "bf16", "bf16", True) for kind in RARE]
    found += [_variant(kind, largest, "fp16", "fp16", True) for kind in COMMON]
    # To logits; and with halves of 32 columns.
    narrow = _variant(COMMON[2], largest, "bf16", "bf16", True, columns=544)
    return [*found, _variant(COMMON[1], largest, "bf16", "fp32", False), narrow]


def _variant(
    kind: QuantFormat, tile: AllRowsTile, rows: str, out: str, split: bool, columns: int = _COLUMNS
) -> Variant:
    layout = FewBitsLayout(kind, columns)
    planes, known = plane_arguments(layout)
    constants = _constants(layout, tile) | known
    pointers = {"x": f"*{rows}", **planes, "bias": "*fp32", "out": f"*{out}"}
    if split:
        pointers |= {"sums": "*fp32", "counters": "*i32"}
    else:
        constants |= {"sums": None, "counters": None}
    sizes = (
        "rows", "out_features", "in_features", "out_stride", "steps", "span", "super_span", "part_steps", "parts",
    )  # fmt: skip
    mark = f"{' parts' if split else ''}{'' if layout.half == 64 else ' narrow'}"
    return Variant(
        name=f"linear_all_rows {rows} {kind.name} rows{tile.rows} to {out}{mark}",
        kernel=_linear_all_rows,
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
        archs=(90,),
        no_spills=(kind.group, out) != (16, "fp32"),  # 24 bytes
        wgmma=True,
        quick=(kind.name, rows, tile.rows, split) == ("Q4_K", "bf16", 256, True),
    )
