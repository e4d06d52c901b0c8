"""Arithmetic of exact attention: what a tile of keys adds to a row, and how a row's segments become one.

Each operation is rounded by itself, or is one fused multiply-add that is written as such. Keys that a row does not see
leave its sums as they are, to the bit: a row's tiles begin and end with those of its tile's other rows, which depend on
how its prompt was cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.attention.tile import (
    capped,
    on_border,
    query_places,
    rows_and_columns,
    sink_exponents,
    visible,
    with_sink,
)


@triton.jit
def base_of(greatest):
    """Return what exponents are less: the greatest, or 0 for a row without any key so far, where it is -inf."""
    return tl.where(greatest == float("-inf"), 0.0, greatest)


@triton.jit
def scores_of(rows, k, more, tile, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Return the scores [ROWS, TILE] of a tile of keys, -inf where a row does not see one; as of `tile.weigh`."""
    q, positions, inner, _, window, clear_from, clear_to, q_more = rows
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if more is not None:
        scores = tl.dot(q_more, tl.trans(more.to(q.dtype)), scores, input_precision="ieee")
    if HAS_SOFTCAP:
        scores = capped(scores, inner[:, None])
    if on_border(tile, clear_from, clear_to):
        keys = tile * TILE + tl.arange(0, TILE)
        scores = visible(scores, keys[None, :], positions[:, None], window, HAS_WINDOW)
    return scores


@triton.jit
def weighed(q, outer, sums, scores, v):
    """Return sums with one more tile of keys, which have these scores, and their values.

    The maxima in sums are exponents of 2: a tile without a visible key keeps them, and shrinks by exactly 1.
    """
    acc, greatest, total = sums
    highest = tl.maximum(greatest, tl.max(scores, 1) * outer)
    base = base_of(highest)
    factors, less = tl.broadcast_to(outer[:, None], scores.shape), tl.broadcast_to(-base[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, factors, less))
    shrink = tl.exp2(greatest - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return acc, highest, total


@triton.jit
def folded(run, segment):
    """Return the sums of a row's segments so far and of the next one; nothing, on either side, changes nothing."""
    acc, greatest, total = run
    more, other, weight = segment
    highest = tl.maximum(greatest, other)
    base = base_of(highest)
    shrink, grow = tl.exp2(greatest - base), tl.exp2(other - base)
    return acc * shrink[:, None] + more * grow[:, None], highest, total * shrink + weight * grow


@triton.jit
def finished(
    run, rows, of_head, HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr
):  # fmt: skip
    """Return the result [ROWS, PADDED] of rows whose segments are all folded; 0 for a row without keys.

    of_head: the sinks, the head, its KV head, its group, the factor of capped scores, and scales of values.
    """
    acc, greatest, total = run
    sinks, head, kv_head, group, softcap, v_scale = of_head
    if HAS_SINKS:
        exponents = sink_exponents(sinks, rows, head, group, softcap, HAS_SOFTCAP)
        acc, total = with_sink(acc, greatest, total, exponents)
    # Records may have turned a -0 into a 0, which adding 0 does to all.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None] + 0.0
    if HAS_SCALES:
        result *= tl.load(v_scale + kv_head)
    return result


@triton.jit
def _nth(numbers, index, N: tl.constexpr):
    """Return numbers[:, N] of [R, CHUNK, P]; index: [1, CHUNK, 1]."""
    return tl.sum(tl.where(index == N, numbers, 0.0), 1)


@triton.jit
def _records_of(values, stats, at, rows_there, some, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return records `some` [R, CHUNK] of rows: values [R, CHUNK, P], maxima and sums [R, CHUNK, 1]."""
    columns = tl.arange(0, PADDED)
    loaded = some & rows_there[:, None]
    # Past the L1 cache: other programs have just written them.
    greatest = tl.load(stats + at * 2, mask=loaded, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(stats + at * 2 + 1, mask=loaded, other=0.0, cache_modifier=".cg")
    wanted = loaded[:, :, None] & (columns < HEAD_SIZE)[None, None, :]
    addresses = values + ((at * HEAD_SIZE)[:, :, None] + columns[None, None, :])
    numbers = tl.load(addresses, mask=wanted, other=0.0, cache_modifier=".cg")
    return numbers, greatest[:, :, None], totals[:, :, None]


@triton.jit
def write_folded(
    kept, num_rows, count, out, start, stride, of_head, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Fold the records of `count` segments of a KV head's rows, one after the other, and write the results.

    kept: as of `records.record`; start, stride: the sequence's first token in out, and numbers of one; of_head: as of
    `finished`; CHUNK: segments that are loaded at once.
    """
    values, stats, records, _, _ = kept
    head, group = of_head[1], of_head[3]
    at_once: tl.constexpr = 512 // PADDED
    index = tl.arange(0, CHUNK)
    for first_row in range(0, num_rows, at_once):
        rows = first_row + tl.arange(0, at_once)
        there = rows < num_rows
        acc = tl.zeros([at_once, PADDED], tl.float32)
        greatest = tl.full([at_once], float("-inf"), tl.float32)
        total = tl.zeros([at_once], tl.float32)
        for first in range(0, count, CHUNK):
            some = first + index
            at = (some * records)[None, :] + rows[:, None]
            numbers, maxima, totals = _records_of(values, stats, at, there, (some < count)[None, :], HEAD_SIZE, PADDED)
            for nth in tl.static_range(CHUNK):
                which = index[None, :, None]
                # -inf must not be multiplied by 0.
                other = tl.max(tl.where(which == nth, maxima, float("-inf")), 1)
                segment = (
                    _nth(numbers, which, nth),
                    tl.reshape(other, [at_once]),
                    tl.reshape(_nth(totals, which, nth), [at_once]),
                )
                acc, greatest, total = folded((acc, greatest, total), segment)
        result = finished((acc, greatest, total), rows, of_head, HAS_SINKS, HAS_SOFTCAP, HAS_SCALES)
        places = query_places(out, rows, rows // group, head, start, stride, group, HEAD_SIZE, PADDED)
        tl.store(places, result.to(out.dtype.element_ty), mask=rows_and_columns(there, HEAD_SIZE, PADDED))
