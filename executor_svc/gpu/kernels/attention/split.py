"""Decode attention for few sequences: keys are split into segments, whose results the last program merges.

As in Flash-Decoding (Dao et al., 2023); a sequence has one token, or as many as fit a tile, such as drafts. Segments
depend on the sequence's length, the model and the GPU, not on the batch; the number of programs depends on the batch.
Among latents each program has one segment, since what it leaves is as large as many keys; a second kernel merges them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.config import DRAFTS_ROWS, AttentionKind, Phase
from executor_svc.gpu.kernels.attention.keys import attend
from executor_svc.gpu.kernels.attention.merge import merge_segments, write_merged
from executor_svc.gpu.kernels.attention.records import record, segments_of
from executor_svc.gpu.kernels.attention.segments import MAX_SEGMENTS, Segments, SegmentScratch, default_segments
from executor_svc.gpu.kernels.attention.tile import (
    as_multiplied,
    divided,
    first_seen,
    query_places,
    rows_and_columns,
    sink_exponents,
    with_sink,
)
from executor_svc.gpu.kernels.attention.variants import cases, variants_of
from executor_svc.gpu.kernels.variant import Variant

_SCRATCH = {"sums": "*fp32", "stats": "*fp32", "counters": "*i32"}
"""Types of its arguments."""


def split_tokens(kind: AttentionKind) -> int:
    """Return the most tokens of a sequence in a batch that is split."""
    return 1 if kind.dtype == torch.float32 else max(1, DRAFTS_ROWS // kind.group)


@triton.jit
def share_of(
    query_start_loc, seq_lens, num_kv_heads, parts, segments, least_tiles, max_tokens, group, window,
    ROWS: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Return what this program computes, of one sequence's KV head: `parts` programs share its segments.

    Returns:
        head, sequence and its length; its first token in the batch, number of tokens, and first position;
        the rows of a record; token index [ROWS] of each row, and the number of rows that exist;
        first key tile, tiles of a segment, and segments of the sequence; first and last + 1 of this program's.
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
    begin, size, count = segments_of(length, position, window, segments, least_tiles, TILE, HAS_WINDOW)
    of_sequence = head, sequence, length, start, num_tokens, position
    of_rows = records, token, num_rows
    return of_sequence, of_rows, (begin, size, count, part * count // parts, (part + 1) * count // parts)


@triton.jit
def attend_share(
    query, more, cache, kv_head, of_sequence, of_rows, of_segments, block_tables, out, k_scale, v_scale, sinks, sums,
    stats, counters, table_stride, num_kv_heads, block_rows, value_rows, group, block_size, block_bits, parts, segments,
    scale, softcap, window, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, MORE: tl.constexpr,
    MORE_PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr, COPIES: tl.constexpr,
    STAGES: tl.constexpr, MERGES: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Write the result of a query tile [ROWS, PADDED] over this program's segments, or records of them.

    more, kv_head: as in `attend`; of_sequence, of_rows, of_segments: from `share_of`; other arguments as in
    `split_kernel`.
    """
    head, sequence, length, start, _, position = of_sequence
    records, token, num_rows = of_rows
    begin, size, count, first, after = of_segments
    rows = tl.arange(0, ROWS)
    there = rows_and_columns(rows < num_rows, HEAD_SIZE, PADDED)
    low = first_seen(position, window, HAS_WINDOW)
    query, more, inner, outer = as_multiplied(
        query, more, kv_head, k_scale, scale, softcap, MORE, HAS_SOFTCAP, HAS_SCALES
    )
    first_record = (sequence * num_kv_heads + head).to(tl.int64) * (segments * records)
    values, weights = sums + first_record * HEAD_SIZE, stats + first_record * 2
    kept = values, weights, records, there, rows < num_rows
    acc, greatest, total = attend(
        query, cache, kv_head, block_tables + sequence.to(tl.int64) * table_stride, position + token,
        begin + first * size, tl.minimum(begin + after * size, tl.cdiv(length, TILE)), low, length,
        tl.cdiv(first_seen(length - 1, window, HAS_WINDOW), TILE), (position + 1) // TILE, block_rows, value_rows,
        block_size, block_bits, inner, outer, window, more, HEAD_SIZE, PADDED, WIDTH, MORE, MORE_PADDED, TILE,
        HAS_WINDOW, HAS_SOFTCAP, COPIES, STAGES, (first, size, begin, kept),
    )  # fmt: skip
    if count == 1:
        places = query_places(out, rows, token, head, start, num_kv_heads * group * HEAD_SIZE, group, HEAD_SIZE, PADDED)
        if HAS_SINKS:
            exponents = sink_exponents(sinks, rows, head, group, softcap, HAS_SOFTCAP)
            acc, total = with_sink(acc, greatest, total, exponents)
        result = divided(acc, total, kv_head, v_scale, HAS_SCALES)
        tl.store(places, result.to(out.dtype.element_ty), mask=there)
    else:
        record((acc, greatest, total), after - 1, kept, HEAD_SIZE, PADDED)
        if MERGES:
            counter = counters + sequence * num_kv_heads + head
            # Records of all threads are written before one thread counts, and read after.
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel") == tl.minimum(count, parts) - 1:
                tl.store(counter, 0)
                write_merged(
                    values, weights, records, 0, num_rows, count, out, v_scale, sinks, head, kv_head, start,
                    num_kv_heads, group, softcap, HEAD_SIZE, PADDED, MOST, HAS_SCALES, HAS_SINKS, HAS_SOFTCAP,
                )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "table_stride",
        "num_kv_heads",
        "block_rows",
        "value_rows",
        "group",
        "block_size",
        "block_bits",
        "parts",
        "segments",
        "least_tiles",
        "max_tokens",
        "window",
    ],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_tables", "k_scale", "v_scale", "sinks"],
)
def split_kernel(
    q, cache, query_start_loc, seq_lens, block_tables, out, k_scale, v_scale, sinks, sums, stats, counters, q_stride,
    table_stride, num_kv_heads, block_rows, value_rows, group, block_size, block_bits, parts, segments, least_tiles,
    max_tokens, scale, softcap, window, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
    MORE: tl.constexpr, MORE_PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr, COPIES: tl.constexpr,
    STAGES: tl.constexpr, MANY: tl.constexpr, MERGES: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Process one of `parts` runs of segments of one sequence's KV head.

    Writes weighted values to sums [S, KVH, segments, max_tokens * H / KVH, D], and maximum and sum of the weights to
    stats [the same, 2]. With MERGES the last of a KV head's programs to end, found by counters [S, KVH], merges them.
    Without MANY max_tokens is 1.
    """
    of_sequence, of_rows, of_segments = share_of(
        query_start_loc, seq_lens, num_kv_heads, parts, segments, least_tiles, max_tokens, group, window,
        ROWS, TILE, HAS_WINDOW, MANY,
    )  # fmt: skip
    head, _, _, start, num_tokens, _ = of_sequence
    _, token, num_rows = of_rows
    if (of_segments[3] == of_segments[4]) | (num_tokens == 0):
        return
    rows = tl.arange(0, ROWS)
    q_places = query_places(q, rows, token, head, start, q_stride, group, WIDTH, PADDED)
    query = tl.load(q_places, mask=rows_and_columns(rows < num_rows, HEAD_SIZE, PADDED), other=0.0)
    more, kv_head = query, head
    if MORE > 0:
        last = query_places(q + (WIDTH - MORE), rows, token, head, start, q_stride, group, WIDTH, MORE_PADDED)
        more = tl.load(last, mask=rows_and_columns(rows < num_rows, MORE, MORE_PADDED), other=0.0)
        kv_head = 0  # all heads have the same keys
    attend_share(
        query, more, cache, kv_head, of_sequence, of_rows, of_segments, block_tables, out, k_scale, v_scale, sinks,
        sums, stats, counters, table_stride, num_kv_heads, block_rows, value_rows, group, block_size, block_bits,
        parts, segments, scale, softcap, window, HEAD_SIZE, PADDED, WIDTH, MORE, MORE_PADDED, ROWS, TILE, HAS_WINDOW,
        HAS_SOFTCAP, HAS_SCALES, HAS_SINKS, COPIES, STAGES, MERGES, MOST,
    )  # fmt: skip


def split_attention(
    call: AttentionCall, arch: int, scratch: SegmentScratch, num_sms: int, segments: Segments | None = None
) -> None:
    """Write `call.out` for a batch of few tokens per sequence, on a GPU of this capability and number of SMs.

    `segments`, for measurements and tests, replaces the default ones. Raises ValueError.
    """
    call.check()
    segments = segments or default_segments(call.kind)
    tokens = split_tokens(call.kind)
    if call.max_query_len > tokens:
        raise ValueError(f"max_query_len must be at most {tokens} for attention to be split")
    merges = call.latent is None
    parts = segments.parts(call.num_seqs, call.num_kv_heads, num_sms) if call.num_seqs else 1
    most = segments.max_segments(call.num_kv_heads, num_sms) if merges else parts
    records = call.num_seqs * call.max_query_len * call.num_heads * most
    scratch.check(records * (call.head_size + 2), call.num_seqs * call.num_kv_heads)
    if not call.num_seqs:
        return
    many = call.max_query_len > 1
    config = call.config(Phase.DRAFTS if many else Phase.SPLIT, arch)
    sums, stats = scratch.floats, scratch.floats[records * call.head_size :]
    least_tiles = max(1, segments.least_keys // config.tile)
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
        call.sinks,
        sums,
        stats,
        scratch.counters,
        call.q.stride(0),
        call.block_tables.stride(0),
        call.num_kv_heads,
        call.block_rows,
        call.value_rows,
        call.group,
        call.block_size,
        call.block_bits,
        parts,
        most,
        least_tiles,
        call.max_query_len,
        scale,
        softcap,
        call.span,
        **_split_constants(many, merges),
        **call.constants(config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    if not merges:
        merge_segments(call, config, sums, stats, most, least_tiles)


def _split_constants(many: bool, merges: bool) -> dict[str, Any]:
    return {"MANY": many, "MERGES": merges, "MOST": MAX_SEGMENTS}


def variants() -> list[Variant]:
    """Return the variants compiled ahead of time: for one token and for several, each of `variants.cases`."""
    drafts = _variants(Phase.DRAFTS, " drafts")
    return [*_variants(Phase.SPLIT, ""), *(replace(each, quick=False) for each in drafts)]


def _variants(phase: Phase, mark: str) -> list[Variant]:
    name, many = f"attention split{mark}", phase is Phase.DRAFTS
    known = [kind for kind in cases(phase) if not kind.more]
    latents = [kind for kind in cases(phase) if kind.more]
    found = variants_of(split_kernel, name, phase, known, lambda _: _split_constants(many, True), _SCRATCH)
    return found + variants_of(split_kernel, name, phase, latents, lambda _: _split_constants(many, False), _SCRATCH)
