"""Shared by the attention kernels: a query tile, and a tile of keys with online softmax.

Online softmax after Milakov and Gimelshein (2018), in tiles as in FlashAttention (Dao et al., 2022).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_seen(position, window, HAS_WINDOW: tl.constexpr):
    """Return the first position that a token at `position` attends to.

    HAS_WINDOW: whether `window` is the length of a window; 2: of chunks.
    """
    first = 0
    if HAS_WINDOW == 2:
        first = position // window * window
    elif HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    return first


@triton.jit
def query_places(base, rows, token, head, first, stride, group, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Return addresses [ROWS, PADDED] of a tile's rows, in a tensor at `base` of tokens `stride` and heads WIDTH apart.

    Row r is query head r % group of this KV head, of the token at index token[r] [ROWS] after the first.
    """
    return row_places(base, rows, token, tl.arange(0, PADDED)[None, :], head, first, stride, group, WIDTH)


@triton.jit
def row_places(base, rows, token, columns, head, first, stride, group, WIDTH: tl.constexpr):
    """Return addresses [ROWS, C] of these columns [1, C]; others as in `query_places`."""
    offsets = token * stride + (head * group + rows % group) * WIDTH
    return base + first.to(tl.int64) * stride + (offsets[:, None] + columns)


@triton.jit
def rows_and_columns(rows, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return the mask of a tile's elements: of the given rows [ROWS], up to the head size."""
    there = rows[:, None]
    if HEAD_SIZE != PADDED:
        there = there & (tl.arange(0, PADDED) < HEAD_SIZE)[None, :]
    return there


@triton.jit
def as_multiplied(
    q, more, head, k_scale, scale, softcap, MORE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr
):
    """Return q [ROWS, PADDED] for the product with keys, and two factors per row: of q k, and of the capped score.

    more: with MORE, further columns of the queries; those for the product come second.

    Keys and values in fp8 are multiplied in fp16, which represents them exactly: a power of 2 per row scales q into its
    range. Values below 2^-14 of a row's largest lose bits by that, less than the row's rounding.
    """
    factor = tl.zeros([q.shape[0]], tl.float32) + scale
    if HAS_SCALES:
        factor *= tl.load(k_scale + head)
        if q.dtype != tl.float16:
            greatest = tl.max(tl.abs(q.to(tl.float32)), 1)
            if MORE > 0:
                greatest = tl.maximum(greatest, tl.max(tl.abs(more.to(tl.float32)), 1))
            # At least 2^-63: a factor of 0 would turn a score of -inf into NaN.
            exponent = tl.maximum(greatest.to(tl.int32, bitcast=True) & 0x7F800000, 0x20000000)
            inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
            q = (q.to(tl.float32) * inverse[:, None]).to(tl.float16)
            if MORE > 0:
                more = (more.to(tl.float32) * inverse[:, None]).to(tl.float16)
            factor *= exponent.to(tl.float32, bitcast=True)
    outer = factor
    if HAS_SOFTCAP:
        outer = tl.zeros([q.shape[0]], tl.float32) + softcap
    return q, more, factor, outer


@triton.jit
def nothing_yet(q):
    """Return the initial sums of `weigh`, for q [ROWS, PADDED]."""
    acc = tl.zeros(q.shape, tl.float32)
    return acc, tl.full([q.shape[0]], float("-inf"), tl.float32), tl.zeros([q.shape[0]], tl.float32)


@triton.jit
def weigh(
    rows,
    sums,
    k,
    more,
    v,
    tile,
    LAST: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Return sums with one more tile of keys and values.

    Args:
        rows: q [ROWS, PADDED], positions [ROWS], both factors of `as_multiplied`, the window, clear_from and clear_to,
        and further columns of q, all as in `attend`.
        sums: weighted values [ROWS, PADDED], each row's maximum score and its sum of weights.
        k, v: [TILE, PADDED].
        more: further columns of keys, [TILE, MORE_PADDED]; None: there are none.
        tile: index of the tile in the sequence.
        LAST: whether the tile may have masked keys at its end.
    """
    q, positions, inner, outer, window, clear_from, clear_to, q_more = rows
    acc, greatest, total = sums
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if more is not None:
        scores = tl.dot(q_more, tl.trans(more.to(q.dtype)), scores, input_precision="ieee")
    if HAS_SOFTCAP:
        scores = capped(scores, inner[:, None])
    if LAST or on_border(tile, clear_from, clear_to):
        keys = tile * TILE + tl.arange(0, TILE)
        scores = visible(scores, keys[None, :], positions[:, None], window, HAS_WINDOW)
    weights, shrink, highest, total = weights_of(scores, greatest, total, outer)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return acc, highest, total


@triton.jit
def capped(scores, inner):
    """Return capped scores, without the outer factor and a constant that all scores share."""
    # tanh(x) = 1 - 2 / (exp(2x) + 1); the softmax needs no 1, and the outer factor includes the 2.
    return -1.0 / (tl.exp2(scores * inner) + 1.0)


@triton.jit
def on_border(tile, clear_from, clear_to):
    """Return whether some row of a query tile does not attend to all keys of this tile."""
    return (tile < clear_from) | (tile >= clear_to)


@triton.jit
def visible(scores, keys, positions, window, HAS_WINDOW: tl.constexpr):
    """Return the scores [ROWS, TILE], -inf where a row at its position [ROWS, 1] does not attend to a key [1, TILE]."""
    seen = keys <= positions
    if HAS_WINDOW == 2:
        seen &= keys >= positions // window * window
    elif HAS_WINDOW:
        seen &= keys > positions - window
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def weights_of(scores, greatest, total, outer):
    """Return a tile's weights [ROWS, TILE], the factor of what was summed before, the greatest score and the total.

    greatest, total, outer: [ROWS], before this tile.
    """
    highest = tl.maximum(greatest, tl.max(scores, 1))
    # For a row without any key so far, -inf - -inf would be NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest * outer)
    weights = tl.exp2(scores * outer[:, None] - base[:, None])
    shrink = tl.exp2(greatest * outer - base)
    return weights, shrink, highest, total * shrink + tl.sum(weights, 1)


@triton.jit
def sink_exponents(sinks, rows, head, group, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return the sinks of a KV head's rows [ROWS] as exponents of 2, without what `weigh` leaves out of capped scores.

    sinks: [H] float32; softcap: the factor of capped scores.
    """
    exponents = tl.load(sinks + head * group + rows % group) * 1.4426950408889634
    if HAS_SOFTCAP:
        exponents -= softcap * 0.5
    return exponents


@triton.jit
def with_sink(acc, greatest, total, sink):
    """Return weighted values and sums of weights of rows that have one more weight, of no value.

    Args:
        acc, greatest, total: as `attend` returns them.
        sink: [ROWS], from `sink_exponents`.
    """
    highest = tl.maximum(greatest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(greatest - base)
    return acc * shrink[:, None], tl.exp2(sink - base) + total * shrink


@triton.jit
def divided(acc, total, head, v_scale, HAS_SCALES: tl.constexpr):
    """Return weighted values [ROWS, PADDED] divided by the sums of their weights, 0 without weights."""
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if HAS_SCALES:
        result *= tl.load(v_scale + head)
    return result
