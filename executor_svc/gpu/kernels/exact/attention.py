"""Paged attention whose rows have the same bits in any batch, chunk and block: of `--numerics exact`.

The keys of a sequence are in segments that begin at multiples of SEGMENT_KEYS, whatever its length. A row has a
maximum, a sum of weights and weighted values of each of its segments, from nothing, and these are folded one after the
other. One program does so for the rows of a prompt. Where decodes are few, segments are shared by programs, which leave
records, and the last of them folds these, in the same order by the same operations (`folding`).

All batches have tiles of as many keys, multiplied by the same instructions (`attention_config`): decodes and drafts are
filled up with rows of zeros to the 64 rows of wgmma. Threads load keys, not the copy engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.config import AttentionKind, Phase, constants, padded
from executor_svc.gpu.kernels.attention.keys import keys_to_read, loaded, places_of
from executor_svc.gpu.kernels.attention.records import record
from executor_svc.gpu.kernels.attention.segments import SegmentScratch
from executor_svc.gpu.kernels.attention.tile import (
    as_multiplied,
    first_seen,
    nothing_yet,
    query_places,
    rows_and_columns,
)
from executor_svc.gpu.kernels.attention.variants import cases, variants_of
from executor_svc.gpu.kernels.attention.work import queries_of
from executor_svc.gpu.kernels.exact.attention_config import SEGMENT_KEYS, exact_config
from executor_svc.gpu.kernels.exact.folding import finished, folded, scores_of, weighed, write_folded
from executor_svc.gpu.kernels.variant import Variant

_PROGRAMS_PER_SM = 2
"""Wanted, before segments are shared no further."""
_MOST_FLOATS = 1 << 25
"""Of the records of shared segments: a batch that needs more is not shared, with the same results."""
_CHUNK = 8
"""Records that are loaded at once."""
_L2_BYTES = 24 << 20
"""Maximum bytes of keys and values that concurrent programs read: about half of the L2 of a data-center GPU."""


_COUNTS = (
    "table_stride", "num_seqs", "num_tiles", "num_kv_heads", "block_rows", "value_rows", "heads_at_once", "group",
    "block_size", "block_bits", "parts", "segments", "max_tokens", "window",
)  # fmt: skip
"""Arguments that batches change."""


@triton.jit
def place_of_program(
    query_start_loc, num_seqs, num_tiles, num_kv_heads, heads_at_once, parts, tile_tokens, ONE: tl.constexpr
):  # fmt: skip
    """Return this program's head, part, sequence, the sequence's first token of the batch and the tile's in it.

    ONE: each sequence has one tile; else as of `queries_of`.
    """
    program = tl.program_id(0)
    part = 0
    first = 0
    if ONE:
        head = program % num_kv_heads
        part = program // num_kv_heads % parts
        sequence = program // (num_kv_heads * parts)
        start = tl.load(query_start_loc + sequence)
    else:
        head, sequence, start, first = queries_of(
            program, query_start_loc, num_seqs, num_tiles, heads_at_once, tile_tokens
        )
    return head, part, sequence, start, first


@triton.jit
def keys_of_tile(length, num_tokens, first, count, window, HAS_WINDOW: tl.constexpr):
    """Return the position of a tile's first token, and the keys low to high - 1 that its tokens see."""
    position = length - num_tokens + first
    return position, first_seen(position, window, HAS_WINDOW), tl.where(length > 0, position + count, 0)


