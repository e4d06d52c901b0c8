"""Work lists of CPU attention: made once per step, shared by all layers.

A *query tile* is up to `query_tile` consecutive tokens of one sequence with all their heads; a *pair* is a query tile
and one of the key tiles that it sees. Key tiles lie at absolute positions. A query tile counts the ones that it sees
from the first on: key tile 0, or with a window the one where the window of its first token begins. Tiles of a group
are sorted by their number of key tiles, most first, and pairs by that count j, so that the tiles which see a j-th
key tile are the first ones, a slice, and a row adds up its key tiles in the order of positions, whatever else is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.kernels.interface import KEY_TILE, AttentionShape

_Ints = NDArray[np.int64]

MIN_TILE_ROWS = 4
"""Rows of a bmm tile at least: MKL takes other paths, with other bits, for 1, 2 and 3 (measured)."""

DECODE_TILE, SMALL_TILE, LARGE_TILE = 1, 16, 64
"""Tokens of a query tile: for decodes, for ends of chunks, and for long chunks."""

_CHUNK_ELEMENTS = 1 << 19
_GROUP_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pairs lo to hi, whose keys and values are gathered and multiplied at once."""

    lo: int
    hi: int
    segments: list[tuple[int, int, int]]
    """(lo, hi, first tile) of pairs with the same j; their query tiles are consecutive."""
    blank_rows: Tensor | None
    """Rows of the chunk's gathered [pairs * KVH * KEY_TILE, DP] beyond their sequence or before the window of their
    whole query tile: what the cache holds there is not theirs. None: there are none."""


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Query tiles of one size that are computed together."""

    query_tile: int
    num_tiles: int
    q_rows: Tensor
    """[num_tiles * query_tile]: token of each row; rows beyond a tile's tokens repeat its last."""
    pair_tile: Tensor
    """[pairs]: query tile of each pair."""
    key_rows: Tensor
    """[pairs * KVH * KEY_TILE / B]: rows of the cache seen as [N * 2 * KVH, B * DP] that hold the keys."""
    value_rows: Tensor
    hiding_pairs: Tensor | None
    """Pairs with a key that some row must not see; None: all pairs, or nearly so."""
    hidden: Tensor
    """[hiding pairs, 1, rows of a tile, KEY_TILE] bool: keys after the row's own position or before its window."""
    levels: list[tuple[int, int, int]]
    """(lo, hi, number of tiles) of the pairs with each query tile's j-th key tile, in order of j."""
    chunks: list[Chunk]
    out_source: Tensor
    """Rows of [num_tiles * query_tile] that are real, and `out_rows`, the tokens that they are."""
    out_rows: Tensor


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """All groups of a step, and the cache rows that it writes."""

    num_tokens: int
    write_rows: Tensor
    """[T * 2 * KVH]: rows of the cache seen as [N * 2 * KVH * B, DP]."""
    groups: list[TileGroup]


def tile_rows(shape: AttentionShape, query_tile: int) -> int:
    """Return the rows of a query tile as bmm sees it: tokens times query heads of a KV head, padded."""
    return max(MIN_TILE_ROWS, query_tile * shape.group)


