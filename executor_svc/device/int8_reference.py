"""Products of weights in few bits with int8 activations, in numpy: the bits that every kernel has.

A row of x is cut into steps of 32 columns (one step, if its checkpoint wants a single scale per row). For each step, in
float32, every operation rounded:

    a = amax / 127, amax = max |x|          inverse = 127 / amax, 0 where that is not finite
    xq[k] = x[k] * inverse, to the nearest integer, ties to even; 0 where that is NaN

A NaN makes amax NaN, and an infinity makes it infinite: the whole result of the row is NaN then. An element of the
result is t after all scale groups g of the weight's row and their steps, ascending, from 0:

    t = fma(scale[g] * a, float(P), t)              P = sum of (value(code[k]) * xq[k]), an exact integer
    t = fma(minimum[g], a * float(S), t)            S = sum of xq[k]; for formats with minimums

e2m1 values are doubled to be integers, and their scales halved.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.device.dequantize import code_values, minimums_of, scales_of
from executor_svc.device.stored_linear import QuantBlock, QuantFormat

Floats = NDArray[np.float32]
Integers = NDArray[np.float64]
"""Integers as float64, whose sums and products here are exact."""

STEP = 32
"""Columns of a row of x that share a scale."""
MOST = 127


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows of x as integers."""

    numbers: Integers
    """[T, K], from -127 to 127."""
    scales: Floats
    """[T, K / 32 rounded up], or [T, 1]."""
    step: int
    """Columns that share a scale."""


@np.errstate(all="ignore")
def quantize_rows(x: Floats, whole_row: bool = False) -> Int8Rows:
    """Quantize rows [T, K]; the last step of a row may be shorter."""
    num_rows, width = x.shape
    step = width if whole_row else STEP
    steps = np.pad(x, ((0, 0), (0, -width % step))).reshape(num_rows, -1, step)
    highest = np.abs(steps).max(axis=2)
    inverse = np.float32(MOST) / highest
    inverse = np.where(np.isfinite(inverse), inverse, np.float32(0))
    scaled = np.rint(steps * inverse[:, :, None])
    numbers = np.where(np.isnan(scaled), np.float32(0), scaled).astype(np.float64)
    return Int8Rows(numbers.reshape(num_rows, -1)[:, :width], highest / np.float32(MOST), step)


@np.errstate(all="ignore")
def product(x: Int8Rows, block: QuantBlock, kind: QuantFormat) -> Floats:
    """Return float32 [T, R]: each row of x times each row of the block, before bias and rounding to the model's dtype.

    Raises ValueError for e4m3 values, which are no integers.
    """
    codes, scales = integer_values(block, kind)
    minimums = minimums_of(block, kind)
    least = None if minimums is None else minimums.numpy()
    width = codes.shape[1]
    total = np.zeros((len(x.numbers), len(codes)), np.float32)
    for first, last in _pieces(width, kind.group, x.step):
        group, a = first // kind.group, x.scales[:, first // x.step, None]
        numbers = x.numbers[:, first:last]
        sums = (numbers @ codes[:, first:last].T).astype(np.float32)  # float64 is exact here
        total = fused(scales[None, :, group] * a, sums, total)
        if least is not None:
            total = fused(least[None, :, group], a * numbers.sum(axis=1, keepdims=True).astype(np.float32), total)
    return total


def integer_values(block: QuantBlock, kind: QuantFormat) -> tuple[Integers, Floats]:
    """Return the integers [R, K] that multiply xq, and their scales [R, G]."""
    if kind.values == "e4m3":
        raise ValueError(f"{kind.name} has no int8 activations")
    doubled = 2 if kind.values == "e2m1" else 1
    return _array(code_values(block, kind) * doubled).astype(np.float64), _array(scales_of(block, kind) / doubled)


def fused(left: Floats, right: Floats, addend: Floats) -> Floats:
    """Return left * right + addend, rounded once.

    The sum in float64 is corrected to the odd one of its two neighbors where it is not exact (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums", 2008), so that the second rounding sees on which side it lies.
    """
    product = left.astype(np.float64) * right
    wide = addend.astype(np.float64)
    total = product + wide
    back = total - product
    error = (product - (total - back)) + (wide - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    odd = np.where(inexact, np.where((error > 0) == (total > 0), bits + 1, bits - 1), bits)
    return odd.view(np.float64).astype(np.float32)


def _pieces(width: int, group: int, step: int) -> list[tuple[int, int]]:
    """Return the ranges of columns that share both a scale of the weight and one of x, ascending."""
    borders = sorted({*range(0, width, group), *range(0, width, step), width})
    return list(pairwise(borders))


def _array(numbers: Tensor) -> Floats:
    array: Floats = numbers.numpy()
    return array
