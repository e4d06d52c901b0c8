"""Decode attention for few sequences: keys are split into segments, whose results a second kernel merges.

As in Flash-Decoding (Dao et al., 2023); a sequence has one token, or as many as fit a tile, such as drafts. Segments
depend on the sequence's length, the model and the GPU, not on the batch; the number of programs depends on the batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.config import (
    COPIED_BLOCK,
    DRAFTS_ROWS,
    AttentionConfig,
    AttentionKind,
    Phase,
    padded,
)
from executor_svc.gpu.kernels.attention.keys import attend
from executor_svc.gpu.kernels.attention.tile import (
    as_multiplied,
    divided,
    first_seen,
    query_places,
    rows_and_columns,
)
from executor_svc.gpu.kernels.attention.variants import cases, variants_of
from executor_svc.gpu.kernels.variant import Variant

MAX_SEGMENTS = 128
"""Maximum segments of a sequence: the merging kernel holds all of them at once."""
_PROGRAMS_PER_SM = 4
"""Target number of programs per SM: for enough concurrent loads, and short last programs."""
_UNITE_WARPS = 4
LEAST_KEYS = 256
"""Minimum keys of a segment: its results are small compared to these keys."""


def max_segments(num_kv_heads: int, num_sms: int) -> int:
    """Return the maximum segments of a sequence, a power of 2 with which one sequence fills the GPU."""
    return min(MAX_SEGMENTS, _power_of_2(_PROGRAMS_PER_SM * num_sms // num_kv_heads))


def wants_split(
    num_seqs: int, num_kv_heads: int, max_query_len: int, max_seq_len: int, num_sms: int, tile_tokens: int = 1
) -> bool:
    """Return whether to split a batch: decodes too few to fill a GPU, and long enough.

    tile_tokens: tokens of a sequence that fit a tile, as of `split_tokens`.
    """
    fits = 1 <= max_query_len <= tile_tokens and max_seq_len > LEAST_KEYS and num_seqs > 0
    has_scratch = num_seqs * max_query_len <= _max_tokens(num_kv_heads, num_sms)
    return fits and has_scratch and _parts(num_seqs, num_kv_heads, num_sms) > 1


def split_tokens(kind: AttentionKind) -> int:
    """Return the most tokens of a sequence in a batch that is split."""
    return 1 if kind.dtype == torch.float32 else max(1, DRAFTS_ROWS // kind.group)


def scratch_floats(num_heads: int, num_kv_heads: int, head_size: int, num_sms: int) -> int:
    """Return the floats of scratch memory that any batch with `wants_split` needs at most."""
    return _max_tokens(num_kv_heads, num_sms) * num_heads * max_segments(num_kv_heads, num_sms) * (head_size + 2)


def _max_tokens(num_kv_heads: int, num_sms: int) -> int:
    """Return the most tokens of a batch that is split: as many as sequences of one token, in the same memory."""
    return _PROGRAMS_PER_SM * num_sms // (2 * num_kv_heads)


def _parts(num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Return the number of programs that share the segments of a sequence's KV head."""
    wanted = _PROGRAMS_PER_SM * num_sms // (num_seqs * num_kv_heads)
    return min(_power_of_2(wanted), max_segments(num_kv_heads, num_sms))


def _power_of_2(number: int) -> int:
    """Return the largest power of 2 up to the number, at least 1."""
    return 1 << max(0, number.bit_length() - 1)


