"""Models of processors' instructions in numpy, to the bit but for the payload of NaN. For tests only.

From Intel's manual, volume 2: VFMADD231PS, VDPBF16PS and TDPBF16PS, VPDPBUSD, TDPBSSD and
TDPBSUD. bfloat16 numbers are given as 16-bit integers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Wide = NDArray[np.float64]
Bits = NDArray[np.uint16]
Integers = NDArray[np.int32]
SignedBytes = NDArray[np.int8]
AnyBytes = NDArray[np.int8] | NDArray[np.uint8]

_LEAST_NORMAL = 2.0**-126
_FAR = 2.0**64
"""A factor that takes every subnormal number to a normal one."""


def same(left: Floats, right: Floats) -> bool:
    """Compare to the bit; NaN equals NaN."""
    equal = left.view(np.uint32) == right.view(np.uint32)
    return left.shape == right.shape and bool((equal | (np.isnan(left) & np.isnan(right))).all())


def widened(bits: Bits) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(numbers: Floats) -> Bits:
    """Round to nearest even; no NaN."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@np.errstate(all="ignore")
def fused(left: Floats, right: Floats, addend: Floats) -> Floats:
    """VFMADD: left * right + addend, rounded once, to nearest even."""
    return _rounded_sum(left.astype(np.float64) * right, addend.astype(np.float64), flush=False)


@np.errstate(all="ignore")
def dot_pairs(total: Floats, left: Bits, right: Bits) -> Floats:
    """VDPBF16PS of total [..., n] and pairs [..., 2 n]: two fused steps, the pair's second number first.

    Subnormal inputs and results are 0 of their sign.
    """
    first, second = (_flushed(widened(each)).astype(np.float64) for each in (left, right))
    total = _flushed(total)
    for place in (1, 0):
        total = _fused_step(total, first[..., place::2] * second[..., place::2])
    return total


@np.errstate(all="ignore")
def tile_product(total: Floats, left: Bits, right: Bits) -> Floats:
    """TDPBF16PS of total [m, n], left [m, 2 k] and right [k, 2 n]; subnormal numbers as in `dot_pairs`.

    The products of even places are summed from 0 by fused steps, k ascending, and so are those of odd places. Both
    sums are added, and this to the total; each addition is rounded.
    """
    rows, pairs = left.shape[0], right.shape[0]
    factors = _flushed(widened(left)).astype(np.float64).reshape(rows, pairs, 1, 2)
    products = factors * _flushed(widened(right)).astype(np.float64).reshape(1, pairs, -1, 2)
    sums = np.zeros(products[:, 0].shape, np.float32)
    for pair in range(pairs):
        sums = _fused_step(sums, products[:, pair])
    return _fused_step(_flushed(total), _fused_step(sums[..., 0], sums[..., 1].astype(np.float64)).astype(np.float64))


def dot_bytes(total: Integers, left: NDArray[np.uint8], right: SignedBytes) -> Integers:
    """VPDPBUSD of total [..., n] and bytes [..., 4 n]: four products are added, modulo 2^32."""
    products = left.astype(np.int64) * right
    sums: Integers = (total + products.reshape(*total.shape, 4).sum(-1)).astype(np.int32)
    return sums


def tile_byte_product(total: Integers, left: SignedBytes, right: AnyBytes) -> Integers:
    """TDPBSSD, or TDPBSUD of unsigned bytes: total [m, n], left [m, 4 k] and right [k, 4 n], modulo 2^32."""
    rows, words = left.shape[0], right.shape[0]
    factors = right.astype(np.int64).reshape(words, -1, 4)
    products = np.einsum("mkb,knb->mn", left.astype(np.int64).reshape(rows, words, 4), factors)
    sums: Integers = (total + products).astype(np.int32)
    return sums


def _fused_step(total: Floats, product: Wide) -> Floats:
    return _rounded_sum(product, total.astype(np.float64), flush=True)


def _flushed(numbers: Floats) -> Floats:
    return np.where(np.abs(numbers) < np.float32(_LEAST_NORMAL), np.copysign(np.float32(0), numbers), numbers)


def _rounded_sum(left: Wide, right: Wide, flush: bool) -> Floats:
    """Return the sum of floats64 rounded to floats once.

    The sum in float64 is corrected to the odd one of its two neighbors where it is not exact (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums", 2008), so that the second rounding sees on which side it lies.
    """
    total = left + right
    back = total - left
    error = (left - (total - back)) + (right - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    total = np.where(inexact, np.where((error > 0) == (total > 0), bits + 1, bits - 1), bits).view(np.float64)
    rounded = total.astype(np.float32)
    if not flush:
        return rounded
    # A result is subnormal if it still is after rounding to 24 bits with an exponent without a limit.
    subnormal = np.abs((total * _FAR).astype(np.float32)) < np.float32(_LEAST_NORMAL * _FAR)
    return np.where(subnormal, np.copysign(np.float32(0), rounded), rounded)
