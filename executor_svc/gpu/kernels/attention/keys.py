"""Shared by the attention kernels: one query tile over a run of key tiles, loaded from the cache in two ways.

Either threads load keys by their addresses, or a Hopper GPU's copy engine loads a whole tile from its first row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.attention.config import COPIED_BLOCK
from executor_svc.gpu.kernels.attention.records import first_segment, recorded_at_edge
from executor_svc.gpu.kernels.attention.tile import nothing_yet, weigh


@triton.jit
def keys_to_read(tile, low, high, TILE: tl.constexpr):
    """Return key indices [TILE] of a tile; masked keys are replaced by an unmasked one, because 0 * NaN is NaN."""
    return tl.maximum(tl.minimum(tile * TILE + tl.arange(0, TILE), high - 1), low)


@triton.jit
def places_of(keys, ids, kv_head, block_rows, block_size, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Return addresses [TILE, PADDED] of keys [TILE] in the blocks `ids` [TILE].

    kv_head: address of this KV head's keys in the cache's first block.
    """
    rows = ids.to(tl.int64) * (block_rows * WIDTH) + (keys & (block_size - 1)) * WIDTH
    return kv_head + rows[:, None] + tl.arange(0, PADDED)


@triton.jit
def loaded(places, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load from the places [TILE, PADDED]; 0 from the column HEAD_SIZE on."""
    if HEAD_SIZE == PADDED:
        numbers = tl.load(places)
    else:
        numbers = tl.load(places, mask=(tl.arange(0, PADDED) < HEAD_SIZE)[None, :], other=0.0)
    return numbers


@triton.jit
def row_of(tile, block, head, block_rows, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return the copy engine's row of a tile's keys in this block."""
    return block * block_rows + head * BLOCK_SIZE + tile * TILE % BLOCK_SIZE


@triton.jit
def attend(
    q, cache, head, table, positions, begin, end, low, high, clear_from, clear_to, block_rows, value_rows,
    block_size, block_bits, inner, outer, window, q_more, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    WIDTH: tl.constexpr, MORE: tl.constexpr, MORE_PADDED: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, COPIES: tl.constexpr, STAGES: tl.constexpr, segments=None,
):  # fmt: skip
    """Return weighted values [ROWS, PADDED], not yet divided, and each row's maximum exponent of 2 and sum of weights.

    Args:
        q: [ROWS, PADDED], with its factors, from `as_multiplied`.
        cache: keys and values of all blocks, from `AttentionCall.cache`.
        head: the KV head.
        block_rows, value_rows: rows of a head's numbers from one block to the next, and from a block's keys to its
        values.
        block_size, block_bits: tokens of a KV block, a power of 2, and its exponent.
        table: the sequence's block table.
        positions: [ROWS] positions of the tokens.
        begin, end: the loop covers tiles begin to end - 1 of the sequence's keys.
        low, high: some row attends to each of the keys low to high - 1; other keys have no effect.
        clear_from, clear_to: every row attends to all keys of the tiles clear_from to clear_to - 1.
        q_more: [ROWS, MORE_PADDED], of queries what only keys have: the last MORE of their WIDTH columns. The first
        HEAD_SIZE are values too, as latents are. Anything, with MORE 0: values are numbers of their own.
        segments: None, or index of the first segment and tiles of a segment, the sequence's first tile, and what
        `record` writes to: what is returned is of the last segment then, the others are recorded.
    """
    rows = (q, positions, inner, outer, window, clear_from, clear_to, q_more)
    sums = nothing_yet(q)
    if COPIES:
        sums = attend_copied(
            rows, sums, cache, head, table, begin, end, high, block_rows, value_rows, segments,
            HEAD_SIZE, PADDED, TILE, HAS_WINDOW, HAS_SOFTCAP, STAGES,
        )  # fmt: skip
    else:
        sums = attend_loaded(
            rows, sums, cache, head, table, begin, end, low, high, block_rows, value_rows, block_size, block_bits,
            segments, HEAD_SIZE, PADDED, WIDTH, MORE, MORE_PADDED, TILE, HAS_WINDOW, HAS_SOFTCAP, STAGES,
        )  # fmt: skip
    acc, greatest, total = sums
    return acc, greatest * outer, total


@triton.jit
def attend_loaded(
    rows,
    sums,
    cache,
    head,
    table,
    begin,
    end,
    low,
    high,
    block_rows,
    value_rows,
    block_size,
    block_bits,
    segments,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    MORE: tl.constexpr,
    MORE_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return `sums` with the tiles begin to end - 1 added; reads no key before `low` or from `high` on."""
    kv_head, value_offset = cache + head * (block_size * WIDTH), value_rows * WIDTH
    # Loaded one tile ahead: loads of keys and values would otherwise wait for the ids.
    ids = tl.load(table + (keys_to_read(begin, low, high, TILE) >> block_bits))
    segment = first_segment(segments)
    for tile in tl.range(begin, end, num_stages=STAGES):
        keys = keys_to_read(tile, low, high, TILE)
        places = places_of(keys, ids, kv_head, block_rows, block_size, WIDTH, PADDED)
        more = None
        if MORE > 0:
            last = places_of(keys, ids, kv_head + (WIDTH - MORE), block_rows, block_size, WIDTH, MORE_PADDED)
            more = loaded(last, MORE, MORE_PADDED)
        ids = tl.load(table + (keys_to_read(tile + 1, low, high, TILE) >> block_bits))
        k = loaded(places, HEAD_SIZE, PADDED)
        v = k
        if MORE == 0:
            v = loaded(places + value_offset, HEAD_SIZE, PADDED)
        sums = weigh(rows, sums, k, more, v, tile, False, TILE, HAS_WINDOW, HAS_SOFTCAP)
        if segments is not None:
            sums, segment = recorded_at_edge(rows, sums, tile, end, segment, segments, HEAD_SIZE, PADDED)
    return sums


@triton.jit
def attend_copied(
    rows,
    sums,
    cache,
    head,
    table,
    begin,
    end,
    high,
    block_rows,
    value_rows,
    segments,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr = COPIED_BLOCK,
):
    """Return `sums` with the tiles begin to end - 1 added; masks keys from `high` on in the last tile."""
    tl.static_assert(BLOCK_SIZE % TILE == 0 and not HAS_WINDOW)
    whole = tl.minimum(high // TILE, end)
    block = tl.load(table + begin * TILE // BLOCK_SIZE)  # one tile ahead, as ids are in `attend_loaded`
    segment = first_segment(segments)
    for tile in tl.range(begin, whole, num_stages=STAGES):
        row = row_of(tile, block, head, block_rows, BLOCK_SIZE, TILE)
        block = tl.load(table + tl.minimum(tile + 1, end - 1) * TILE // BLOCK_SIZE)
        k = cache.load([row, 0])
        v = cache.load([row + value_rows, 0])
        sums = weigh(rows, sums, k, None, v, tile, False, TILE, HAS_WINDOW, HAS_SOFTCAP)
        if segments is not None:
            sums, segment = recorded_at_edge(rows, sums, tile, end, segment, segments, HEAD_SIZE, PADDED)
    if whole < end:
        row = row_of(whole, block, head, block_rows, BLOCK_SIZE, TILE)
        k = cache.load([row, 0])
        v = cache.load([row + value_rows, 0])
        # Masked values have weight 0, and may be NaN.
        seen = whole * TILE + tl.arange(0, TILE) < high
        v = tl.where(seen[:, None], v.to(rows[0].dtype), 0.0)
        sums = weigh(rows, sums, k, None, v, whole, True, TILE, HAS_WINDOW, HAS_SOFTCAP)
    return sums
