"""From codes in few bits to numbers, in registers: each operation of `device.dequantize`, rounded to float32."""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.few_bits.unpacking import unpacked


@triton.jit
def floats_of(stored):
    """Return scales or minimums as float32; uint8: exponents with bias 127."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.int32)
        found = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
    else:
        found = stored.to(tl.float32)
    return found


@triton.jit
def _parts_of(word, dtype: tl.constexpr):
    """Return the numbers [F, 2] of 16 bits, or [F, 4] of 8, in words [F] uint32."""
    if dtype.primitive_bitwidth == 16:
        found = tl.join(word & 0xFFFF, word >> 16).to(tl.uint16).to(dtype, bitcast=True)
    else:
        even, odd = tl.join(word & 0xFF, word >> 16 & 0xFF), tl.join(word >> 8 & 0xFF, word >> 24)
        found = tl.reshape(tl.join(even, odd), (word.shape[0], 4)).to(tl.uint8).to(dtype, bitcast=True)
    return found


@triton.jit
def _load(at, row, COUNT: tl.constexpr, WORDS: tl.constexpr):
    """Return the numbers of rows [F] of a plane: [F], or [F, COUNT].

    WORDS: 4 bytes of a row are loaded as one number, which can be copied to shared memory ahead of its use, however
    many threads share the rows.
    """
    if COUNT == 1:
        found = tl.load(at + row)
    elif WORDS and COUNT * at.dtype.element_ty.primitive_bitwidth == 32:
        found = _parts_of(tl.load(at.to(tl.pointer_type(tl.uint32)) + row), at.dtype.element_ty)
    else:
        found = tl.load(at + row[:, None] * COUNT + tl.arange(0, COUNT)[None, :])
    return found


@triton.jit
def pair(numbers, COUNT: tl.constexpr):
    """Return the even and the odd columns of numbers [F, COUNT]: [F, COUNT / 2], or [F] each."""
    if COUNT == 2:
        even, odd = tl.split(numbers)
    else:
        even, odd = tl.split(tl.reshape(numbers, (numbers.shape[0], COUNT // 2, 2)))
    return even, odd


@triton.jit
def column_of(numbers, COUNT: tl.constexpr, INDEX: tl.constexpr):
    """Return column INDEX of numbers [F, COUNT], COUNT up to 8, or of [F] where COUNT is 1."""
    found = numbers
    if COUNT == 2:
        even, odd = pair(numbers, 2)
        found = odd if INDEX % 2 else even
    elif COUNT > 2:
        even, odd = pair(numbers, COUNT)
        found = column_of(odd if INDEX % 2 else even, COUNT // 2, INDEX // 2)
    return found


@triton.jit
def _choose(first, second, SIZE: tl.constexpr, HALF: tl.constexpr):
    """Return [F, HALF]: `first` in SIZE columns, then `second`."""
    return tl.where(tl.arange(0, HALF)[None, :] < SIZE, first[:, None], second[:, None])


@triton.jit
def _spread(numbers, COUNT: tl.constexpr, HALF: tl.constexpr):
    """Return [F, HALF], or [F, 1], of the numbers [F, COUNT] of a half's groups."""
    if COUNT == 1:
        wide = numbers[:, None]
    elif COUNT == 2:
        first, second = pair(numbers, 2)
        wide = _choose(first, second, HALF // 2, HALF)
    else:
        even, odd = pair(numbers, 4)
        first, third = pair(even, 2)
        second, fourth = pair(odd, 2)
        lower = _choose(first, second, HALF // 4, HALF)
        upper = _choose(third, fourth, 3 * HALF // 4, HALF)
        wide = tl.where(tl.arange(0, HALF)[None, :] < HALF // 2, lower, upper)
    return wide


@triton.jit
def _spread_halves(numbers, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """Return the numbers [F, GROUPS] of a step as [F, HALF], or [F, 1], for each of its halves."""
    if GROUPS == 1:
        first = numbers[:, None]
        second = first
    else:
        even, odd = pair(numbers, GROUPS)
        first, second = _spread(even, GROUPS // 2, HALF), _spread(odd, GROUPS // 2, HALF)
    return first, second


@triton.jit
def _scaled(numbers, above, GROUPS: tl.constexpr):
    """Return sub scales [F, GROUPS] times super scales [F]."""
    if GROUPS == 1:
        found = numbers * above
    else:
        found = numbers * above[:, None]
    return found


@triton.jit
def scales_and_offsets(
    numbers, zeros, above, row, super_row,
    OFFSETS: tl.constexpr, PAIRED: tl.constexpr, SUPERS: tl.constexpr, GROUPS: tl.constexpr,
    WORDS: tl.constexpr = False,
):  # fmt: skip
    """Return scales and offsets of a step, [F, GROUPS] float32; without offsets, the scales twice.

    WORDS: as of `_load`.
    """
    if PAIRED:
        stored, beside = pair(_load(numbers, row, 2 * GROUPS, WORDS), 2 * GROUPS)
        scale, offset = floats_of(stored), floats_of(beside)
    else:
        scale = floats_of(_load(numbers, row, GROUPS, WORDS))
        offset = scale
        if OFFSETS == "zero_point":
            offset = _load(zeros, row, GROUPS, WORDS).to(tl.float32)
    if SUPERS and PAIRED:
        super_scale, super_offset = pair(_load(above, super_row, 2, WORDS), 2)
        scale = _scaled(scale, floats_of(super_scale), GROUPS)
        offset = _scaled(offset, floats_of(super_offset), GROUPS)
    elif SUPERS:
        scale = _scaled(scale, _load(above, super_row, 1, WORDS), GROUPS)
    return scale, offset


@triton.jit
def numbers_of(raised, scale, offset, VALUES: tl.constexpr, OFFSETS: tl.constexpr, MAGIC: tl.constexpr):
    """Return the numbers [F, HALF] of codes that were raised by MAGIC; `offset` as of `moved`."""
    if VALUES != "integer":
        found = raised * scale
    elif OFFSETS == "minimum":
        found = tl.fma(raised - MAGIC, scale, offset)
    elif MAGIC == 128:
        # Scales have 17 bits at most, codes and zero points 7, so nothing is rounded but the sum.
        found = tl.fma(raised, scale, offset)
    else:
        found = (raised - offset) * scale
    return found


@triton.jit
def moved(scale, offset, ZERO: tl.constexpr, OFFSETS: tl.constexpr, MAGIC: tl.constexpr):
    """Return the offsets of groups as `numbers_of` needs them."""
    if OFFSETS == "minimum":
        found = offset
    else:
        zero = offset if OFFSETS == "zero_point" else scale * 0.0 + ZERO
        found = -(MAGIC + zero) * scale if MAGIC == 128 else MAGIC + zero
    return found


@triton.jit
def weight_of_step(
    codes, high, numbers, zeros, above, tile, lane, step, steps, span, super_span,
    BITS: tl.constexpr, VALUES: tl.constexpr, ZERO: tl.constexpr, OFFSETS: tl.constexpr, PAIRED: tl.constexpr,
    SUPERS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return the numbers [F, HALF] float32 of both halves of a step.

    Planes as in `layout`; tile, lane: [F], the places of the weight's rows in them. PACKED: four codes at a time, by
    instructions of a GPU.
    """
    MAGIC: tl.constexpr = 32768 if BITS == 8 else 128
    first, second = unpacked(codes, high, tile, lane, step, steps, BITS, VALUES, HALF, TILE, PACKED)
    row = (tile * tl.cdiv(steps, span) + step // span) * TILE + lane
    super_row = (tile * tl.cdiv(steps, super_span) + step // super_span) * TILE + lane
    scale, offset = scales_and_offsets(numbers, zeros, above, row, super_row, OFFSETS, PAIRED, SUPERS, GROUPS)
    offset = moved(scale, offset, ZERO, OFFSETS, MAGIC)
    first_scale, second_scale = _spread_halves(scale, GROUPS, HALF)
    first_offset, second_offset = _spread_halves(offset, GROUPS, HALF)
    first = numbers_of(first, first_scale, first_offset, VALUES, OFFSETS, MAGIC)
    second = numbers_of(second, second_scale, second_offset, VALUES, OFFSETS, MAGIC)
    return first, second
