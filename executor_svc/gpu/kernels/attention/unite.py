"""The segments of split attention, merged in a fixed order: by the last program of a KV head, or by a second kernel."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.config import AttentionConfig
from executor_svc.gpu.kernels.attention.records import segments_of
from executor_svc.gpu.kernels.attention.segments import MAX_SEGMENTS, Merging
from executor_svc.gpu.kernels.attention.tile import query_places, rows_and_columns

UNITE_WARPS = 4


@triton.jit
def merged(
    values,
    stats,
    num_rows,
    rows,
    there,
    count,
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
        CHUNK: segments that are loaded at once.
    """
    # Past the L1 cache: other programs have just written them.
    every = tl.arange(0, MOST)
    places = stats + ((every * num_rows)[:, None] + rows[None, :]) * 2
    known = (every < count)[:, None] & there[None, :]
    greatest = tl.load(places, mask=known, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(places + 1, mask=known, other=0.0, cache_modifier=".cg")
    highest = tl.max(greatest, 0)
    highest = tl.where(there, highest, 0.0)
    total = tl.sum(totals * tl.exp2(greatest - highest[None, :]), 0)
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
    rows,
    token,
    there,
    count,
    out,
    v_scale,
    head,
    start,
    num_kv_heads,
    group,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    MOST: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Write the results of some rows [ROWS] of a KV head; arguments as in `merged` and `query_places`."""
    result = merged(values, stats, num_rows, rows, there, count, HEAD_SIZE, PADDED, MOST, 4096 // (PADDED * ROWS))
    if HAS_SCALES:
        result *= tl.load(v_scale + head)
    places = query_places(out, rows, token, head, start, num_kv_heads * group * HEAD_SIZE, group, HEAD_SIZE, PADDED)
    tl.store(places, result.to(out.dtype.element_ty), mask=rows_and_columns(there, HEAD_SIZE, PADDED))


@triton.jit(
    do_not_specialize=["num_heads", "group", "segments", "least_tiles", "max_tokens", "window"],
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
    least_tiles,
    max_tokens,
    window,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    MANY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the segments of one token's query head, always in the same order, if there are several."""
    program = tl.program_id(0)
    head = program % num_heads
    if MANY:
        token = program // num_heads % max_tokens
        sequence = program // (num_heads * max_tokens)
        records = max_tokens * group
    else:
        token = 0
        sequence = program // num_heads
        records = group
    length = tl.load(seq_lens + sequence)
    start = tl.load(query_start_loc + sequence)
    num_tokens = tl.load(query_start_loc + sequence + 1) - start
    position = length - num_tokens
    _, _, count = segments_of(length, position, window, segments, least_tiles, TILE, HAS_WINDOW)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if (count == 1) | (token >= num_tokens):
        return
    num_kv_heads = num_heads // group
    kv_head = head // group
    first_record = (sequence * num_kv_heads + kv_head).to(tl.int64) * (segments * records)
    tokens = tl.zeros([1], tl.int32) + token
    write_merged(
        sums + first_record * HEAD_SIZE,
        stats + first_record * 2,
        records,
        tokens * group + head % group,
        tokens,
        tokens < num_tokens,
        count,
        out,
        v_scale,
        kv_head,
        start,
        num_kv_heads,
        group,
        1,
        HEAD_SIZE,
        PADDED,
        MOST,
        HAS_SCALES,
    )


def unite(
    call: AttentionCall,
    config: AttentionConfig,
    sums: Tensor,
    stats: Tensor,
    segments: int,
    least_tiles: int,
    merging: Merging,
) -> None:
    """Enqueue the second kernel, over the results of the first."""
    early = merging is Merging.EARLY
    fixed = call.constants(config)
    names = ("HEAD_SIZE", "PADDED", "TILE", "HAS_WINDOW", "HAS_SCALES")
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
        least_tiles,
        call.max_query_len,
        call.window or 0,
        **unite_constants(call.max_query_len > 1, early),
        **{name: fixed[name] for name in names},
        num_warps=UNITE_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
        **({"launch_pdl": True} if early else {}),
    )


def unite_constants(many: bool, early: bool = False) -> dict[str, Any]:
    """Return the constants that only the second kernel has."""
    return {"MOST": MAX_SEGMENTS, "MANY": many, "EARLY": early}
