"""Which queries and which keys a program of prompts has: the one description of tiles, in Triton and in Gluon."""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.attention.tile import first_seen

UNSPECIALIZED = {
    "do_not_specialize": [
        *("table_stride", "num_seqs", "num_tiles", "num_kv_heads"),
        *("block_rows", "value_rows", "heads_at_once", "group"),
    ],
    "do_not_specialize_on_alignment": ["query_start_loc", "seq_lens", "block_tables", "sinks"],
}
"""Arguments of the Gluon kernel and its twin that change from step to step, of which no other build is made."""


@triton.jit
def find_sequence(query_start_loc, tile, num_seqs, tile_tokens):
    """Return the last sequence s whose first tile, query_start_loc[s] // tile_tokens + s, is not after `tile`."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first = tl.load(query_start_loc + middle) // tile_tokens + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def queries_of(program, query_start_loc, num_seqs, num_tiles, heads_at_once, tile_tokens):
    """Return a program's KV head, its sequence, the sequence's first token, and its own, counted from that.

    Neighbouring programs read the same keys; the largest work comes first.
    """
    rest = program % (num_tiles * heads_at_once)
    head = program // (num_tiles * heads_at_once) * heads_at_once + rest % heads_at_once
    tile = num_tiles - 1 - rest // heads_at_once
    sequence = find_sequence(query_start_loc, tile, num_seqs, tile_tokens)
    start = tl.load(query_start_loc + sequence)
    return head, sequence, start, (tile - start // tile_tokens - sequence) * tile_tokens


@triton.jit
def keys_of(position, count, length, window, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return the keys and the clear tiles of `count` tokens from this position on: low, high, clear_from, clear_to.

    They are as in `attend`. length: of the sequence; 0: padding, which has no keys.
    """
    low = first_seen(position, window, HAS_WINDOW)
    high = tl.where(length > 0, position + count, 0)
    clear_from = tl.cdiv(first_seen(position + count - 1, window, HAS_WINDOW), TILE)
    return low, high, clear_from, (position + 1) // TILE


@triton.jit
def prompt_of(program, query_start_loc, seq_lens, num_seqs, num_tiles, heads_at_once, tile_tokens):
    """Return a program's KV head, sequence, first token in the batch and number of tokens, and the first's position.

    And the length of the sequence. The number is 0 where the sequence has no such tile.
    """
    head, sequence, start, first = queries_of(program, query_start_loc, num_seqs, num_tiles, heads_at_once, tile_tokens)
    num_tokens = tl.load(query_start_loc + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    count = tl.maximum(tl.minimum(num_tokens - first, tile_tokens), 0)
    return head, sequence, start + first, count, length - num_tokens + first, length


@triton.jit
def first_row_of(index, table, high, head, block_rows, BLOCK: tl.constexpr):
    """Return the rows, among all of the pool, of a KV head's first keys in these blocks of a sequence.

    high: behind the sequence's last key that is seen. Blocks behind it may not exist: the last one's row stands for
    theirs.
    """
    block = tl.load(table + tl.minimum(index, (high - 1) // BLOCK))
    return block * block_rows + head * BLOCK


@triton.jit
def seen_values(values, keys, high):
    """Return the values [TILE, D], 0 of the keys [TILE, 1] from `high` on: they have weight 0, and may be NaN."""
    return tl.where(keys < high, values, 0.0)
