"""A tile of the product of rows and a weight of 32, 16 or 8 bits: what the kernels of linears have in common."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(weight, dtype: tl.constexpr):
    """Convert 8-bit numbers exactly, by instructions that run at full rate; others have this dtype."""
    if weight.dtype == dtype:
        return weight
    if weight.dtype == tl.int8:
        if dtype == tl.float16:
            # 0x6400 | u are the bits of 1024 + u; u is the number + 128.
            shifted = (weight.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
            return shifted.to(tl.float16, bitcast=True) - 1152.0
        return weight.to(tl.float32).to(dtype)
    if dtype == tl.float16:
        return weight.to(tl.float16)
    return weight.to(tl.float16).to(tl.float32).to(dtype)


@triton.jit
def product_tile(x_at, weight_at, row_inside, left, ROWS: tl.constexpr, FEATURES: tl.constexpr, INNER: tl.constexpr):
    """Return x @ weight.T [ROWS, FEATURES] float32 over `left` columns, INNER at a time in their order.

    x_at, weight_at: [ROWS, INNER] and [FEATURES, INNER], where the first columns are.
    """
    inner = tl.arange(0, INNER)
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    for step in range(tl.cdiv(left, INNER)):
        there = inner < left - step * INNER
        narrow = tl.load(weight_at, mask=there[None, :], other=0.0)
        some = tl.load(x_at, mask=row_inside[:, None] & there[None, :], other=0.0)
        total = tl.dot(some, tl.trans(widened(narrow, some.dtype)), total, input_precision="ieee")
        x_at += INNER
        weight_at += INNER
    return total
