"""What the attention kernels share: one query tile over a run of key tiles, which come from the cache in two ways.

Either threads load them by their addresses, or a Hopper GPU's copy engine is told a row and fetches a whole tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.attention.config import COPIED_BLOCK
from executor_svc.gpu.kernels.attention.tile import nothing_yet, weigh


@triton.jit
def keys_to_read(tile, low, high, TILE: tl.constexpr):
    """Keys [TILE] of a tile; in place of those that no row sees, one that some row does: 0 * NaN would be NaN."""
    return tl.maximum(tl.minimum(tile * TILE + tl.arange(0, TILE), high - 1), low)


@triton.jit
def places_of(keys, ids, kv_head, value_offset, block_size, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Where keys [TILE] are, [TILE, PADDED], in the blocks `ids` [TILE]; values are `value_offset` behind.

    kv_head is where this KV head's keys are in the cache's first block.
    """
    rows = ids.to(tl.int64) * (2 * value_offset) + (keys & (block_size - 1)) * HEAD_SIZE
    return kv_head + rows[:, None] + tl.arange(0, PADDED)


@triton.jit
def loaded(places, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr):
    """What is at the places [TILE, PADDED], 0 beyond the head size."""
    if HEAD_SIZE == PADDED:
        numbers = tl.load(places)
    else:
        numbers = tl.load(places, mask=(tl.arange(0, PADDED) < HEAD_SIZE)[None, :], other=0.0)
    return numbers


@triton.jit
def row_of(tile, block, head, num_kv_heads, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The row at which the copy engine finds a tile's keys, which lie in this block."""
    return (block * (2 * num_kv_heads) + head) * BLOCK_SIZE + tile * TILE % BLOCK_SIZE


@triton.jit
def attend(
    q,
    cache,
    head,
    table,
    positions,
    begin,
    end,
    low,
    high,
    clear_from,
    clear_to,
    num_kv_heads,
    block_size,
    block_bits,
    inner,
    outer,
    window,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    COPIES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return weighted values [ROWS, PADDED], not yet divided, and each row's greatest exponent of 2 and sum of weights.

    Args:
        q: [ROWS, PADDED], with its factors, as `as_multiplied` has them.
        cache: keys and values of all blocks, as `AttentionCall.cache` gives them.
        head: the KV head.
        block_size, block_bits: tokens of a KV block, a power of 2, and of which.
        table: the sequence's block table.
        positions: [ROWS] of the tokens.
        begin, end: tiles begin to end - 1 of the sequence's keys are gone through.
        low, high: keys low to high - 1 are seen by some row; what others hold has no effect.
        clear_from, clear_to: every row sees all of the tiles clear_from to clear_to - 1.
    """
    rows = (q, positions, inner, outer, window, clear_from, clear_to)
    sums = nothing_yet(q)
    if COPIES:
        sums = attend_copied(
            rows, sums, cache, head, table, begin, end, high, num_kv_heads, TILE, HAS_WINDOW, HAS_SOFTCAP, STAGES,
        )  # fmt: skip
    else:
        sums = attend_loaded(
            rows, sums, cache, head, table, begin, end, low, high, num_kv_heads, block_size, block_bits,
            HEAD_SIZE, PADDED, TILE, HAS_WINDOW, HAS_SOFTCAP, STAGES,
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
    num_kv_heads,
    block_size,
    block_bits,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return `sums` with the tiles begin to end - 1 in them; nothing before `low` and from `high` on is read."""
    head_stride = block_size * HEAD_SIZE
    kv_head, value_offset = cache + head * head_stride, num_kv_heads * head_stride
    # Loaded one tile ahead, or loads of keys and values could start only once they are there.
    ids = tl.load(table + (keys_to_read(begin, low, high, TILE) >> block_bits))
    for tile in tl.range(begin, end, num_stages=STAGES):
        keys = keys_to_read(tile, low, high, TILE)
        places = places_of(keys, ids, kv_head, value_offset, block_size, HEAD_SIZE, PADDED)
        ids = tl.load(table + (keys_to_read(tile + 1, low, high, TILE) >> block_bits))
        k = loaded(places, HEAD_SIZE, PADDED)
        v = loaded(places + value_offset, HEAD_SIZE, PADDED)
        sums = weigh(rows, sums, k, v, tile, False, TILE, HAS_WINDOW, HAS_SOFTCAP)
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
    num_kv_heads,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr = COPIED_BLOCK,
):
    """Return `sums` with the tiles begin to end - 1 in them; of the last, keys from `high` on count for nothing."""
    tl.static_assert(BLOCK_SIZE % TILE == 0 and not HAS_WINDOW)
    value_offset = num_kv_heads * BLOCK_SIZE
    whole = tl.minimum(high // TILE, end)
    block = tl.load(table + begin * TILE // BLOCK_SIZE)  # one tile ahead, as ids are in `attend_loaded`
    for tile in tl.range(begin, whole, num_stages=STAGES):
        row = row_of(tile, block, head, num_kv_heads, BLOCK_SIZE, TILE)
        block = tl.load(table + tl.minimum(tile + 1, end - 1) * TILE // BLOCK_SIZE)
        k = cache.load([row, 0])
        v = cache.load([row + value_offset, 0])
        sums = weigh(rows, sums, k, v, tile, False, TILE, HAS_WINDOW, HAS_SOFTCAP)
    if whole < end:
        row = row_of(whole, block, head, num_kv_heads, BLOCK_SIZE, TILE)
        k = cache.load([row, 0])
        v = cache.load([row + value_offset, 0])
        # Values that no row sees have weight 0, and may be NaN.
        seen = whole * TILE + tl.arange(0, TILE) < high
        v = tl.where(seen[:, None], v.to(rows[0].dtype), 0.0)
        sums = weigh(rows, sums, k, v, whole, True, TILE, HAS_WINDOW, HAS_SOFTCAP)
    return sums
