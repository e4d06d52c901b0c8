"""The segments of split attention, merged in a fixed order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.config import AttentionConfig, AttentionKind, Phase, padded
from executor_svc.gpu.kernels.attention.records import segments_of
from executor_svc.gpu.kernels.attention.segments import MAX_SEGMENTS
from executor_svc.gpu.kernels.attention.tile import query_places, rows_and_columns, sink_exponents
from executor_svc.gpu.kernels.attention.variants import cases, variants_of
from executor_svc.gpu.kernels.variant import Variant

_WARPS, _STAGES = 4, 2


@triton.jit
def merged(
    values,
    stats,
    num_rows,
    rows,
    there,
    count,
    sink,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the values [ROWS, PADDED] of some rows of a KV head, divided by their weights: segments in a fixed order.

    Args:
        values, stats, num_rows: as in `record`.
        rows, there: [ROWS] rows of a record, and whether they exist.
        count: segments, at most MOST.
        sink: None, or [ROWS] of `sink_exponents`.
        CHUNK: segments that are loaded at once.
    """
    # Past the L1 cache: other programs have just written them.
    every = tl.arange(0, MOST)
    places = stats + ((every * num_rows)[:, None] + rows[None, :]) * 2
    known = (every < count)[:, None] & there[None, :]
    greatest = tl.load(places, mask=known, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(places + 1, mask=known, other=0.0, cache_modifier=".cg")
    highest = tl.max(greatest, 0)
    if sink is not None:
        highest = tl.maximum(highest, sink)
    highest = tl.where(there, highest, 0.0)
    total = tl.sum(totals * tl.exp2(greatest - highest[None, :]), 0)
    if sink is not None:
        total += tl.exp2(sink - highest)
    columns = tl.arange(0, PADDED)
    acc = tl.zeros([rows.shape[0], PADDED], tl.float32)
    for first in range(0, count, CHUNK):
        some = first + tl.arange(0, CHUNK)
        # Rows come first: each warp has rows of its own then, where there are several, and adds without the others.
        at = (some * num_rows)[None, :] + rows[:, None]
        loaded = (some < count)[None, :] & there[:, None]
        most = tl.load(stats + at * 2, mask=loaded, other=float("-inf"), cache_modifier=".cg")
        wanted = loaded[:, :, None] & (columns < HEAD_SIZE)[None, None, :]
        addresses = values + ((at * HEAD_SIZE)[:, :, None] + columns[None, None, :])
        numbers = tl.load(addresses, mask=wanted, other=0.0, cache_modifier=".cg")
        acc += tl.sum(numbers * tl.exp2(most - highest[:, None])[:, :, None], 1)
    return acc / tl.where(there, total, 1.0)[:, None]


@triton.jit
def write_merged(
    values,
    stats,
    num_rows,
    begin,
    end,
    count,
    out,
    v_scale,
    sinks,
    head,
    kv_head,
    start,
    num_kv_heads,
    group,
    softcap,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    MOST: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Write the results of rows begin to end - 1 of a KV head; other arguments as in `merged` and `query_places`.

    kv_head: whose scale values have.
    """
    # More would spill: the other loop of such kernels needs more registers.
    chunk: tl.constexpr = 2 if out.dtype.element_ty == tl.float32 else 4 if HAS_SCALES or HAS_SINKS else 8
    at_once: tl.constexpr = 512 // PADDED
    for first in range(begin, end, at_once):
        rows = first + tl.arange(0, at_once)
        there = rows < end
        sink = None
        if HAS_SINKS:
            sink = sink_exponents(sinks, rows, head, group, softcap, HAS_SOFTCAP)
        result = merged(values, stats, num_rows, rows, there, count, sink, HEAD_SIZE, PADDED, MOST, chunk)
        if HAS_SCALES:
            result *= tl.load(v_scale + kv_head)
        stride = num_kv_heads * group * HEAD_SIZE
        places = query_places(out, rows, rows // group, head, start, stride, group, HEAD_SIZE, PADDED)
        tl.store(places, result.to(out.dtype.element_ty), mask=rows_and_columns(there, HEAD_SIZE, PADDED))


@triton.jit(
    do_not_specialize=["num_kv_heads", "group", "segments", "least_tiles", "max_tokens"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "v_scale"],
)
def merge_kernel(
    query_start_loc,
    seq_lens,
    out,
    v_scale,
    sums,
    stats,
    num_kv_heads,
    group,
    segments,
    least_tiles,
    max_tokens,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    MOST: tl.constexpr,
):
    """Merge the segments of a few rows of one block of heads among latents; arguments as in `split_kernel`."""
    at_once: tl.constexpr = 512 // PADDED
    records = max_tokens * group
    program = tl.program_id(0)
    tiles = tl.cdiv(records, at_once)
    begin = program % tiles * at_once
    head = program // tiles % num_kv_heads
    sequence = program // (tiles * num_kv_heads)
    start = tl.load(query_start_loc + sequence)
    num_rows = (tl.load(query_start_loc + sequence + 1) - start) * group
    _, _, count = segments_of(tl.load(seq_lens + sequence), 0, 0, segments, least_tiles, TILE, False)
    if (begin >= num_rows) | (count == 1):
        return
    first_record = (sequence * num_kv_heads + head).to(tl.int64) * (segments * records)
    write_merged(
        sums + first_record * HEAD_SIZE, stats + first_record * 2, records, begin,
        tl.minimum(begin + at_once, num_rows), count, out, v_scale, None, head, 0, start, num_kv_heads, group, 0.0,
        HEAD_SIZE, PADDED, MOST, HAS_SCALES, False, False,
    )  # fmt: skip


def merge_segments(
    call: AttentionCall, config: AttentionConfig, sums: Tensor, stats: Tensor, segments: int, least_tiles: int
) -> None:
    """Write what segments among latents have left, as one result for each row."""
    rows = max(1, 512 // padded(call.head_size))
    tiles = -(-call.max_query_len * call.group // rows)
    merge_kernel[(call.num_seqs * call.num_kv_heads * tiles,)](
        call.query_start_loc,
        call.seq_lens,
        call.out,
        call.v_scale,
        sums,
        stats,
        call.num_kv_heads,
        call.group,
        segments,
        least_tiles,
        call.max_query_len,
        **_constants(call.kind, config),
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=True,
    )


def _constants(kind: AttentionKind, config: AttentionConfig) -> dict[str, Any]:
    sizes = {"HEAD_SIZE": kind.head_size, "PADDED": padded(kind.head_size), "TILE": config.tile}
    return {**sizes, "HAS_SCALES": kind.scales, "MOST": MAX_SEGMENTS}


def variants() -> list[Variant]:
    """Return the variants of `merge_kernel` compiled ahead of time."""
    latents = [kind for kind in cases(Phase.SPLIT) if kind.more and not kind.wide]
    found = variants_of(
        merge_kernel,
        "attention merge",
        Phase.SPLIT,
        latents,
        lambda _: {"MOST": MAX_SEGMENTS},
        {"sums": "*fp32", "stats": "*fp32"},
    )
    launched = (replace(each, num_warps=_WARPS, num_stages=_STAGES) for each in found)
    return [replace(each, quick=each.name == "attention merge 512 bf16 latent sm90") for each in launched]
