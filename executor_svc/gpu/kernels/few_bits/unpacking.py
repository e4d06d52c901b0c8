"""Codes of a step of a weight, from bytes to float32: four at a time by instructions of a GPU, or each for itself.

A byte becomes a float32 by one permutation of bytes: in the third byte of the bits of 128 a code of up to 7 bits is
added to it, in the second byte of the bits of 32768 one of 8. The numbers so raised are exact.
"""

from __future__ import annotations

import re

import triton
import triton.language as tl

_NIBBLES = """{
.reg .b32 low, high, more, magic;
mov.b32 magic, 0x4300;
and.b32 low, $8, 0x0F0F0F0F;
shr.u32 high, $8, 4;
and.b32 high, high, 0x0F0F0F0F;
MORE
prmt.b32 $0, low, magic, 0x5044;
prmt.b32 $1, low, magic, 0x5144;
prmt.b32 $2, low, magic, 0x5244;
prmt.b32 $3, low, magic, 0x5344;
prmt.b32 $4, high, magic, 0x5044;
prmt.b32 $5, high, magic, 0x5144;
prmt.b32 $6, high, magic, 0x5244;
prmt.b32 $7, high, magic, 0x5344;
}"""
_MORE = """shr.u32 more, $9, $10;
and.b32 magic, more, MASK;
or.b32 high, high, magic;
shl.b32 more, more, 4;
and.b32 more, more, MASK;
or.b32 low, low, more;
mov.b32 magic, 0x4300;"""
FOUR_BITS = tl.constexpr(_NIBBLES.replace("MORE", ""))
FIVE_BITS = tl.constexpr(_NIBBLES.replace("MORE", _MORE.replace("MASK", "0x10101010")))
SIX_BITS = tl.constexpr(_NIBBLES.replace("MORE", _MORE.replace("MASK", "0x30303030")))
EIGHT_BITS = tl.constexpr("""{
.reg .b32 magic;
mov.b32 magic, 0x4700;
prmt.b32 $0, $4, magic, 0x5404;
prmt.b32 $1, $4, magic, 0x5414;
prmt.b32 $2, $4, magic, 0x5424;
prmt.b32 $3, $4, magic, 0x5434;
}""")
# Sign, exponent and fraction in their places: 2 ** 120 times too small, as the biases are 7 and 127.
E4M3 = tl.constexpr("""{
.reg .b32 byte;
prmt.b32 byte, $4, 0, 0x0444;
shr.s32 byte, byte, 4;
and.b32 $0, byte, 0x87F00000;
prmt.b32 byte, $4, 0, 0x1444;
shr.s32 byte, byte, 4;
and.b32 $1, byte, 0x87F00000;
prmt.b32 byte, $4, 0, 0x2444;
shr.s32 byte, byte, 4;
and.b32 $2, byte, 0x87F00000;
prmt.b32 byte, $4, 0, 0x3444;
shr.s32 byte, byte, 4;
and.b32 $3, byte, 0x87F00000;
}""")
FROM_WORD = tl.constexpr("=r,=r,=r,=r,r")
FROM_NIBBLES = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r")
_FROM_PLANES = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r")


def with_middle_swapped(assembly: str) -> str:
    """Return the instructions for codes of four bytes with the second and the third of each four results swapped."""
    outputs = {1: 2, 2: 1, 5: 6, 6: 5}
    return re.sub(r"\$([1256])\b", lambda found: f"${outputs[int(found[1])]}", assembly)


@triton.jit
def values_of(code, zero, VALUES: tl.constexpr):
    """Return the values of codes int32 as float32, exact; zero: of integers, float32."""
    if VALUES == "integer":
        # The bits of 2 ** 23 + code.
        found = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
    elif VALUES == "e4m3":
        # As the bits of a float16 the number is 2 ** 8 times too small: the biases are 7 and 15. Codes of NaN
        # have scales of NaN.
        narrow = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        found = narrow.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:  # e2m1: the biases are 1 and 15
        narrow = ((code & 0x8) << 12) | ((code & 0x7) << 9)
        found = narrow.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return found


@triton.jit
def _side_by_side(first, second, third, fourth, HALF: tl.constexpr):
    """Return float32 [F, HALF] of the bits [F, HALF / 4] of every fourth column."""
    bits = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(bits, (first.shape[0], HALF)).to(tl.float32, bitcast=True)


