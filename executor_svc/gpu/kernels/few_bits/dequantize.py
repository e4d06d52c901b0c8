"""Reads a tile of a weight in few bits as float32: the numbers of `device.dequantize`, each operation rounded alike."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from executor_svc.device.stored_linear import QuantFormat
from executor_svc.gpu.kernels.few_bits.packed import granule

_VALUES = {"integer": 0, "e2m1": 1, "e4m3": 2}
_E2M1, _E4M3 = (tl.constexpr(_VALUES[name]) for name in ("e2m1", "e4m3"))


def constants(kind: QuantFormat, columns: int, inner: int) -> dict[str, Any]:
    """Return the constants of `dequantized` for tiles of `inner` columns of a weight of so many columns."""
    return {
        "BITS": kind.bits,
        "VALUES": _VALUES[kind.values],
        "ZERO": kind.zero,
        "EXPONENTS": kind.scale == "e8m0",
        "GRANULE": granule(kind, columns, inner),
        "INNER": inner,
    }


@triton.jit
def dequantized(
    codes,
    high,
    scales,
    super_scales,
    minimums,
    super_minimums,
    zero_points,
    columns,
    group,
    super_group,
    row,
    start,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    ZERO: tl.constexpr,
    EXPONENTS: tl.constexpr,
    GRANULE: tl.constexpr,
    INNER: tl.constexpr,
):
    """Return float32 [R, INNER]: columns start to start + INNER, a multiple of INNER, of rows [R] int64.

    Columns beyond the last have any finite numbers.
    """
    code = _codes(codes, high, columns, row, start, BITS, INNER)
    grouped: tl.constexpr = (row.shape[0], INNER // GRANULE, GRANULE)
    code = tl.reshape(code, grouped)
    if VALUES == _E2M1:
        value = _e2m1(code)
    elif VALUES == _E4M3:
        value = _e4m3(code)
    elif zero_points is not None:
        zeros = _of_groups(zero_points, None, columns, group, super_group, row, start, False, GRANULE, INNER)
        value = code.to(tl.float32) - zeros[:, :, None]
    else:
        value = (code - ZERO).to(tl.float32)
    scale = _of_groups(scales, super_scales, columns, group, super_group, row, start, EXPONENTS, GRANULE, INNER)
    value = value * scale[:, :, None]
    if minimums is not None:
        minimum = _of_groups(minimums, super_minimums, columns, group, super_group, row, start, False, GRANULE, INNER)
        value = value + minimum[:, :, None]
    return tl.reshape(value, (row.shape[0], INNER))


@triton.jit
def _codes(codes, high, columns, row, start, BITS: tl.constexpr, INNER: tl.constexpr):
    """Return int32 [R, INNER]."""
    at = start + tl.arange(0, INNER)
    inside = (at < columns)[None, :]
    if BITS == 8:
        code = tl.load(codes + row[:, None] * columns + at[None, :], mask=inside, other=0).to(tl.int32)
    else:
        half = start // 2 + tl.arange(0, INNER // 2)
        pair_at = codes + row[:, None] * (columns // 2) + half[None, :]
        pair = tl.load(pair_at, mask=(half < columns // 2)[None, :], other=0)
        code = tl.reshape(tl.join(pair & 15, pair >> 4), (row.shape[0], INNER)).to(tl.int32)
    if BITS == 5 or BITS == 6:
        width: tl.constexpr = BITS - 4
        count: tl.constexpr = 8 // width
        high_at = high + row[:, None] * (columns // count) + (at // count)[None, :]
        byte = tl.load(high_at, mask=inside, other=0).to(tl.int32)
        code |= (byte >> (at % count * width)[None, :] & (2**width - 1)) << 4
    return code


@triton.jit
def _of_groups(
    numbers,
    above,
    columns,
    group,
    super_group,
    row,
    start,
    EXPONENTS: tl.constexpr,
    GRANULE: tl.constexpr,
    INNER: tl.constexpr,
):
    """Return float32 [R, INNER / GRANULE]: the number of each granule's group, times that of its super group if any.

    EXPONENTS: numbers are powers of two, by their exponents with bias 127.
    """
    at = start + tl.arange(0, INNER // GRANULE) * GRANULE
    inside = (at < columns)[None, :]
    number_at = numbers + row[:, None] * (columns // group) + (at // group)[None, :]
    if EXPONENTS:
        exponent = tl.load(number_at, mask=inside, other=0).to(tl.int32)
        return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    number = tl.load(number_at, mask=inside, other=0).to(tl.float32)
    if above is not None:
        above_at = above + row[:, None] * (columns // super_group) + (at // super_group)[None, :]
        number *= tl.load(above_at, mask=inside, other=0).to(tl.float32)
    return number


@triton.jit
def _e2m1(code):
    """Return the number of four bits: a sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = tl.where(exponent == 0, mantissa * 2, (2 + mantissa) << exponent).to(tl.float32) * 0.25
    return tl.where(code >= 8, -size, size)


@triton.jit
def _e4m3(code):
    """Return the number of eight bits: those of a float16 whose exponent is 8 less; NaN for both codes of NaN."""
    bits = tl.where((code & 0x7F) == 0x7F, 0x7E00, (code & 0x80) << 8 | (code & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
