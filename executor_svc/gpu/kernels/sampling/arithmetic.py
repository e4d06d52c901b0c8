"""Arithmetic of the kernels over logits: floats ordered as integers, scaled logits, races, tiles of listed blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.sampling.noise import exponential, uniform

SUB = 64
"""Token ids per block: kernels store the largest logit of each block, and a search reads only the best blocks."""
CHUNK = 4096
"""Token ids per program where several share a row; fixed, because sums are folded within a chunk."""
MAX_VOCAB = 8192 * SUB
"""The maximum vocabulary: a program holds the largest logit of each block in registers."""

INF_KEY = tl.constexpr(0x7F800000)
NEG_INF_KEY = tl.constexpr(-0x7F800001)
NO_KEY = tl.constexpr(-0x80000000)
NAN_KEY = tl.constexpr(0x7FFFFFFF)
NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered_key(x):
    """Return an int32 that orders like the float32, -0.0 like 0.0, NaN above all."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def key_value(key):
    """Return the float32 of an ordered key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def join(key, token_id):
    """Return an int64 that orders by key; of equal keys the lower id is larger."""
    return (key.to(tl.int64) << 32) | (token_id ^ NO_ID).to(tl.int64)


@triton.jit
def joined_key(joined):
    """Return the ordered key of a joined key."""
    return (joined >> 32).to(tl.int32)


@triton.jit
def joined_id(joined):
    """Return the token id of a joined key."""
    return (joined & 0x7FFFFFFF).to(tl.int32) ^ NO_ID


@triton.jit
def is_finite_key(key):
    """Return whether the float of this ordered key is finite."""
    return (key < INF_KEY) & (key > NEG_INF_KEY)


@triton.jit
def best_of_row(best, row, which, num_chunks, CHUNKS: tl.constexpr):
    """Return the largest joined key of a row's chunks; best: [rows, 2, num_chunks], which: 0 raw, 1 edited."""
    chunk = tl.arange(0, CHUNKS)
    found = tl.load(best + (row * 2 + which) * num_chunks + chunk, chunk < num_chunks, other=-0x8000000000000000)
    return tl.max(found, axis=0)


@triton.jit
def scaled(x, peak, temperature):
    """Return log(p / p of the most likely token) under temperature, each operation rounded as on the CPU."""
    return tl.div_rn(x - peak, temperature)


@triton.jit
def mass(x, peak, temperature, floor):
    """Return p / p of the most likely token, 0 below the floor."""
    y = scaled(x, peak, temperature)
    return tl.where(y < floor, 0.0, tl.exp(y))


@triton.jit
def race_value(x, ids, peak, temperature, floor, key):
    """Return an exponential number over p: the smallest wins, like the largest log p plus Gumbel noise on the CPU."""
    y = scaled(x, peak, temperature)
    # The most likely token's value is below 17, so a bounded value wins no race.
    value = exponential(uniform(key, ids)) * tl.exp(tl.minimum(-y, 80.0))
    return tl.where(y < floor, float("inf"), value)


@triton.jit
def race_winner(x, ids, there, peak, temperature, floor, key):
    """Return (value, id) of the token in `there` that wins the race; infinite if none can.

    A standard exponential number is larger than the uniform number that it is computed from. This bound excludes most
    tokens, so logarithms of all are computed only where more than one may win.
    """
    y = scaled(x, peak, temperature)
    v = uniform(key, ids)
    growth = tl.where(there & (y >= floor), tl.exp(tl.minimum(-y, 80.0)), float("inf"))
    least = v * growth
    lowest = tl.min(least, axis=0)
    leading = least == lowest
    first = tl.min(tl.where(leading, ids, NO_ID), axis=0)
    of_first = tl.min(tl.where(leading, v, 1.0), axis=0)
    value = lowest * (exponential(of_first) / of_first)
    # A little more than the rounding of these few operations.
    rivals = (least <= value * (1.0 + 2.0**-18)) & (least < float("inf"))
    if tl.sum(rivals.to(tl.int32), axis=0) > 1:
        values = exponential(v) * growth
        value = tl.min(values, axis=0)
        first = tl.min(tl.where(values == value, ids, NO_ID), axis=0)
    return value, first


@triton.jit
def listed_tile(x_row, vocab, blocks, num_listed, start, TILE: tl.constexpr, SUB: tl.constexpr):
    """Return (ids, logits, is valid) [TILE] of the listed blocks from the start-th on; ids ascend."""
    lane = tl.arange(0, TILE)
    place = start + lane // SUB
    block = tl.load(blocks + place, place < num_listed, other=0)
    ids = tl.max_contiguous(tl.multiple_of(block * SUB, SUB) + lane % SUB, SUB)
    there = (place < num_listed) & (ids < vocab)
    return ids, tl.load(x_row + ids, there, other=float("-inf")), there


@triton.jit
def as_float(address):
    return tl.load(address).to(tl.float32, bitcast=True)


@triton.jit
def edited_row(
    logits, logits_stride, sources, edited, edited_stride, edited_rows, best, row, num_chunks,
    EDITS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return (pointer to the row's edited logits, their best joined key)."""
    x_row = logits + tl.load(sources + row).to(tl.int64) * logits_stride
    which = 0
    # Nested, since EDITS is a compile-time constant: without edits there is no load.
    if EDITS:  # noqa: SIM102
        if tl.load(edited_rows + row) != 0:
            x_row = edited + row * edited_stride
            which = 1
    return x_row, best_of_row(best, row, which, num_chunks, CHUNKS)
