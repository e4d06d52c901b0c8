"""PTX that makes 16-bit numbers of four codes at a time, for `few_rows`.

Below the byte 0x43 a code of up to 7 bits is the bfloat16 128 + code, below 0x64 one of up to 8 bits the float16
1024 + code. A permutation of bytes makes two of them, and one instruction takes 128 or 1024, and the center, away.
Nothing is rounded.
"""

from __future__ import annotations

import struct

from executor_svc.device.stored_linear import QuantFormat

_NIBBLES = """{{
.reg .b32 low, high, more, up, magic, one, back, some;
mov.b32 magic, {magic};
mov.b32 one, {one};
mov.b32 back, {back};
and.b32 low, $6, 0x0F0F0F0F;
shr.u32 high, $6, 4;
and.b32 high, high, 0x0F0F0F0F;
{more}
prmt.b32 some, low, magic, 0x4140;
fma.rn.{type}x2 $0, some, one, back;
prmt.b32 some, low, magic, 0x4342;
fma.rn.{type}x2 $1, some, one, back;
prmt.b32 some, high, magic, 0x4140;
fma.rn.{type}x2 $2, some, one, back;
prmt.b32 some, high, magic, 0x4342;
fma.rn.{type}x2 $3, some, one, back;
mov.b32 $4, one;
mov.b32 $5, one;
}}"""
_MORE = """shr.u32 more, $7, $8;
and.b32 up, more, {mask};
or.b32 high, high, up;
shl.b32 more, more, 4;
and.b32 more, more, {mask};
or.b32 low, low, more;"""
# The lower 7 bits and 128, less 128, or 256 where the highest bit is not set.
_BYTES_BFLOAT16 = """{
.reg .b32 low, high, magic, minus, some, more;
mov.b32 magic, 0x43;
mov.b32 minus, 0xBF80BF80;
and.b32 low, $4, 0x7F7F7F7F;
not.b32 high, $4;
and.b32 high, high, 0x80808080;
prmt.b32 some, low, magic, 0x4140;
prmt.b32 more, high, magic, 0x4140;
fma.rn.bf16x2 $0, more, minus, some;
prmt.b32 some, low, magic, 0x4342;
prmt.b32 more, high, magic, 0x4342;
fma.rn.bf16x2 $1, more, minus, some;
mov.b32 $2, 0x3F803F80;
mov.b32 $3, 0x3F803F80;
}"""
_BYTES_FLOAT16 = """{
.reg .b32 magic, one, back, some;
mov.b32 magic, 0x64;
mov.b32 one, 0x3C003C00;
mov.b32 back, 0xE480E480;
prmt.b32 some, $4, magic, 0x4140;
fma.rn.f16x2 $0, some, one, back;
prmt.b32 some, $4, magic, 0x4342;
fma.rn.f16x2 $1, some, one, back;
mov.b32 $2, one;
mov.b32 $3, one;
}"""
# Sign, exponent and fraction in their places, times what the biases differ by.
_E4M3 = """{{
.reg .b32 factor, zero, some, sign;
mov.b32 factor, {factor};
mov.b32 zero, 0x80008000;
prmt.b32 some, $4, 0, 0x1404;
and.b32 sign, some, 0x80008000;
shr.u32 some, some, {shift};
and.b32 some, some, {mask};
or.b32 some, some, sign;
fma.rn.{type}x2 $0, some, factor, zero;
prmt.b32 some, $4, 0, 0x3424;
and.b32 sign, some, 0x80008000;
shr.u32 some, some, {shift};
and.b32 some, some, {mask};
or.b32 some, some, sign;
fma.rn.{type}x2 $1, some, factor, zero;
mov.b32 $2, {one};
mov.b32 $3, {one};
}}"""


def center_of(kind: QuantFormat) -> int:
    """Return what the numbers of codes are less: a constant zero point, or 128 of 8 bits."""
    if kind.values != "integer":
        return 0
    return 128 if kind.bits == 8 else kind.zero if kind.offsets == "none" else 0


def assembly_of(kind: QuantFormat, is_bfloat16: bool) -> str:
    """Return the instructions for four codes of a format, numbers in bfloat16 or float16; "" if there are none."""
    name, one = ("bf16", "0x3F803F80") if is_bfloat16 else ("f16", "0x3C003C00")
    if kind.values == "e4m3":
        shift, mask, factor = (4, "0x07F007F0", "0x7B807B80") if is_bfloat16 else (1, "0x3F803F80", "0x5C005C00")
        return _E4M3.format(type=name, shift=shift, mask=mask, factor=factor, one=one)
    if kind.values != "integer":
        return ""
    if kind.bits == 8:
        return _BYTES_BFLOAT16 if is_bfloat16 else _BYTES_FLOAT16
    masks = {4: "", 5: "0x10101010", 6: "0x30303030"}
    more = _MORE.format(mask=masks[kind.bits]) if masks[kind.bits] else ""
    magic, raised = (0x43, 128) if is_bfloat16 else (0x64, 1024)
    back = _bits(-float(raised + center_of(kind)), is_bfloat16)
    return _NIBBLES.format(type=name, magic=hex(magic), one=one, back=hex(back << 16 | back), more=more)


def _bits(number: float, is_bfloat16: bool) -> int:
    """Return the bits of a number that 16 bits hold exactly."""
    if is_bfloat16:
        return int(struct.unpack("<I", struct.pack("<f", number))[0]) >> 16
    return int(struct.unpack("<H", struct.pack("<e", number))[0])