@triton.jit
def segments_of(
    length, position, window, segments, TILE: tl.constexpr, LEAST_TILES: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Return first key tile, tiles of a segment, and segments of a sequence; one segment without tiles if empty.

    position: of the sequence's first token in the batch.
    """
    begin = first_seen(position, window, HAS_WINDOW) // TILE
    tiles = tl.cdiv(length, TILE) - begin
    size = tl.maximum(tl.cdiv(tiles, segments), LEAST_TILES)
    return begin, size, tl.maximum(tl.cdiv(tiles, size), 1)


@triton.jit(
    do_not_specialize=[
        "table_stride",
        "num_kv_heads",
        "group",
        "block_size",
        "block_bits",
        "parts",
        "segments",
        "max_tokens",
        "window",
    ],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_tables", "k_scale", "v_scale"],
)
def split_kernel(
    q,
    cache,
    query_start_loc,
    seq_lens,
    block_tables,
    out,
    k_scale,
    v_scale,
    sums,
    stats,
    q_stride,
    table_stride,
    num_kv_heads,
    group,
    block_size,
    block_bits,
    parts,
    segments,
    max_tokens,
    scale,
    softcap,
    window,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    COPIES: tl.constexpr,
    STAGES: tl.constexpr,
    MANY: tl.constexpr,
):
    """Process every parts-th segment of one sequence's KV head.

    Writes weighted values to sums [S, KVH, max_tokens, H / KVH, segments, D], and maximum and sum of the weights to
    stats [the same, 2]. A sequence of one segment is finished here. Without MANY max_tokens is 1.
    """
    program = tl.program_id(0)
    head = program % num_kv_heads
    part = program // num_kv_heads % parts
    sequence = program // (num_kv_heads * parts)
    length = tl.load(seq_lens + sequence)
    start = tl.load(query_start_loc + sequence)
    num_tokens = tl.load(query_start_loc + sequence + 1) - start
    rows = tl.arange(0, ROWS)
    if MANY:
        token = rows // group
        num_rows = num_tokens * group
        position = length - num_tokens
        records = max_tokens * group
    else:
        token = tl.zeros([ROWS], tl.int32)
        num_rows = group
        position = length - 1
        records = group
    begin, size, count = segments_of(length, position, window, segments, TILE, LEAST_TILES, HAS_WINDOW)
    if (part >= count) | (num_tokens == 0):
        return
    there = rows_and_columns(rows < num_rows, HEAD_SIZE, PADDED)
    low = first_seen(position, window, HAS_WINDOW)
    for segment in range(part, count, parts):
        # Loaded again for each segment: kept values would need registers.
        q_places = query_places(q, rows, token, head, start, q_stride, group, HEAD_SIZE, PADDED)
        query = tl.load(q_places, mask=there, other=0.0)
        query, inner, outer = as_multiplied(query, head, k_scale, scale, softcap, HAS_SOFTCAP, HAS_SCALES)
        first = begin + segment * size
        acc, greatest, total = attend(
            query,
            cache,
            head,
            block_tables + sequence.to(tl.int64) * table_stride,
            position + token,
            first,
            tl.minimum(first + size, tl.cdiv(length, TILE)),
            low,
            length,
            tl.cdiv(first_seen(length - 1, window, HAS_WINDOW), TILE),
            (position + 1) // TILE,
            num_kv_heads,
            block_size,
            block_bits,
            inner,
            outer,
            window,
            HEAD_SIZE,
            PADDED,
            TILE,
            HAS_WINDOW,
            HAS_SOFTCAP,
            COPIES,
            STAGES,
        )
        if count == 1:
            places = query_places(
                out, rows, token, head, start, num_kv_heads * group * HEAD_SIZE, group, HEAD_SIZE, PADDED
            )
            result = divided(acc, total, head, v_scale, HAS_SCALES)
            tl.store(places, result.to(out.dtype.element_ty), mask=there)
        else:
            record = (sequence * num_kv_heads + head).to(tl.int64) * records * segments + segment
            within = rows * segments
            columns = tl.arange(0, PADDED)
            tl.store(sums + record * HEAD_SIZE + ((within * HEAD_SIZE)[:, None] + columns[None, :]), acc, mask=there)
            tl.store(stats + record * 2 + within * 2, greatest, mask=rows < num_rows)
            tl.store(stats + record * 2 + within * 2 + 1, total, mask=rows < num_rows)


@triton.jit(
    do_not_specialize=["num_heads", "group", "segments", "max_tokens", "window"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "v_scale"],
)
def unite_kernel(
    query_start_loc,
    seq_lens,
    out,
    v_scale,
    sums,
    stats,
    num_heads,
    group,
    segments,
    max_tokens,
    window,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    MOST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    MANY: tl.constexpr,
):
    """Merge the segments of one token's query head, always in the same order, if there are several."""
    program = tl.program_id(0)
    head = program % num_heads
    if MANY:
        token = program // num_heads % max_tokens
        sequence = program // (num_heads * max_tokens)
    else:
        token = 0
        sequence = program // num_heads
    length = tl.load(seq_lens + sequence)
    start = tl.load(query_start_loc + sequence)
    num_tokens = tl.load(query_start_loc + sequence + 1) - start
    if MANY:
        position = length - num_tokens
        first_row = (sequence * (num_heads // group) + head // group) * max_tokens * group
        record = (first_row + token * group + head % group).to(tl.int64) * segments
    else:
        position = length - 1
        record = program.to(tl.int64) * segments
    _, _, count = segments_of(length, position, window, segments, TILE, LEAST_TILES, HAS_WINDOW)
    if (count == 1) | (token >= num_tokens):
        return
    every = tl.arange(0, MOST)
    greatest = tl.load(stats + (record + every) * 2, mask=every < count, other=float("-inf"))
    highest = tl.max(greatest, 0)
    totals = tl.load(stats + (record + every) * 2 + 1, mask=every < count, other=0.0)
    total = tl.sum(totals * tl.exp2(greatest - highest), 0)
    columns = tl.arange(0, PADDED)
    acc = tl.zeros([PADDED], tl.float32)
    CHUNK: tl.constexpr = 4096 // PADDED
    for first in range(0, count, CHUNK):
        some = first + tl.arange(0, CHUNK)
        there = rows_and_columns(some < count, HEAD_SIZE, PADDED)
        values = tl.load(sums + ((record + some) * HEAD_SIZE)[:, None] + columns[None, :], mask=there, other=0.0)
        most = tl.load(stats + (record + some) * 2, mask=some < count, other=float("-inf"))
        acc += tl.sum(values * tl.exp2(most - highest)[:, None], 0)
    result = acc / total
    if HAS_SCALES:
        result *= tl.load(v_scale + head // group)
    places = out + ((start + token).to(tl.int64) * num_heads + head) * HEAD_SIZE + columns
    tl.store(places, result.to(out.dtype.element_ty), mask=columns < HEAD_SIZE)


def split_attention(call: AttentionCall, arch: int, scratch: Tensor, num_sms: int) -> None:
    """Write `call.out` for a batch of few tokens per sequence, on a GPU of this capability and number of SMs.

    scratch: `scratch_floats` float32 numbers, in use only until the next kernel of the stream. Raises ValueError.
    """
    call.check()
    most = split_tokens(call.kind)
    if call.max_query_len > most:
        raise ValueError(f"max_query_len must be at most {most} for attention to be split")
    segments = max_segments(call.num_kv_heads, num_sms)
    records = call.num_seqs * call.max_query_len * call.num_heads * segments
    if scratch.numel() < records * (call.head_size + 2) or scratch.dtype.itemsize != 4 or not scratch.is_contiguous():
        raise ValueError(f"scratch must be contiguous, of at least {records * (call.head_size + 2)} float32")
    if not call.num_seqs:
        return
    many = call.max_query_len > 1
    config = call.config(Phase.DRAFTS if many else Phase.DECODE, arch)
    sums, stats = scratch, scratch[records * call.head_size :]
    parts = _parts(call.num_seqs, call.num_kv_heads, num_sms)
    scale, softcap = call.factors()
    split_kernel[(call.num_seqs * parts * call.num_kv_heads,)](
        call.q,
        call.cache(config),
        call.query_start_loc,
        call.seq_lens,
        call.block_tables,
        call.out,
        call.k_scale,
        call.v_scale,
        sums,
        stats,
        call.q.stride(0),
        call.block_tables.stride(0),
        call.num_kv_heads,
        call.group,
        call.block_size,
        call.block_bits,
        parts,
        segments,
        call.max_query_len,
        scale,
        softcap,
        call.window or 0,
        **_split_constants(config, many),
        **call.constants(config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    _unite(call, config, sums, stats, segments, many)


def _unite(
    call: AttentionCall, config: AttentionConfig, sums: Tensor, stats: Tensor, segments: int, many: bool
) -> None:
    """Enqueue the second kernel, over the results of the first."""
    unite_kernel[(call.num_seqs * call.max_query_len * call.num_heads,)](
        call.query_start_loc,
        call.seq_lens,
        call.out,
        call.v_scale,
        sums,
        stats,
        call.num_heads,
        call.group,
        segments,
        call.max_query_len,
        call.window or 0,
        HEAD_SIZE=call.head_size,
        PADDED=padded(call.head_size),
        HAS_WINDOW=call.window is not None,
        HAS_SCALES=call.k_scale is not None,
        **_unite_constants(config, many),
        num_warps=_UNITE_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
    )


def _split_constants(config: AttentionConfig, many: bool) -> dict[str, Any]:
    return {"LEAST_TILES": LEAST_KEYS // config.tile, "MANY": many}


def _unite_constants(config: AttentionConfig, many: bool) -> dict[str, Any]:
    return _split_constants(config, many) | {"TILE": config.tile, "MOST": MAX_SEGMENTS}


def variants() -> list[Variant]:
    """Return the variants compiled ahead of time: both kernels for each of `variants.cases`."""
    return [*_variants(Phase.DECODE, ""), *_variants(Phase.DRAFTS, " drafts")]


def _variants(phase: Phase, mark: str) -> list[Variant]:
    floats = {"sums": "*fp32", "stats": "*fp32"}
    many = phase is Phase.DRAFTS
    # The second kernel reads no cache: it does not depend on how keys are loaded, nor on a softcap.
    few = (case for case in cases(phase) if case.block_size != COPIED_BLOCK and not case.softcap)
    split_constants, unite_constants = partial(_split_constants, many=many), partial(_unite_constants, many=many)
    split = variants_of(split_kernel, f"attention split{mark}", phase, cases(phase), split_constants, floats)
    unite = variants_of(unite_kernel, f"attention unite{mark}", phase, few, unite_constants, floats)
    found = split + [replace(each, num_warps=_UNITE_WARPS, num_stages=1) for each in unite]
    return [replace(each, quick=each.quick and not many) for each in found]