def _ranges(counts: _Ints) -> _Ints:
    """Return 0..counts[0]-1, 0..counts[1]-1, … in one array."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Query tiles as columns: sequence, first token, number of tokens, position of the first token, first key seen."""

    seq: _Ints
    start: _Ints
    count: _Ints
    position: _Ints
    first_key: _Ints

    def take(self, index: _Ints) -> _Tiles:
        columns = (self.seq, self.start, self.count, self.position, self.first_key)
        return _Tiles(*(column[index] for column in columns))

    @property
    def levels(self) -> _Ints:
        """Key tiles that each query tile sees."""
        seen: _Ints = -(-(self.position + self.count) // KEY_TILE) - self.first_key // KEY_TILE
        return seen


def _cut(starts: _Ints, lens: _Ints, positions: _Ints, seqs: _Ints, size: int, window: int | None) -> _Tiles:
    """Cut runs of tokens into tiles of up to `size`."""
    per_run = -(-lens // size)
    run = np.repeat(np.arange(len(lens)), per_run)
    offset = _ranges(per_run) * size
    first = positions[run] + offset
    first_key = np.zeros_like(first) if window is None else np.maximum(first - window + 1, 0)
    return _Tiles(seqs[run], starts[run] + offset, np.minimum(lens[run] - offset, size), first, first_key)


def _tiles_by_size(
    query_start_loc: _Ints, seq_lens: _Ints, sizes: tuple[int, ...], window: int | None
) -> list[tuple[int, _Tiles]]:
    """Give each sequence's tokens to tiles: as many of the largest size as are full, the rest to the next smaller."""
    starts, lens = query_start_loc[:-1], np.diff(query_start_loc)
    positions, seqs = seq_lens - lens, np.arange(len(lens))
    result = []
    for size in sorted(sizes, reverse=True):
        smallest = size == min(sizes)
        if smallest:
            taken = lens
        elif size == SMALL_TILE:
            taken = np.where(lens > DECODE_TILE, lens, 0)
        else:
            taken = lens // size * size
        chosen = taken > 0
        if chosen.any():
            tiles = _cut(starts[chosen], taken[chosen], positions[chosen], seqs[chosen], size, window)
            result.append((size, tiles))
        starts, lens, positions = starts + taken, lens - taken, positions + taken
    return result


class PlanBuilder:
    """Builds a plan for one attention shape and block size."""

    def __init__(self, shape: AttentionShape, block_size: int, query_tiles: tuple[int, ...]) -> None:
        self._shape = shape
        self._block_size = block_size
        self._query_tiles = query_tiles
        tile_elements = shape.num_kv_heads * KEY_TILE * shape.padded_head_size
        self._chunk_pairs = max(4, _CHUNK_ELEMENTS // tile_elements)

    def build(
        self, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor
    ) -> CpuAttentionPlan:
        """Return the plan of a step: arguments as in `input_batch.ForwardBatch`."""
        starts = query_start_loc.numpy().astype(np.int64)
        lens = seq_lens.numpy().astype(np.int64)
        tables = block_tables.numpy().astype(np.int64)
        groups = []
        for size, tiles in _tiles_by_size(starts, lens, self._query_tiles, self._shape.window):
            ordered = tiles.take(np.argsort(-tiles.levels, kind="stable"))
            for part in self._parts(ordered, size):
                groups.append(self._group(part, size, lens, tables))
        return CpuAttentionPlan(slot_mapping.shape[0], self._write_rows(slot_mapping), groups)

    def _write_rows(self, slot_mapping: Tensor) -> Tensor:
        heads = 2 * self._shape.num_kv_heads
        slots = slot_mapping.numpy()
        block, offset = np.divmod(slots, self._block_size)
        rows = (block[:, None] * heads + np.arange(heads)) * self._block_size + offset[:, None]
        return torch.from_numpy(rows.reshape(-1))

    def _parts(self, tiles: _Tiles, size: int) -> list[_Tiles]:
        """Split tiles so that the scores of a part, which are kept until its softmax, stay within bounds."""
        pair_scores = self._shape.num_kv_heads * tile_rows(self._shape, size) * KEY_TILE
        part_of = (np.cumsum(tiles.levels) * pair_scores - 1) // _GROUP_SCORES
        borders = np.flatnonzero(np.diff(part_of)) + 1
        return [tiles.take(index) for index in np.split(np.arange(len(tiles.seq)), borders)]

    def _group(self, tiles: _Tiles, size: int, seq_lens: _Ints, tables: _Ints) -> TileGroup:
        num_real = len(tiles.seq)
        if self._shape.num_kv_heads == 1:  # a bmm of one matrix takes another path: never fewer than two tiles
            tiles = tiles.take(np.concatenate([[0], np.arange(num_real)]))
        first = len(tiles.seq) - num_real
        levels = tiles.levels
        per_level = (levels[None, :] > np.arange(levels[0])[:, None]).sum(1)
        pair_tile = _ranges(per_level)
        pair_level = np.repeat(np.arange(len(per_level)), per_level)
        key_start = (tiles.first_key[pair_tile] // KEY_TILE + pair_level) * KEY_TILE
        ends = np.cumsum(per_level)
        spans = list(zip((ends - per_level).tolist(), ends.tolist(), per_level.tolist(), strict=True))

        within = np.minimum(np.arange(size), tiles.count[:, None] - 1)
        real = (np.arange(size) < tiles.count[:, None]) & (np.arange(len(tiles.seq)) >= first)[:, None]
        q_rows = (tiles.start[:, None] + within).reshape(-1)
        out_source = np.flatnonzero(real)
        positions = tiles.position[:, None] + within
        hiding, hides_most = self._hiding(positions[pair_tile], key_start)
        blocks = self._pair_blocks(tables, tiles.seq[pair_tile], key_start)
        key_rows = blocks[:, None, :] * (2 * self._shape.num_kv_heads) + np.arange(self._shape.num_kv_heads)[:, None]
        key_rows = key_rows.reshape(-1)
        return TileGroup(
            query_tile=size,
            num_tiles=len(tiles.seq),
            q_rows=torch.from_numpy(q_rows),
            pair_tile=torch.from_numpy(pair_tile),
            key_rows=torch.from_numpy(key_rows),
            value_rows=torch.from_numpy(key_rows + self._shape.num_kv_heads),
            hiding_pairs=None if hides_most else torch.from_numpy(hiding),
            hidden=self._hidden(positions[pair_tile[hiding]], key_start[hiding]),
            levels=spans,
            chunks=self._chunks(
                spans,
                size,
                before=np.maximum(tiles.first_key[pair_tile] - key_start, 0),
                beyond=np.maximum(key_start + KEY_TILE - seq_lens[tiles.seq[pair_tile]], 0),
            ),
            out_source=torch.from_numpy(out_source),
            out_rows=torch.from_numpy(q_rows[out_source]),
        )

    def _pair_blocks(self, tables: _Ints, seqs: _Ints, key_start: _Ints) -> _Ints:
        """Return [pairs, KEY_TILE / B] block ids; columns beyond the table repeat its last and are hidden."""
        columns = key_start[:, None] // self._block_size + np.arange(KEY_TILE // self._block_size)
        blocks: _Ints = tables[seqs[:, None], np.minimum(columns, tables.shape[1] - 1)]
        return blocks

    def _hiding(self, positions: _Ints, key_start: _Ints) -> tuple[_Ints, bool]:
        """Return the pairs in which a row must not see some key, or all pairs and True if those are most.

        `positions` [pairs, query tile] are those of each pair's query tile.
        """
        hides = key_start + KEY_TILE > positions[:, 0] + 1
        if self._shape.window is not None:
            hides |= key_start <= positions[:, -1] - self._shape.window
        hiding = np.flatnonzero(hides)
        most = 2 * len(hiding) > len(hides)
        return (np.arange(len(hides)) if most else hiding), most

    def _hidden(self, positions: _Ints, key_start: _Ints) -> Tensor:
        """Return `TileGroup.hidden` of pairs: the positions [pairs, query tile] of their rows, and where keys begin."""
        last_seen = (positions - key_start[:, None])[:, :, None]  # [pairs, query tile, 1]
        keys = np.arange(KEY_TILE)
        hidden = keys > last_seen
        if self._shape.window is not None:
            hidden |= keys <= last_seen - self._shape.window
        rows = np.repeat(hidden, self._shape.group, axis=1)  # row = token * group + head of the group
        padding = tile_rows(self._shape, positions.shape[1]) - rows.shape[1]
        if padding:
            rows = np.concatenate([rows, np.repeat(rows[:, :1], padding, axis=1)], axis=1)
        return torch.from_numpy(rows[:, None])

    def _chunks(self, spans: list[tuple[int, int, int]], size: int, before: _Ints, beyond: _Ints) -> list[Chunk]:
        """Cut pairs into chunks; those of larger query tiles never hold two levels, so that queries are a slice."""
        runs = [(0, spans[-1][1])] if size == DECODE_TILE else [(lo, hi) for lo, hi, _ in spans]
        chunks = []
        for lo, hi in runs:
            count = -(-(hi - lo) // self._chunk_pairs)
            borders = np.linspace(lo, hi, count + 1).astype(np.int64).tolist()
            for start, end in pairwise(borders):
                segments = [
                    (max(a, start), min(b, end), max(a, start) - a) for a, b, _ in spans if a < end and b > start
                ]
                chunks.append(Chunk(start, end, segments, self._blank_rows(before[start:end], beyond[start:end])))
        return chunks

    def _blank_rows(self, before: _Ints, beyond: _Ints) -> Tensor | None:
        """Return the rows of gathered values that are the first `before` or last `beyond` of their pair's key tile."""
        pairs = np.flatnonzero(before + beyond)
        if not len(pairs):
            return None
        heads = self._shape.num_kv_heads
        tile_start = (pairs[:, None] * heads + np.arange(heads)).reshape(-1) * KEY_TILE
        first, last = np.repeat(before[pairs], heads), np.repeat(beyond[pairs], heads)
        starts = np.concatenate([tile_start, tile_start + KEY_TILE - last])
        counts = np.concatenate([first, last])
        return torch.from_numpy(np.repeat(starts, counts) + _ranges(counts))