@triton.jit
def _words(plane, row, COUNT: tl.constexpr, HALF: tl.constexpr):
    """Return int32 [F, HALF / 4]: COUNT bytes of each row, again and again."""
    word = tl.arange(0, HALF // 4) % (COUNT // 4)
    return tl.load(plane.to(tl.pointer_type(tl.int32)) + row[:, None] * (COUNT // 4) + word[None, :])


@triton.jit
def _of_bytes(codes, row, VALUES: tl.constexpr, HALF: tl.constexpr):
    """Return the numbers of codes of 8 bits: e4m3, or 32768 + code."""
    words = _words(codes, row, HALF, HALF)
    types: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
    if VALUES == "e4m3":
        first, second, third, fourth = tl.inline_asm_elementwise(E4M3, FROM_WORD, [words], types, True, 1)
        found = _side_by_side(first, second, third, fourth, HALF) * 1329227995784915872903807060280344576.0  # 2 ** 120
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(EIGHT_BITS, FROM_WORD, [words], types, True, 1)
        found = _side_by_side(first, second, third, fourth, HALF)
    return found


@triton.jit
def _of_nibbles(codes, high, row, BITS: tl.constexpr, HALF: tl.constexpr):
    """Return 128 + code for the codes in the low and in the high halves of bytes."""
    words = _words(codes, row, HALF, HALF)
    types: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32)
    if BITS == 4:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(FOUR_BITS, FROM_NIBBLES, [words], types, True, 1)
    else:
        count: tl.constexpr = 2 * HALF * (BITS - 4) // 8
        more = _words(high, row, count, HALF)
        shift = (tl.arange(0, HALF // 4) // (count // 4) * (BITS - 4))[None, :]
        asm: tl.constexpr = FIVE_BITS if BITS == 5 else SIX_BITS
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(asm, _FROM_PLANES, [words, more, shift], types, True, 1)
    return _side_by_side(a, b, c, d, HALF), _side_by_side(e, f, g, h, HALF)


@triton.jit
def codes_of(both, bits, shift, BITS: tl.constexpr):
    """Return the codes int32 in the low and in the high halves of bytes; bits: of the high plane, to be shifted."""
    first, second = both.to(tl.int32) & 0xF, both.to(tl.int32) >> 4
    if BITS != 4:
        mask: tl.constexpr = (1 << (BITS - 4)) - 1
        more = bits.to(tl.int32) >> shift
        first, second = first | (more & mask) << 4, second | (more >> 4 & mask) << 4
    return first, second


@triton.jit
def _one_by_one(
    codes, high, row, BITS: tl.constexpr, VALUES: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Return the numbers of codes of less than 8 bits, without instructions of a GPU."""
    column = tl.arange(0, HALF)[None, :]
    both = tl.load(codes + row[:, None] * HALF + column)
    bits, shift = both, column
    if BITS != 4:
        count: tl.constexpr = 2 * HALF * (BITS - 4) // 8
        bits = tl.load(high + row[:, None] * count + column % count)
        shift = column // count * (BITS - 4)
    first, second = codes_of(both, bits, shift, BITS)
    return values_of(first, -128.0, VALUES), values_of(second, -128.0, VALUES)


@triton.jit
def unpacked(
    codes, high, tile, lane, step, steps,
    BITS: tl.constexpr, VALUES: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return [F, HALF] float32 for both halves of a step: values, or codes raised by 128, those of 8 bits by 32768."""
    row = (tile * steps + step) * TILE + lane
    if BITS == 8:
        row = (tile * steps + step) * (2 * TILE) + lane
        if PACKED:
            first, second = _of_bytes(codes, row, VALUES, HALF), _of_bytes(codes, row + TILE, VALUES, HALF)
        else:
            at = codes + row[:, None] * HALF + tl.arange(0, HALF)[None, :]
            first = values_of(tl.load(at).to(tl.int32), -32768.0, VALUES)
            second = values_of(tl.load(at + TILE * HALF).to(tl.int32), -32768.0, VALUES)
    elif PACKED and VALUES == "integer":
        first, second = _of_nibbles(codes, high, row, BITS, HALF)
    else:
        first, second = _one_by_one(codes, high, row, BITS, VALUES, HALF)
    return first, second
