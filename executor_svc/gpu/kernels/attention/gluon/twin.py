"""The Gluon kernel's twin in Triton, without roles and barriers: the same tiles, keys, masks, and order of sums.

Triton's interpreter runs it; all that decides which numbers are read, masked and added is one text for both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.attention.tile import (
    divided,
    nothing_yet,
    query_places,
    sink_exponents,
    weigh,
    with_sink,
)
from executor_svc.gpu.kernels.attention.work import UNSPECIALIZED, first_row_of, keys_of, prompt_of, seen_values


@triton.jit(**UNSPECIALIZED)
def prompt_twin(
    q, cache, query_start_loc, seq_lens, block_tables, out, sinks, q_stride, table_stride, num_seqs, num_tiles,
    num_kv_heads, block_rows, value_rows, heads_at_once, group, scale, softcap, HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PRODUCER_REGISTERS: tl.constexpr, CONSUMER_REGISTERS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Compute one query tile of one KV head; the last six numbers are the Gluon kernel's, or arguments of both."""
    head, sequence, first_token, count, position, length = prompt_of(
        tl.program_id(0), query_start_loc, seq_lens, num_seqs, num_tiles, heads_at_once, ROWS // group
    )
    _, high, clear_from, clear_to = keys_of(position, count, length, 0, TILE, False)
    if count == 0:
        return
    table = block_tables + sequence.to(tl.int64) * table_stride
    rows = tl.arange(0, ROWS)
    token = rows // group
    there = (token < count)[:, None]
    query = tl.load(query_places(q, rows, token, head, first_token, q_stride, group, HEAD_SIZE, HEAD_SIZE), there, 0.0)
    inner = tl.zeros([ROWS], tl.float32) + scale
    outer = inner
    if HAS_SOFTCAP:
        outer = tl.zeros([ROWS], tl.float32) + softcap
    known = (query, position + token, inner, outer, 0, clear_from, clear_to, None)
    sums = nothing_yet(query)
    for tile in range(tl.cdiv(high, TILE)):
        keys = tile * TILE + tl.arange(0, TILE)
        row = first_row_of(keys // BLOCK, table, high, head, block_rows, BLOCK) + keys % BLOCK
        places = cache + row.to(tl.int64)[:, None] * HEAD_SIZE + tl.arange(0, HEAD_SIZE)[None, :]
        values = seen_values(tl.load(places + value_rows * HEAD_SIZE), keys[:, None], high)
        sums = weigh(known, sums, tl.load(places), None, values, tile, False, TILE, False, HAS_SOFTCAP)
    acc, greatest, total = sums
    if HAS_SINKS:
        exponents = sink_exponents(sinks, rows, head, group, softcap, HAS_SOFTCAP)
        acc, total = with_sink(acc, greatest * outer, total, exponents)
    result = divided(acc, total, head, None, False)
    stride = num_kv_heads * group * HEAD_SIZE
    places = query_places(out, rows, token, head, first_token, stride, group, HEAD_SIZE, HEAD_SIZE)
    tl.store(places, result.to(out.dtype.element_ty), there)
