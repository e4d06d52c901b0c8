"""Linear layers with weights in few bits and few rows: products with codes as they are, scaled group by group.

Codes are exact in 16 bits, so a group's sum is that of the codes and x, and takes its scale and offset in float32. The
weight is read once and never rounded. Not memory but the instructions for each number of the weight bound the time:
`assembly` has few.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.experts.blocks import block_of
from executor_svc.gpu.kernels.few_bits.numbers import column_of, scales_and_offsets
from executor_svc.gpu.kernels.few_bits.unpacking import codes_of, values_of

_BFLOAT16_TWO = tl.constexpr((tl.bfloat16, tl.bfloat16))
_BFLOAT16_THREE = tl.constexpr((tl.bfloat16, tl.bfloat16, tl.bfloat16))
_FLOAT16_TWO = tl.constexpr((tl.float16, tl.float16))
_FLOAT16_THREE = tl.constexpr((tl.float16, tl.float16, tl.float16))


@triton.jit
def _of_bytes(
    codes, row, column, DTYPE: tl.constexpr, VALUES: tl.constexpr, HALF: tl.constexpr, CENTER: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return the numbers of some columns of half a step, and ones: [F, SUB]."""
    types: tl.constexpr = _BFLOAT16_TWO if tl.bfloat16 == DTYPE else _FLOAT16_TWO
    stored = tl.load(codes + row[:, None] * HALF + column[None, :])
    if ASSEMBLY == "":
        found = values_of(stored.to(tl.int32), CENTER * 1.0, VALUES).to(DTYPE)
        ones = (stored.to(tl.float32) * 0.0 + 1.0).to(DTYPE)
    else:
        found, ones = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,=r,=r,r", [stored], types, True, 4)
    return found, ones


