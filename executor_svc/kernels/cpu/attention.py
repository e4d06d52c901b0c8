"""Paged attention on the CPU for prefill chunks and decodes in one batch.

After flash attention (Dao et al., 2022) with keys in tiles at absolute positions, but with the exact maximum of each
row taken first: a maximum has the same bits in any order, and no rescaling is needed. A row's weighted values are then
summed tile by tile in the order of positions, in fp32. Keys and values come from the cache, within a chunk too.
So a row's bits depend on its own query and on its sequence's cache only: with a window, rows of a tile may be led
through key tiles before their own window, whose values they add with weight 0. No loop runs over sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.cpu.attention_plan import DECODE_TILE, Chunk, CpuAttentionPlan, TileGroup, tile_rows
from executor_svc.kernels.cpu.workspace import Workspace
from executor_svc.kernels.interface import KEY_TILE, AttentionShape


def attention(
    q: Tensor, kv_layer: Tensor, shape: AttentionShape, plan: CpuAttentionPlan, workspace: Workspace
) -> Tensor:
    """Return [T, H * DP] for q [T, H, DP] (any strides) and kv_layer [N, 2, KVH, B, DP], contiguous."""
    out = q.new_empty(q.shape[0], shape.num_heads * shape.padded_head_size)
    if plan.num_tokens < q.shape[0]:
        out[plan.num_tokens :] = 0
    cache_rows = kv_layer.view(-1, kv_layer.shape[3] * kv_layer.shape[4])
    for group in plan.groups:
        _attend(q, cache_rows, shape, group, workspace, out)
    return out


def _attend(
    q: Tensor, cache_rows: Tensor, shape: AttentionShape, group: TileGroup, work: Workspace, out: Tensor
) -> None:
    """Compute the rows of one group of query tiles and store them in out."""
    queries = _queries(q, shape, group)
    heads, rows = shape.num_kv_heads, queries.shape[2]
    num_pairs = group.levels[-1][1]
    weights = work.take("scores", (num_pairs, heads, rows, KEY_TILE), torch.float32)
    by_pair = queries.index_select(0, group.pair_tile) if group.query_tile == DECODE_TILE else None
    for chunk in group.chunks:
        keys = _gather(cache_rows, group.key_rows, chunk, num_pairs, shape, work)
        left = by_pair[chunk.lo : chunk.hi] if by_pair is not None else _slice(queries, chunk)
        scores = weights[chunk.lo : chunk.hi].flatten(0, 1)
        torch.bmm(left.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), out=scores)
        if shape.softcap is not None:
            scores.tanh_().mul_(shape.softcap)
    totals = _softmax_numerators(weights, group)
    values = torch.zeros(group.num_tiles, heads, rows, shape.padded_head_size)
    for chunk in group.chunks:
        tile = _gather(cache_rows, group.value_rows, chunk, num_pairs, shape, work, chunk.blank_rows)
        part = torch.bmm(weights[chunk.lo : chunk.hi].flatten(0, 1), tile.flatten(0, 1))
        part = part.view(chunk.hi - chunk.lo, heads, rows, -1)
        for lo, hi, first in chunk.segments:
            values[first : first + hi - lo] += part[lo - chunk.lo : hi - chunk.lo]
    values.div_(totals[..., None])
    _store(values, shape, group, out)


def _queries(q: Tensor, shape: AttentionShape, group: TileGroup) -> Tensor:
    """Return [tiles, KVH, rows, DP] fp32: the scaled queries of a tile, token by token, heads of a KV head together.

    With a softcap they are divided by it too: the scores that they give are those whose tanh is taken.
    """
    size, heads, per_kv = group.query_tile, shape.num_kv_heads, shape.group
    scale = shape.scale if shape.softcap is None else shape.scale / shape.softcap
    picked = q.index_select(0, group.q_rows).view(group.num_tiles, size, heads, per_kv, -1).transpose(1, 2)
    rows = tile_rows(shape, size)
    if rows == size * per_kv:
        tiles = picked.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        return tiles.view(group.num_tiles, heads, rows, -1).mul_(scale)
    tiles = torch.zeros(group.num_tiles, heads, rows, shape.padded_head_size)
    tiles[:, :, : size * per_kv] = picked.flatten(2, 3)
    return tiles.mul_(scale)


def _slice(queries: Tensor, chunk: Chunk) -> Tensor:
    """Return the query tiles of a chunk that holds one key tile."""
    ((lo, hi, first),) = chunk.segments
    return queries[first : first + hi - lo]


def _gather(
    cache_rows: Tensor,
    index: Tensor,
    chunk: Chunk,
    num_pairs: int,
    shape: AttentionShape,
    work: Workspace,
    blank_rows: Tensor | None = None,
) -> Tensor:
    """Return keys or values of a chunk's pairs: [pairs, KVH, KEY_TILE, DP] fp32, in scratch memory.

    Values at positions that may hold anything must be zeroed: their weight is 0, but 0 times a stale NaN is NaN.
    """
    per_pair = index.shape[0] // num_pairs
    rows = index[chunk.lo * per_pair : chunk.hi * per_pair]
    gathered = work.take("gathered", (rows.shape[0], cache_rows.shape[1]), cache_rows.dtype)
    torch.index_select(cache_rows, 0, rows, out=gathered)
    if blank_rows is not None:
        gathered.view(-1, shape.padded_head_size).index_fill_(0, blank_rows, 0.0)
    tiles = gathered.view(chunk.hi - chunk.lo, shape.num_kv_heads, KEY_TILE, shape.padded_head_size)
    if tiles.dtype == torch.float32:
        return tiles
    return work.take("tiles", tuple(tiles.shape), torch.float32).copy_(tiles)


def _softmax_numerators(weights: Tensor, group: TileGroup) -> Tensor:
    """Turn scores [pairs, KVH, rows, KEY_TILE] into exp(score - row maximum) in place; return the row sums per tile."""
    if group.hiding_pairs is None:
        weights.masked_fill_(group.hidden, float("-inf"))
    else:
        masked = weights.index_select(0, group.hiding_pairs).masked_fill_(group.hidden, float("-inf"))
        weights.index_copy_(0, group.hiding_pairs, masked)
    maxima = weights.amax(-1)
    top = maxima[: group.num_tiles].clone()
    for lo, hi, count in group.levels[1:]:
        torch.maximum(top[:count], maxima[lo:hi], out=top[:count])
    per_pair = top if len(group.levels) == 1 else top.index_select(0, group.pair_tile)
    weights.sub_(per_pair[..., None]).exp_()
    sums = weights.sum(-1)
    totals = sums[: group.num_tiles]
    for lo, hi, count in group.levels[1:]:
        totals[:count] += sums[lo:hi]
    return totals


def _store(values: Tensor, shape: AttentionShape, group: TileGroup, out: Tensor) -> None:
    """Copy the real rows of [tiles, KVH, rows, DP] to their tokens in out [T, H * DP]."""
    size, heads, per_kv = group.query_tile, shape.num_kv_heads, shape.group
    real = values[:, :, : size * per_kv].to(out.dtype)
    by_token = real.view(group.num_tiles, heads, size, per_kv, -1).transpose(1, 2).reshape(-1, out.shape[1])
    if by_token.shape[0] != group.out_source.shape[0]:
        by_token = by_token.index_select(0, group.out_source)
    out.index_copy_(0, group.out_rows, by_token)
