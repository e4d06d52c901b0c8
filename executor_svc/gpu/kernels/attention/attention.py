"""Paged attention for prefill, chunked prefill with context, decode and any mixture of them, in one launch.

A query tile packs the query heads of a KV head, and a program finds its sequence by a search over query_start_loc, as
in vLLM's unified Triton kernel. A row's numbers depend on its own sequence only.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.config import AttentionConfig, Phase
from executor_svc.gpu.kernels.attention.keys import attend
from executor_svc.gpu.kernels.attention.tile import (
    as_multiplied,
    divided,
    query_places,
    rows_and_columns,
    sink_exponents,
    with_sink,
)
from executor_svc.gpu.kernels.attention.variants import cases, variants_of
from executor_svc.gpu.kernels.attention.work import keys_of, queries_of
from executor_svc.gpu.kernels.variant import Variant

_L2_BYTES = 24 << 20
"""Maximum bytes of keys and values that concurrent programs read: about half of the L2 of a data-center GPU."""


@triton.jit(
    do_not_specialize=[
        "table_stride",
        "num_seqs",
        "num_tiles",
        "num_kv_heads",
        "block_rows",
        "value_rows",
        "heads_at_once",
        "group",
        "block_size",
        "block_bits",
        "window",
    ],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_tables", "k_scale", "v_scale", "sinks"],
)
def attention_kernel(
    q, cache, query_start_loc, seq_lens, block_tables, out, k_scale, v_scale, sinks, q_stride, table_stride,
    num_seqs, num_tiles, num_kv_heads, block_rows, value_rows, heads_at_once, group, block_size, block_bits, scale,
    softcap, window, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, MORE: tl.constexpr,
    MORE_PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DECODE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr,
    COPIES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one query tile of one KV head. Neighbouring programs read the same keys; the largest work comes first."""
    program = tl.program_id(0)
    if DECODE:
        head = program % num_kv_heads
        sequence = program // num_kv_heads
        start = tl.load(query_start_loc + sequence)
        tile_tokens = 1
        first = 0
    else:
        tile_tokens = ROWS // group
        head, sequence, start, first = queries_of(
            program, query_start_loc, num_seqs, num_tiles, heads_at_once, tile_tokens
        )
    num_tokens = tl.load(query_start_loc + sequence + 1) - start
    if first >= num_tokens:
        return
    length = tl.load(seq_lens + sequence)
    count = tl.minimum(num_tokens - first, tile_tokens)
    position = length - num_tokens + first
    rows = tl.arange(0, ROWS)
    token = rows // group
    # Rows after the last head of the last token are padding.
    there = rows_and_columns(token < count, HEAD_SIZE, PADDED)
    first_token = start + first
    q_places = query_places(q, rows, token, head, first_token, q_stride, group, WIDTH, PADDED)
    query = tl.load(q_places, mask=there, other=0.0)
    more, kv_head = query, head
    if MORE > 0:
        last = query_places(q + (WIDTH - MORE), rows, token, head, first_token, q_stride, group, WIDTH, MORE_PADDED)
        more = tl.load(last, mask=rows_and_columns(token < count, MORE, MORE_PADDED), other=0.0)
        kv_head = 0  # all heads have the same keys
    query, more, inner, outer = as_multiplied(
        query, more, kv_head, k_scale, scale, softcap, MORE, HAS_SOFTCAP, HAS_SCALES
    )
    low, high, clear_from, clear_to = keys_of(position, count, length, window, TILE, HAS_WINDOW)
    acc, greatest, total = attend(
        query, cache, kv_head, block_tables + sequence.to(tl.int64) * table_stride, position + token, low // TILE,
        tl.cdiv(high, TILE), low, high, clear_from, clear_to, block_rows, value_rows, block_size,
        block_bits, inner, outer, window, more, HEAD_SIZE, PADDED, WIDTH, MORE, MORE_PADDED, TILE, HAS_WINDOW,
        HAS_SOFTCAP, COPIES, STAGES,
    )  # fmt: skip
    places = query_places(
        out, rows, token, head, first_token, num_kv_heads * group * HEAD_SIZE, group, HEAD_SIZE, PADDED
    )
    if HAS_SINKS:
        exponents = sink_exponents(sinks, rows, head, group, softcap, HAS_SOFTCAP)
        acc, total = with_sink(acc, greatest, total, exponents)
    result = divided(acc, total, kv_head, v_scale, HAS_SCALES)
    tl.store(places, result.to(out.dtype.element_ty), mask=there)


def attention(call: AttentionCall, arch: int, config: AttentionConfig | None = None) -> None:
    """Write `call.out`, on a GPU of compute capability `arch`, such as 90; raises ValueError.

    Batches of one token per sequence use decode tiles. `config`, for measurements, replaces the default tiles.
    """
    call.check()
    phase = Phase.DECODE if call.max_query_len == 1 else Phase.PREFILL
    config = config or call.config(phase, arch)
    if not call.num_seqs:
        return
    num_tiles = call.num_seqs
    if phase is Phase.PREFILL:  # a tile has tokens of one sequence only: each sequence may have one partial tile
        num_tiles += call.q.shape[0] // (config.rows // call.group)
    scale, softcap = call.factors()
    attention_kernel[(num_tiles * call.num_kv_heads,)](
        call.q,
        call.cache(config),
        call.query_start_loc,
        call.seq_lens,
        call.block_tables,
        call.out,
        call.k_scale,
        call.v_scale,
        call.sinks,
        call.q.stride(0),
        call.block_tables.stride(0),
        call.num_seqs,
        num_tiles,
        call.num_kv_heads,
        call.block_rows,
        call.value_rows,
        heads_at_once(call),
        call.group,
        call.block_size,
        call.block_bits,
        scale,
        softcap,
        call.span,
        DECODE=phase is Phase.DECODE,
        **call.constants(config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )


def heads_at_once(call: AttentionCall) -> int:
    """Return the number of KV heads processed concurrently: a divisor of all, limited by keys and values in L2."""
    if call.latent is not None:  # all have the same keys
        return call.num_kv_heads
    head_bytes = 2 * call.max_seq_len * call.head_size * call.kv_layer.element_size()
    most = max(1, _L2_BYTES // max(1, head_bytes))
    return max(n for n in range(1, call.num_kv_heads + 1) if call.num_kv_heads % n == 0 and n <= most)


def variants() -> list[Variant]:
    """Return the variants compiled ahead of time: prefill and decode for each of `variants.cases`."""
    prefill, decode = Phase.PREFILL, Phase.DECODE
    found = variants_of(attention_kernel, "attention prefill", prefill, cases(prefill), _prefill_constants, {})
    return found + variants_of(attention_kernel, "attention decode", decode, cases(decode), _decode_constants, {})


def _prefill_constants(_: AttentionConfig) -> dict[str, Any]:
    return {"DECODE": False}


def _decode_constants(_: AttentionConfig) -> dict[str, Any]:
    return {"DECODE": True}