@triton.jit
def _of_nibbles(
    codes, high, row, column, DTYPE: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr, HALF: tl.constexpr,
    CENTER: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return the numbers of some columns of both halves of a step, and ones: [F, SUB]."""
    types: tl.constexpr = _BFLOAT16_THREE if tl.bfloat16 == DTYPE else _FLOAT16_THREE
    both = tl.load(codes + row[:, None] * HALF + column[None, :])
    more, shift = both, column[None, :]
    if BITS != 4:
        count: tl.constexpr = 2 * HALF * (BITS - 4) // 8
        more = tl.load(high + row[:, None] * count + column[None, :] % count)
        shift = column[None, :] // count * (BITS - 4)
    if ASSEMBLY == "":
        low, up = codes_of(both, more, shift, BITS)
        first, second = values_of(low, CENTER * 1.0, VALUES).to(DTYPE), values_of(up, CENTER * 1.0, VALUES).to(DTYPE)
        ones = (low.to(tl.float32) * 0.0 + 1.0).to(DTYPE)
    elif BITS == 4:
        first, second, ones = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,=r,=r,=r,=r,r", [both], types, True, 4)
    else:
        first, second, ones = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,=r,=r,=r,=r,r,r,r,r,r,r", [both, more, shift], types, True, 4
        )
    return first, second, ones


@triton.jit
def _numbers(
    codes, high, tile, lane, step, steps, column, DTYPE: tl.constexpr,
    BITS: tl.constexpr, VALUES: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, CENTER: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return the codes less CENTER, or the values, of some columns of both halves of a step, exact, and ones."""
    row = (tile * steps + step) * TILE + lane
    if BITS == 8:
        row = (tile * steps + step) * (2 * TILE) + lane
        first, ones = _of_bytes(codes, row, column, DTYPE, VALUES, HALF, CENTER, ASSEMBLY)
        second, ones = _of_bytes(codes, row + TILE, column, DTYPE, VALUES, HALF, CENTER, ASSEMBLY)
    else:
        first, second, ones = _of_nibbles(codes, high, row, column, DTYPE, BITS, VALUES, HALF, CENTER, ASSEMBLY)
    return first, second, ones


@triton.jit
def _some_rows(x, rows_at, row_inside, column, end):
    """Return some columns of x as [SUB, ROWS]; those from `end` on are zeros."""
    inside = row_inside[:, None] & (column < end)[None, :]
    return tl.trans(tl.load(x + rows_at[:, None] + column[None, :], mask=inside, other=0.0))


@triton.jit
def _add_scaled(total, part, sums, scale, offset, HAS_OFFSET: tl.constexpr):
    """Add a group's product of codes [F, ROWS] and the sums of x in each row; scale, offset: [F]."""
    total = tl.fma(part, tl.broadcast_to(scale[:, None], part.shape), total)
    if HAS_OFFSET:
        total = tl.fma(sums, tl.broadcast_to(offset[:, None], part.shape), total)
    return total


@triton.jit
def _product(weight, ones, some, part, sums, HAS_OFFSET: tl.constexpr):
    """Add the products of weight [F, SUB] and of ones with x [SUB, ROWS]."""
    part = tl.dot(weight, some, part)
    if HAS_OFFSET:
        sums = tl.dot(ones, some, sums)
    return part, sums


@triton.jit
def _add_step(
    total, x, codes, high, numbers, zeros, above, tile, lane, step, steps, span, super_span, rows_at, row_inside, end,
    BITS: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, PAIRED: tl.constexpr,
    SUPERS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, CENTER: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Add the product of a step, group by group."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    HAS_OFFSET: tl.constexpr = OFFSETS != "none" or (VALUES == "integer" and CENTER != ZERO)
    SUB: tl.constexpr = HALF if GROUPS == 1 else 2 * HALF // GROUPS
    row = (tile * tl.cdiv(steps, span) + step // span) * TILE + lane
    super_row = (tile * tl.cdiv(steps, super_span) + step // super_span) * TILE + lane
    scale, offset = scales_and_offsets(numbers, zeros, above, row, super_row, OFFSETS, PAIRED, SUPERS, GROUPS)
    if OFFSETS == "minimum":
        offset += scale * CENTER
    elif HAS_OFFSET:
        zero = offset if OFFSETS == "zero_point" else scale * 0.0 + ZERO
        offset = (CENTER - zero) * scale
    nothing = tl.zeros(total.shape, tl.float32)
    for sub in tl.static_range(HALF // SUB):
        place = sub * SUB + tl.arange(0, SUB)
        first, second, ones = _numbers(
            codes, high, tile, lane, step, steps, place, DTYPE, BITS, VALUES, HALF, TILE, CENTER, ASSEMBLY
        )
        column = step * (2 * HALF) + place
        some = _some_rows(x, rows_at, row_inside, column, end)
        more = _some_rows(x, rows_at, row_inside, column + HALF, end)
        part, sums = _product(first, ones, some, nothing, nothing, HAS_OFFSET)
        if GROUPS == 1:
            part, sums = _product(second, ones, more, part, sums, HAS_OFFSET)
        else:
            upper, others = _product(second, ones, more, nothing, nothing, HAS_OFFSET)
            scale_at, offset_at = column_of(scale, GROUPS, 2 * sub + 1), column_of(offset, GROUPS, 2 * sub + 1)
            total = _add_scaled(total, upper, others, scale_at, offset_at, HAS_OFFSET)
        scale_at, offset_at = column_of(scale, GROUPS, 2 * sub), column_of(offset, GROUPS, 2 * sub)
        total = _add_scaled(total, part, sums, scale_at, offset_at, HAS_OFFSET)
    return total


@triton.jit(do_not_specialize=["rows"])
def linear_few_rows(
    x, codes, high, numbers, zeros, above, bias, out, blocks, num_blocks,
    rows, out_features, in_features, out_stride, steps, span, super_span, part_steps,
    BITS: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, PAIRED: tl.constexpr,
    SUPERS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr,
    ROWS: tl.constexpr, CENTER: tl.constexpr, ASSEMBLY: tl.constexpr,
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
    for step in range(first_step, last_step):
        total = _add_step(
            total, x, codes, high, numbers, zeros, above, tile, lane, step, steps, span, super_span, rows_at,
            row_inside, end, BITS, VALUES, ZERO, OFFSETS, PAIRED, SUPERS, GROUPS, HALF, TILE, CENTER, ASSEMBLY,
        )  # fmt: skip

    inside = (feature < out_features)[:, None] & row_inside[None, :]
    if PARTIAL:
        out_at = out + (part * rows + row).to(tl.int64)[None, :] * out_features + feature[:, None]
    else:
        out_at = out + row.to(tl.int64)[None, :] * out_stride + feature[:, None]
        total += tl.load(added, mask=feature < out_features, other=0.0)[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)
