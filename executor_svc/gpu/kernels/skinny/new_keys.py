"""Heads of queries and keys within attention: normalized, rotated, and keys and values written to the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.attention.tile import rows_and_columns
from executor_svc.gpu.kernels.norm import weighted


@triton.jit
def prepared_heads(
    places, there, angles, cos, sin, weight, eps,
    R: tl.constexpr, NORMED: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return heads [ROWS, PADDED] normalized and rotated, with the roundings of `heads.rotate_heads`.

    Each number is loaded with the one that it is rotated against. places: [ROWS] addresses of the heads; there:
    [ROWS]; angles: [ROWS] of cos and sin. NORMED: columns that are normalized, or 0; the others are zeros.
    """
    half: tl.constexpr = R // 2
    column = tl.arange(0, PADDED)
    partner = tl.where(column < half, column + half, tl.where(column < R, column - half, column))
    mask = rows_and_columns(there, HEAD_SIZE, PADDED)
    value = tl.load(places[:, None] + column[None, :], mask=mask, other=0.0)
    other = tl.load(places[:, None] + partner[None, :], mask=mask, other=0.0)
    if NORMED > 0:
        wide = value.to(tl.float32)
        root = tl.sqrt_rn(tl.div_rn(tl.sum(wide * wide, 1), NORMED * 1.0) + eps)
        factor = tl.load(weight + column, column < NORMED, other=0.0)
        other_factor = tl.load(weight + partner, partner < NORMED, other=0.0)
        value = weighted(wide, root, factor, value.dtype)
        other = weighted(other.to(tl.float32), root, other_factor, value.dtype)
    if R == 0:
        rotated = value
    else:
        turned = there[:, None] & (column < R)[None, :]
        at = angles[:, None] * R + column[None, :]
        cosine = tl.load(cos + at, mask=turned, other=1.0).to(tl.float32)
        # The first half of a row is negated.
        sine = tl.load(sin + at, mask=turned, other=0.0).to(tl.float32)
        own, beside = value.to(tl.float32) * cosine, other.to(tl.float32) * sine
        if cos.dtype.element_ty == value.dtype:
            own, beside = own.to(value.dtype).to(tl.float32), beside.to(value.dtype).to(tl.float32)
        rotated = tl.where((column < R)[None, :], (own + beside).to(value.dtype), value)
    return rotated


@triton.jit
def write_new_keys(
    qkv, cache, slots, angle_rows, cos, sin, k_weight, eps, head, start, num_tokens, q_stride, num_kv_heads, block_rows,
    value_rows, group, block_size, block_bits, R: tl.constexpr, NORMED: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of a sequence's tokens in the step, of one KV head."""
    token, column = tl.arange(0, TOKENS), tl.arange(0, PADDED)
    there = token < num_tokens
    where = (start + token).to(tl.int64)
    angles = tl.maximum(tl.load(angle_rows + where, mask=there, other=0), 0)
    slot = tl.load(slots + where, mask=there, other=-1)
    keys = qkv + where * q_stride + (num_kv_heads * group + head) * HEAD_SIZE
    key = prepared_heads(keys, there, angles, cos, sin, k_weight, eps, R, NORMED, HEAD_SIZE, PADDED)
    mask = rows_and_columns(there, HEAD_SIZE, PADDED)
    value = tl.load((keys + num_kv_heads * HEAD_SIZE)[:, None] + column[None, :], mask=mask, other=0.0)
    written = rows_and_columns(there & (slot >= 0), HEAD_SIZE, PADDED)
    row = (slot >> block_bits) * block_rows + head * block_size + (slot & (block_size - 1))
    into = cache + (row * HEAD_SIZE)[:, None] + column[None, :]
    tl.store(into, key.to(cache.dtype.element_ty), mask=written)
    tl.store(into + value_rows.to(tl.int64) * HEAD_SIZE, value.to(cache.dtype.element_ty), mask=written)