@triton.jit
def segments_of_part(low, high, part, parts, TILE: tl.constexpr, SEGMENT: tl.constexpr):
    """Return begin and end of a part's tiles, begin and end of its segments, and begin and number of all segments.

    The keys low to high - 1 are in all segments: in one, if there are none. A part may have no segment.
    """
    begin, end = low // TILE, tl.cdiv(high, TILE)
    first = begin * TILE // SEGMENT
    count = tl.maximum(tl.cdiv(end * TILE, SEGMENT) - first, 1)
    own, after = first + part * count // parts, first + (part + 1) * count // parts
    begin = tl.maximum(begin, own * (SEGMENT // TILE))
    end = tl.minimum(end, after * (SEGMENT // TILE))
    return begin, end, own, after, first, count


@triton.jit
def queries_of_tile(
    q, rows, token, there, head, first_token, q_stride, group, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    WIDTH: tl.constexpr, MORE: tl.constexpr, MORE_PADDED: tl.constexpr,
):  # fmt: skip
    """Return a tile's queries [ROWS, PADDED], zeros where no row is there, and with MORE their further columns."""
    places = query_places(q, rows, token, head, first_token, q_stride, group, WIDTH, PADDED)
    query = tl.load(places, mask=rows_and_columns(there, HEAD_SIZE, PADDED), other=0.0)
    more = query
    if MORE > 0:
        last = query_places(q + (WIDTH - MORE), rows, token, head, first_token, q_stride, group, WIDTH, MORE_PADDED)
        more = tl.load(last, mask=rows_and_columns(there, MORE, MORE_PADDED), other=0.0)
    return query, more


@triton.jit
def is_last(counter, count):
    """Return whether this program is the last of `count` to get here, with what the others have written in sight."""
    # Records of all threads are written before one thread counts, and read after.
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def attended(
    known, pages, begin, end, low, high, segment, kept, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    WIDTH: tl.constexpr, MORE: tl.constexpr, MORE_PADDED: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, STAGES: tl.constexpr, SEGMENT: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Return the folded segments of the key tiles begin to end - 1; APART: record each segment, from `segment` on.

    known: rows as of `tile.weigh`; pages: cache, KV head, block table, rows between blocks and between keys and values,
    and block size with its exponent, as of `keys.attend`; kept: as of `records.record`.
    """
    cache, kv_head, table, block_rows, value_rows, block_size, block_bits = pages
    query, outer = known[0], known[3]
    keys_at, value_offset = cache + kv_head * (block_size * WIDTH), value_rows * WIDTH
    run = nothing_yet(query)
    acc, greatest, total = nothing_yet(query)
    # Loaded one tile ahead: loads of keys and values would otherwise wait for the ids.
    ids = tl.load(table + (keys_to_read(begin, low, high, TILE) >> block_bits))
    for tile in tl.range(begin, end, num_stages=STAGES):
        keys = keys_to_read(tile, low, high, TILE)
        places = places_of(keys, ids, keys_at, block_rows, block_size, WIDTH, PADDED)
        more_k = None
        if MORE > 0:
            last = places_of(keys, ids, keys_at + (WIDTH - MORE), block_rows, block_size, WIDTH, MORE_PADDED)
            more_k = loaded(last, MORE, MORE_PADDED)
        ids = tl.load(table + (keys_to_read(tile + 1, low, high, TILE) >> block_bits))
        k = loaded(places, HEAD_SIZE, PADDED)
        v = k
        if MORE == 0:
            v = loaded(places + value_offset, HEAD_SIZE, PADDED)
        if (tile % (SEGMENT // TILE) == 0) & (tile > begin):
            if APART:
                record((acc, greatest, total), segment, kept, HEAD_SIZE, PADDED)
                segment += 1
            else:
                run = folded(run, (acc, greatest, total))
            # What was before then shrinks to 0. The next product reads this, so that the branch stays here, before it,
            # where the sums are complete: at the end of the loop Triton lets a branch read unfinished ones.
            greatest = tl.full([query.shape[0]], float("-inf"), tl.float32)
        scores = scores_of(known, k, more_k, tile, TILE, HAS_WINDOW, HAS_SOFTCAP)
        acc, greatest, total = weighed(query, outer, (acc, greatest, total), scores, v)
    if APART:
        if begin < end:
            record((acc, greatest, total), segment, kept, HEAD_SIZE, PADDED)
    else:
        run = folded(run, (acc, greatest, total))
    return run


@triton.jit(
    do_not_specialize=[*_COUNTS],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_tables", "k_scale", "v_scale", "sinks"],
)
def exact_attention_kernel(
    q, cache, query_start_loc, seq_lens, block_tables, out, k_scale, v_scale, sinks, sums, stats, counters, q_stride,
    table_stride, num_seqs, num_tiles, num_kv_heads, block_rows, value_rows, heads_at_once, group, block_size,
    block_bits, parts, segments, max_tokens, scale, softcap, window, HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr,
    WIDTH: tl.constexpr, MORE: tl.constexpr, MORE_PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr,
    COPIES: tl.constexpr, STAGES: tl.constexpr, SEGMENT: tl.constexpr, ONE: tl.constexpr, APART: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute one query tile of one KV head; APART: one of `parts` runs of its segments.

    ONE: each sequence has one tile. Records are as of `split.split_kernel`.
    """
    tl.static_assert(SEGMENT % TILE == 0 and not COPIES)
    tile_tokens = ROWS // group
    head, part, sequence, start, first = place_of_program(
        query_start_loc, num_seqs, num_tiles, num_kv_heads, heads_at_once, parts, tile_tokens, ONE
    )
    num_tokens = tl.load(query_start_loc + sequence + 1) - start
    if first >= num_tokens:
        return
    count = tl.minimum(num_tokens - first, tile_tokens)
    position, low, high = keys_of_tile(tl.load(seq_lens + sequence), num_tokens, first, count, window, HAS_WINDOW)
    begin, end, segment, after, first_segment, num_segments = segments_of_part(low, high, part, parts, TILE, SEGMENT)
    if segment == after:
        return

    rows = tl.arange(0, ROWS)
    token = rows // group
    # Rows after the last head of the last token are padding.
    there, first_token = rows_and_columns(token < count, HEAD_SIZE, PADDED), start + first
    query, more = queries_of_tile(
        q, rows, token, token < count, head, first_token, q_stride, group, HEAD_SIZE, PADDED, WIDTH, MORE, MORE_PADDED
    )
    kv_head = 0 if MORE > 0 else head  # all heads have the same latents
    query, more, inner, outer = as_multiplied(
        query, more, kv_head, k_scale, scale, softcap, MORE, HAS_SOFTCAP, HAS_SCALES
    )
    clear_from = tl.cdiv(first_seen(position + count - 1, window, HAS_WINDOW), TILE)
    known = (query, position + token, inner, outer, window, clear_from, (position + 1) // TILE, more)
    record_at = (sequence * num_kv_heads + head).to(tl.int64) * (segments * max_tokens * group)
    kept = sums + record_at * HEAD_SIZE, stats + record_at * 2, max_tokens * group, there, token < count
    table = block_tables + sequence.to(tl.int64) * table_stride
    pages = cache, kv_head, table, block_rows, value_rows, block_size, block_bits
    run = attended(
        known, pages, begin, end, low, high, segment - first_segment, kept, HEAD_SIZE, PADDED, WIDTH, MORE, MORE_PADDED,
        TILE, HAS_WINDOW, HAS_SOFTCAP, STAGES, SEGMENT, APART,
    )  # fmt: skip
    of_head = sinks, head, kv_head, group, softcap, v_scale
    stride = num_kv_heads * group * HEAD_SIZE
    if APART:
        if is_last(counters + sequence * num_kv_heads + head, tl.minimum(num_segments, parts)):
            write_folded(
                kept, num_tokens * group, tl.where(high > 0, num_segments, 0), out, start, stride, of_head, HEAD_SIZE,
                PADDED, HAS_SCALES, HAS_SINKS, HAS_SOFTCAP, CHUNK,
            )  # fmt: skip
    else:
        result = finished(run, rows, of_head, HAS_SINKS, HAS_SOFTCAP, HAS_SCALES)
        out_places = query_places(out, rows, token, head, first_token, stride, group, HEAD_SIZE, PADDED)
        tl.store(out_places, result.to(out.dtype.element_ty), mask=there)


def new_scratch(
    num_heads: int, num_kv_heads: int, head_size: int, segments: int, num_sms: int, device: torch.device
) -> SegmentScratch:
    """Allocate records of so many segments for batches that share them, or for as many as _MOST_FLOATS allow."""
    seqs = max(1, num_sms // num_kv_heads)
    size = seqs * num_heads * segments * (head_size + 2)
    return SegmentScratch(
        torch.empty(min(size, _MOST_FLOATS), dtype=torch.float32, device=device),
        torch.zeros(max(num_sms, num_kv_heads), dtype=torch.int32, device=device),
    )


def most_segments(max_seq_len: int, max_query_len: int = 1, span: int = 0) -> int:
    """Return the most segments that the tokens of a sequence see, with a window or chunks of this span, or without."""
    whole = -(-max_seq_len // SEGMENT_KEYS)
    return min(whole, (span + max_query_len) // SEGMENT_KEYS + 2) if span else whole


def shared_parts(call: AttentionCall, scratch: SegmentScratch, num_sms: int) -> int:
    """Return the programs that share the segments of a sequence's KV head; 1: they are not shared. Changes no bit."""
    heads, segments = call.num_seqs * call.num_kv_heads, _segments_of(call)
    parts = min(_PROGRAMS_PER_SM * num_sms // max(1, heads), segments)
    records = call.num_seqs * call.max_query_len * call.num_heads * segments
    fits = records * (call.head_size + 2) <= scratch.floats.numel() and heads <= scratch.counters.numel()
    return parts if parts > 1 and fits else 1


def exact_attention(
    call: AttentionCall,
    arch: int,
    scratch: SegmentScratch,
    num_sms: int,
    wide: bool,
    parts: int | None = None,
    one_tile: bool | None = None,
) -> None:
    """Write `call.out`, on a GPU of this capability and number of multiprocessors.

    wide: whether prompts have the tiles of `exact_config` for them, not those of decodes. parts, one_tile: for tests
    and measurements, in place of what the batch suggests. Raises ValueError.
    """
    call.check()
    kind = call.kind
    if not call.num_seqs:
        return
    if one_tile is None:
        one_tile = call.max_query_len <= exact_config(kind, True, arch).rows // call.group
    config = exact_config(kind, one_tile or not wide, arch)
    parts = (parts or shared_parts(call, scratch, num_sms)) if one_tile else 1
    segments = _segments_of(call)
    records = call.num_seqs * call.max_query_len * call.num_heads * segments
    if parts > 1:
        scratch.check(records * (call.head_size + 2), call.num_seqs * call.num_kv_heads)
    sums, stats = scratch.floats, scratch.floats[records * call.head_size if parts > 1 else 0 :]
    # A tile has tokens of one sequence only: each sequence may have one partial tile.
    num_tiles = call.num_seqs + (0 if one_tile else call.q.shape[0] // (config.rows // call.group))
    scale, softcap = call.factors()
    exact_attention_kernel[(num_tiles * call.num_kv_heads * parts,)](
        call.q, call.kv_layer, call.query_start_loc, call.seq_lens, call.block_tables, call.out, call.k_scale,
        call.v_scale, call.sinks, sums, stats, scratch.counters, call.q.stride(0), call.block_tables.stride(0),
        call.num_seqs, num_tiles, call.num_kv_heads, call.block_rows, call.value_rows, _heads_at_once(call),
        call.group, call.block_size, call.block_bits, parts, segments, call.max_query_len, scale, softcap, call.span,
        **_own_constants(one_tile, parts > 1), **constants(kind, config), num_warps=config.num_warps,
        num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def _segments_of(call: AttentionCall) -> int:
    return most_segments(call.max_seq_len, call.max_query_len, call.span)


def _heads_at_once(call: AttentionCall) -> int:
    """Return the number of KV heads processed concurrently: a divisor of all, limited by keys and values in L2."""
    if call.latent is not None:  # all have the same keys
        return call.num_kv_heads
    head_bytes = 2 * call.max_seq_len * call.head_size * call.kv_layer.element_size()
    most = max(1, _L2_BYTES // max(1, head_bytes))
    return max(n for n in range(1, call.num_kv_heads + 1) if call.num_kv_heads % n == 0 and n <= most)


def _own_constants(one_tile: bool, apart: bool) -> dict[str, Any]:
    return {"SEGMENT": SEGMENT_KEYS, "ONE": one_tile, "APART": apart, "CHUNK": _CHUNK}


_POINTERS = {"sums": "*fp32", "stats": "*fp32", "counters": "*i32"}
_QUICK = "exact_attention prompts 128 bf16 sm90", "exact_attention shared 128 bf16 sm90"


def variants() -> list[Variant]:
    """Return prompts, decodes, and decodes whose segments are shared, of some of `variants.cases`."""
    found = []
    for name, one_tile, apart in (("prompts", False, False), ("decodes", True, False), ("shared", True, True)):
        for kind in _kinds():
            found += _variants(f"exact_attention {name}", kind, one_tile, apart)
    return found


def _kinds() -> Iterator[AttentionKind]:
    """Yield all dtypes of all sizes; windows, caps, sinks and chunks of the most common one; and latents."""
    for kind in cases(Phase.PREFILL):
        plain = not (kind.window or kind.softcap or kind.sinks)
        if kind.block_size != SEGMENT_KEYS // 4 and (plain or (kind.head_size == 128 and not kind.scales)):
            yield kind


def _instructions(kind: AttentionKind, arch: int) -> dict[int, frozenset[str]]:
    """Return what the tiles of decodes and of prompts are both made of, where they differ."""
    config = exact_config(kind, False, arch)
    if config == exact_config(kind, True, arch):
        return {}
    return {arch: frozenset(f"wgmma m64n{columns}k16" for columns in (config.tile, padded(kind.head_size)))}


def _variants(operation: str, kind: AttentionKind, one_tile: bool, apart: bool) -> list[Variant]:
    found = variants_of(
        exact_attention_kernel, operation, Phase.PREFILL, [kind], lambda _: _own_constants(one_tile, apart), _POINTERS
    )
    launched = []
    for variant in found:
        config = exact_config(kind, one_tile, variant.archs[0])
        tiles = {"ROWS": config.rows, "TILE": config.tile, "STAGES": config.num_stages}
        launched.append(
            replace(
                variant,
                constants={**variant.constants, **tiles},
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                fp_fusion=False,
                # What holds all segments' sums beside those of one may spill a few bytes, at the ends of segments.
                no_spills=apart and kind.head_size <= 256 and not kind.more,
                wgmma=variant.wgmma and kind.head_size <= 128,
                products=_instructions(kind, variant.archs[0]),
                whole_rows=bool(_instructions(kind, variant.archs[0])),
                quick=variant.name in _QUICK,
            )
        )
    return launched
