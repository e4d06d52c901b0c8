"""A step of a weight in 16 bits, unpacked where it is multiplied: no number changes its thread.

All is element by element, with constants and loads alone at its ends: then Triton loads bytes in the order in which
tensor cores read the left side of a product from registers. Columns are in pieces that share a scale, as choosing
scales by column would not be of that kind.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.few_bits.numbers import column_of, moved, numbers_of, scales_and_offsets
from executor_svc.gpu.kernels.few_bits.unpacking import (
    E4M3,
    EIGHT_BITS,
    FIVE_BITS,
    FOUR_BITS,
    FROM_NIBBLES,
    FROM_WORD,
    SIX_BITS,
    codes_of,
    values_of,
    with_middle_swapped,
)

# Of two numbers of 16 bits in a word: first bytes before second ones, as results of one kind stand together.
_FOUR, _FIVE, _SIX = (tl.constexpr(with_middle_swapped(asm.value)) for asm in (FOUR_BITS, FIVE_BITS, SIX_BITS))
_EIGHT, _FLOAT = (tl.constexpr(with_middle_swapped(asm.value)) for asm in (EIGHT_BITS, E4M3))
_FROM_SHIFTS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")
_TWO = tl.constexpr((tl.int32, tl.int32))
_FOUR_TYPES = tl.constexpr((tl.int32, tl.int32, tl.int32, tl.int32))


@triton.jit
def _columns(even, odd):
    """Return [F, 2 N] of every second column: [F, N] each."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def _bytes_of(plane, row, first: tl.constexpr, SUB: tl.constexpr, COUNT: tl.constexpr):
    """Return uint16 [F, SUB / 2]: the bytes of rows from `first` on, of COUNT; two are adjacent in a thread anyway."""
    place = first // 2 + tl.arange(0, SUB // 2)
    return tl.load(plane.to(tl.pointer_type(tl.uint16)) + row[:, None] * (COUNT // 2) + place[None, :])


@triton.jit
def _of_bytes(codes, row, FIRST: tl.constexpr, SUB: tl.constexpr, VALUES: tl.constexpr, HALF: tl.constexpr,
              PACKED: tl.constexpr):  # fmt: skip
    """Return the numbers [F, SUB] of codes of 8 bits: e4m3, or 32768 + code."""
    stored = _bytes_of(codes, row, FIRST, SUB, HALF)
    if PACKED:
        asm: tl.constexpr = _FLOAT if VALUES == "e4m3" else _EIGHT
        even, odd = tl.inline_asm_elementwise(asm, FROM_WORD, [stored], _TWO, True, 2)
        found = _columns(even, odd).to(tl.float32, bitcast=True)
        if VALUES == "e4m3":
            found *= 1329227995784915872903807060280344576.0  # 2 ** 120
    else:
        even, odd = stored.to(tl.int32) & 0xFF, stored.to(tl.int32) >> 8
        found = values_of(_columns(even, odd), -32768.0, VALUES)
    return found


@triton.jit
def _of_nibbles(
    codes, high, row, FIRST: tl.constexpr, SUB: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr,
    HALF: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return 128 + code, or values, [F, SUB] for the codes in the low and in the high halves of bytes."""
    both = _bytes_of(codes, row, FIRST, SUB, HALF)
    more, shift = both, tl.full(both.shape, 0, tl.int32)
    if BITS != 4:
        count: tl.constexpr = 2 * HALF * (BITS - 4) // 8
        more = _bytes_of(high, row, FIRST % count, SUB, count)
        shift = tl.full(both.shape, FIRST // count * (BITS - 4), tl.int32)
    if PACKED and VALUES == "integer":
        if BITS == 4:
            a, b, c, d = tl.inline_asm_elementwise(_FOUR, FROM_NIBBLES, [both], _FOUR_TYPES, True, 2)
        else:
            asm: tl.constexpr = _FIVE if BITS == 5 else _SIX
            a, b, c, d = tl.inline_asm_elementwise(asm, _FROM_SHIFTS, [both, more, shift], _FOUR_TYPES, True, 2)
        first, second = _columns(a, b).to(tl.float32, bitcast=True), _columns(c, d).to(tl.float32, bitcast=True)
    else:
        a, c = codes_of(both & 0xFF, more & 0xFF, shift, BITS)
        b, d = codes_of(both >> 8, more >> 8, shift, BITS)
        first, second = values_of(_columns(a, b), -128.0, VALUES), values_of(_columns(c, d), -128.0, VALUES)
    return first, second


@triton.jit
def _piece(
    codes, high, tile, lane, step, steps, scale, offset, FIRST: tl.constexpr, SUB: tl.constexpr, DTYPE: tl.constexpr,
    BITS: tl.constexpr, VALUES: tl.constexpr, OFFSETS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
    TILE: tl.constexpr, MAGIC: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return the numbers [F, SUB] of the columns from FIRST on of both halves."""
    row = (tile * steps + step) * TILE + lane
    if BITS == 8:
        row = (tile * steps + step) * (2 * TILE) + lane
        first = _of_bytes(codes, row, FIRST, SUB, VALUES, HALF, PACKED)
        second = _of_bytes(codes, row + TILE, FIRST, SUB, VALUES, HALF, PACKED)
    else:
        first, second = _of_nibbles(codes, high, row, FIRST, SUB, BITS, VALUES, HALF, PACKED)
    group: tl.constexpr = 0 if GROUPS == 1 else FIRST * GROUPS // (2 * HALF) * 2
    other: tl.constexpr = 0 if GROUPS == 1 else group + 1
    scale_at, offset_at = column_of(scale, GROUPS, group), column_of(offset, GROUPS, group)
    first = numbers_of(first, scale_at[:, None], offset_at[:, None], VALUES, OFFSETS, MAGIC).to(DTYPE)
    scale_at, offset_at = column_of(scale, GROUPS, other), column_of(offset, GROUPS, other)
    second = numbers_of(second, scale_at[:, None], offset_at[:, None], VALUES, OFFSETS, MAGIC).to(DTYPE)
    return first, second


@triton.jit
def _beside(left, right):
    """Return [F, 2 N] of two [F, N]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def _some_pieces(
    codes, high, tile, lane, step, steps, scale, offset, FIRST: tl.constexpr, SIZE: tl.constexpr, SUB: tl.constexpr,
    DTYPE: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr, OFFSETS: tl.constexpr, GROUPS: tl.constexpr,
    HALF: tl.constexpr, TILE: tl.constexpr, MAGIC: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return the numbers [F, SIZE] of the columns from FIRST on of both halves, of pieces of SUB columns."""
    if SIZE == SUB:
        first, second = _piece(
            codes, high, tile, lane, step, steps, scale, offset, FIRST, SUB, DTYPE,
            BITS, VALUES, OFFSETS, GROUPS, HALF, TILE, MAGIC, PACKED,
        )  # fmt: skip
    else:
        first, second = _some_pieces(
            codes, high, tile, lane, step, steps, scale, offset, FIRST, SIZE // 2, SUB, DTYPE,
            BITS, VALUES, OFFSETS, GROUPS, HALF, TILE, MAGIC, PACKED,
        )  # fmt: skip
        more, others = _some_pieces(
            codes, high, tile, lane, step, steps, scale, offset, FIRST + SIZE // 2, SIZE // 2, SUB, DTYPE,
            BITS, VALUES, OFFSETS, GROUPS, HALF, TILE, MAGIC, PACKED,
        )  # fmt: skip
        first, second = _beside(first, more), _beside(second, others)
    return first, second


@triton.jit
def step_in_place(
    codes, high, numbers, zeros, above, tile, lane, step, steps, span, super_span, DTYPE: tl.constexpr,
    BITS: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, PAIRED: tl.constexpr,
    SUPERS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return the numbers [F, 2 HALF] of a step, rounded to DTYPE; arguments as of `numbers.weight_of_step`."""
    MAGIC: tl.constexpr = 32768 if BITS == 8 else 128
    # Of a piece: with the same scale, and the same place in the bytes of the high plane.
    OF_GROUP: tl.constexpr = HALF if GROUPS == 1 else 2 * HALF // GROUPS
    OF_HIGH: tl.constexpr = 2 * HALF * (BITS - 4) // 8 if BITS == 5 or BITS == 6 else HALF
    SUB: tl.constexpr = min(OF_GROUP, OF_HIGH)
    row = (tile * tl.cdiv(steps, span) + step // span) * TILE + lane
    super_row = (tile * tl.cdiv(steps, super_span) + step // super_span) * TILE + lane
    scale, offset = scales_and_offsets(numbers, zeros, above, row, super_row, OFFSETS, PAIRED, SUPERS, GROUPS, PACKED)
    offset = moved(scale, offset, ZERO, OFFSETS, MAGIC)
    first, second = _some_pieces(
        codes, high, tile, lane, step, steps, scale, offset, 0, HALF, SUB, DTYPE,
        BITS, VALUES, OFFSETS, GROUPS, HALF, TILE, MAGIC, PACKED,
    )  # fmt: skip
    return _beside(first, second)
