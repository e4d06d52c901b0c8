"""Records of split attention: what a program leaves of a segment's keys. As in Flash-Decoding (Dao et al., 2023)."""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.attention.tile import first_seen, nothing_yet


@triton.jit
def segments_of(length, position, window, segments, least_tiles, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return first key tile, tiles of a segment, and segments of a sequence; one segment without tiles if empty.

    position: of the sequence's first token in the batch.
    """
    begin = first_seen(position, window, HAS_WINDOW) // TILE
    tiles = tl.cdiv(length, TILE) - begin
    size = tl.maximum(tl.cdiv(tiles, segments), least_tiles)
    return begin, size, tl.maximum(tl.cdiv(tiles, size), 1)


@triton.jit
def record(sums, segment, kept, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Write what `attend` returns for a segment.

    kept: address of a KV head's values [segments, rows, D], and of maximum and sum of weights [segments, rows, 2];
    number of rows of a record, the mask [ROWS, PADDED] of those that exist, and the mask [ROWS].
    """
    acc, greatest, total = sums
    values, stats, num_rows, there, rows_there = kept
    rows = segment * num_rows + tl.arange(0, acc.shape[0])
    tl.store(values + ((rows * HEAD_SIZE)[:, None] + tl.arange(0, PADDED)[None, :]), acc, mask=there)
    tl.store(stats + rows * 2, greatest, mask=rows_there)
    tl.store(stats + rows * 2 + 1, total, mask=rows_there)


@triton.jit
def first_segment(segments):
    """Return the segment that a loop over tiles begins with; 0 without segments."""
    segment = 0
    if segments is not None:
        segment = segments[0]
    return segment


@triton.jit
def recorded_at_edge(rows, sums, tile, end, segment, segments, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return the sums and the segment to go on with after a tile.

    After the last tile of a segment, unless it is the last before `end`, writes its record and begins the next one.
    rows, sums: as in `weigh`; end, segments: as in `attend`.
    """
    _, size, begin, kept = segments
    if (tile + 1 == begin + (segment + 1) * size) & (tile + 1 < end):
        acc, greatest, total = sums
        record((acc, greatest * rows[3], total), segment, kept, HEAD_SIZE, PADDED)
        sums = nothing_yet(rows[0])
        segment += 1
    return sums, segment
