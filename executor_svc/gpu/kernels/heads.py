"""Heads of queries, keys and values within a kernel: loaded, normalized, rotated and stored.

Rounded where transformers rounds: after the norm, after each product of the rotation, after its sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.norm import weighted

FP8_LARGEST = tl.constexpr(448.0)


@triton.jit
def load_heads(source, heads, rows, columns, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Load columns [columns] of heads [rows], SIZE apart; masked ones are zeros."""
    mask = (rows < heads)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(source + rows[:, None] * SIZE + columns[None, :], mask, other=0.0)


@triton.jit
def store_heads(
    value, scale, heads, rows, columns, into, STRIDE: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr
):
    """Write value [rows, columns] to heads STRIDE apart, divided by each head's scale if they are fp8."""
    mask = (rows < heads)[:, None] & (columns < WIDTH)[None, :]
    if SCALED:
        inverse = tl.div_rn(1.0, tl.load(scale + rows, rows < heads, other=1.0))[:, None]
        value = tl.clamp(value.to(tl.float32) * inverse, -FP8_LARGEST, FP8_LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(into + rows[:, None] * STRIDE + columns[None, :], value.to(into.dtype.element_ty), mask)


@triton.jit
def _normalized(
    low, high, rest, weight, eps, R: tl.constexpr, NORMED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr
):
    """Return the norms of heads: of both halves of R / 2 columns each, and of the rest, if REST is not 0."""
    half = tl.arange(0, HALF)
    width: tl.constexpr = R // 2
    dtype: tl.constexpr = low.dtype
    low_weight = tl.load(weight + half, half < width, other=0.0)
    high_weight = tl.load(weight + width + half, half < width, other=0.0)
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(wide_low * wide_low + wide_high * wide_high, 1)
    if REST > 0:
        last = tl.arange(0, REST)
        rest_weight = tl.load(weight + R + last, last < NORMED - R, other=0.0)
        wide_rest = rest.to(tl.float32)
        squares += tl.sum(wide_rest * wide_rest, 1)
    root = tl.sqrt_rn(tl.div_rn(squares, NORMED * 1.0) + eps)
    if REST > 0:
        rest = weighted(wide_rest, root, rest_weight, dtype)
    return weighted(wide_low, root, low_weight, dtype), weighted(wide_high, root, high_weight, dtype), rest


@triton.jit
def rotate_heads(
    source, into, heads, written, rows, cos, sin, weight, eps, scale, factor, STRIDE: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, NORMED: tl.constexpr, AFTER: tl.constexpr, COPIED: tl.constexpr, SCALED: tl.constexpr,
    MULTIPLIED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate heads [rows] of source, and write the heads below `written` to `into`, STRIDE apart.

    A head's columns are two halves of R / 2 columns, which are rotated against each other, and an unrotated rest, which
    is written only if it is COPIED or changes. NORMED: number of normalized columns; the others are then zeros. AFTER:
    they are normalized after the rotation. MULTIPLIED: with the number at `factor`, in the end. Data that depends on
    the token's position is loaded last, as its address is known last.
    """
    half = tl.arange(0, HALF)
    width: tl.constexpr = R // 2
    has_rest: tl.constexpr = REST > 0 and (NORMED > 0 or COPIED or MULTIPLIED)
    low = load_heads(source, heads, rows, half, D, width)
    high = load_heads(source + width, heads, rows, half, D, width)
    dtype: tl.constexpr = low.dtype
    rest = low
    if has_rest:
        last = tl.arange(0, REST)
        rest = load_heads(source + R, heads, rows, last, D, D - R)
    if NORMED > 0 and not AFTER:
        low, high, rest = _normalized(low, high, rest, weight, eps, R, NORMED, HALF, REST)
    cosine = tl.load(cos + half, half < width, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + width + half, half < width, other=0.0).to(tl.float32)[None, :]
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    if cos.dtype.element_ty == dtype:
        low = ((wide_low * cosine).to(dtype).to(tl.float32) - (wide_high * sine).to(dtype).to(tl.float32)).to(dtype)
        high = ((wide_high * cosine).to(dtype).to(tl.float32) + (wide_low * sine).to(dtype).to(tl.float32)).to(dtype)
    else:
        low = (wide_low * cosine - wide_high * sine).to(dtype)
        high = (wide_high * cosine + wide_low * sine).to(dtype)
    if NORMED > 0 and AFTER:
        low, high, rest = _normalized(low, high, rest, weight, eps, R, NORMED, HALF, REST)
    if MULTIPLIED:
        number = tl.load(factor).to(tl.float32)
        low, high = (low.to(tl.float32) * number).to(dtype), (high.to(tl.float32) * number).to(dtype)
        if has_rest:
            rest = (rest.to(tl.float32) * number).to(dtype)
    store_heads(low, scale, written, rows, half, into, STRIDE, width, SCALED)
    store_heads(high, scale, written, rows, half, into + width, STRIDE, width, SCALED)
    if has_rest:
        store_heads(rest, scale, written, rows, last, into + R, STRIDE, D - R, SCALED)


@triton.jit
def normalized_values(value, weight, eps, columns, NORMED: tl.constexpr, WIDTH: tl.constexpr):
    """Return the norms of values [rows, columns], of which NORMED columns are not padding."""
    wide = value.to(tl.float32)
    root = tl.sqrt_rn(tl.div_rn(tl.sum(wide * wide, 1), NORMED * 1.0) + eps)
    return weighted(wide, root, tl.load(weight + columns, columns < WIDTH, other=0.0), value.dtype)
