"""Decode attention that normalizes and rotates its queries and new keys itself, and writes keys and values: one launch.

As `attention.split`, on what the linear for q, k and v has left. Each program prepares the queries of its KV head. The
programs whose keys include the step's new ones prepare and write these before they read keys, all of them the same
bits; no other program reads what was not written before the launch. Threads load the keys: to the copy engine these
writes would need a fence that Triton does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.kernels import AttentionShape, HeadNorms, Rope
from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.config import (
    DRAFTS_ROWS,
    AttentionConfig,
    AttentionKind,
    Phase,
    attention_config,
    constants,
)
from executor_svc.gpu.kernels.attention.segments import MAX_SEGMENTS, SEGMENTS, Segments, SegmentScratch
from executor_svc.gpu.kernels.attention.split import attend_share, share_of, split_tokens
from executor_svc.gpu.kernels.attention.variants import name_of
from executor_svc.gpu.kernels.dependent import LEAST_ARCH, begin_dependent, dependent_options
from executor_svc.gpu.kernels.rows import DTYPES, check
from executor_svc.gpu.kernels.skinny.new_keys import prepared_heads, write_new_keys
from executor_svc.gpu.kernels.variant import ALL_ARCHS, Variant


@dataclass(frozen=True, slots=True)
class NewKeys:
    """What a step's queries, keys and values become before attention."""

    qkv: Tensor
    """[T, (H + 2 KVH) * D]; queries of the call are its first H heads."""
    rope: Rope
    """Without scales of queries."""
    slots: Tensor
    """[T] int64: where keys and values are written, as in `rope.rope_write_kv`."""
    norms: HeadNorms | None
    """Of each head before the rotation, over all of its columns; without norms of values."""


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
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_tables", "slots", "angle_rows"],
)
def new_keys_kernel(
    qkv, cache, query_start_loc, seq_lens, block_tables, slots, angle_rows, cos, sin, q_weight, k_weight, eps, out,
    sums, stats, counters, q_stride, table_stride, num_kv_heads, block_rows, value_rows, group, block_size, block_bits,
    parts, segments, least_tiles, max_tokens, scale, softcap, window, R: tl.constexpr, NORMED: tl.constexpr,
    HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, MORE: tl.constexpr, MORE_PADDED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr, COPIES: tl.constexpr, STAGES: tl.constexpr, MANY: tl.constexpr,
    MERGES: tl.constexpr, MOST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Process one of `parts` runs of segments of one sequence's KV head, as `split_kernel` does.

    DEPENDENT: whether it may begin before the kernel before has ended.
    """
    if DEPENDENT:
        begin_dependent()
    of_sequence, of_rows, of_segments = share_of(
        query_start_loc, seq_lens, num_kv_heads, parts, segments, least_tiles, max_tokens, group, window,
        ROWS, TILE, HAS_WINDOW, MANY,
    )  # fmt: skip
    head, _, length, start, num_tokens, position = of_sequence
    _, token, num_rows = of_rows
    begin, size, _, first, after = of_segments
    if (first == after) | (num_tokens == 0):
        return
    rows = tl.arange(0, ROWS)
    there = rows < num_rows
    where = (start + token).to(tl.int64)
    angles = tl.maximum(tl.load(angle_rows + where, mask=there, other=0), 0)
    heads = qkv + where * q_stride + (head * group + rows % group) * HEAD_SIZE
    query = prepared_heads(heads, there, angles, cos, sin, q_weight, eps, R, NORMED, HEAD_SIZE, PADDED)
    end = tl.minimum(begin + after * size, tl.cdiv(length, TILE))
    if (length > 0) & (end * TILE > position):
        write_new_keys(
            qkv, cache, slots, angle_rows, cos, sin, k_weight, eps, head, start, num_tokens, q_stride, num_kv_heads,
            block_rows, value_rows, group, block_size, block_bits, R, NORMED, HEAD_SIZE, PADDED, ROWS if MANY else 1,
        )  # fmt: skip
        # All threads have written before one loads.
        tl.debug_barrier()
    attend_share(
        query, query, cache, head, of_sequence, of_rows, of_segments, block_tables, out, None, None, None,
        sums, stats, counters, table_stride, num_kv_heads, block_rows, value_rows, group, block_size, block_bits,
        parts, segments, scale, softcap, window, HEAD_SIZE, PADDED, WIDTH, MORE, MORE_PADDED, ROWS, TILE, HAS_WINDOW,
        HAS_SOFTCAP, HAS_SCALES, HAS_SINKS, COPIES, STAGES, MERGES, MOST,
    )  # fmt: skip


def may_attend_new(shape: AttentionShape, num_seqs: int, max_query_len: int, num_sms: int) -> bool:
    """Return whether `attention_of_new` computes a step in the scratch of plans: few tokens of each sequence.

    In 16 bits, with a cache in them.
    """
    tokens = SEGMENTS.max_tokens(shape.num_kv_heads, num_sms)
    return num_seqs * max_query_len <= tokens and 1 <= max_query_len <= max(1, DRAFTS_ROWS // shape.group)


def attention_of_new(
    call: AttentionCall,
    new: NewKeys,
    arch: int,
    scratch: SegmentScratch,
    num_sms: int,
    segments: Segments | None = None,
    dependent: bool = False,
) -> None:
    """Write keys and values of a step of few tokens per sequence to the cache, and attention to `call.out`.

    call: q is queries as the linear has left them; in 16 bits, as the cache; without sinks and latents. segments:
    replaces the default ones. dependent: as of `product.skinny_product`. Raises ValueError.
    """
    call.check()
    _check(call, new)
    if not call.num_seqs:
        return
    segments = segments or SEGMENTS
    parts = segments.parts(call.num_seqs, call.num_kv_heads, num_sms)
    most = segments.max_segments(call.num_kv_heads, num_sms)
    records = call.num_seqs * call.max_query_len * call.num_heads * most
    scratch.check(records * (call.head_size + 2), call.num_seqs * call.num_kv_heads)
    many = call.max_query_len > 1
    config = _config(call.kind, many, arch)
    scale, softcap = call.factors()
    cos, sin, rows, _ = new.rope
    q_norm, k_norm, eps = (new.qkv, new.qkv, 0.0) if new.norms is None else (new.norms.q, new.norms.k, new.norms.eps)
    new_keys_kernel[(call.num_seqs * parts * call.num_kv_heads,)](
        new.qkv, call.kv_layer, call.query_start_loc, call.seq_lens, call.block_tables, new.slots, rows, cos, sin,
        q_norm, k_norm, float(eps), call.out, scratch.floats, scratch.floats[records * call.head_size :],
        scratch.counters, new.qkv.stride(0), call.block_tables.stride(0), call.num_kv_heads, call.block_rows,
        call.value_rows, call.group, call.block_size, call.block_bits, parts, most,
        max(1, segments.least_keys // config.tile), call.max_query_len, scale, softcap, call.span,
        **_constants(call.kind, config, many, cos.shape[1], 0 if new.norms is None else len(q_norm), dependent),
        **dependent_options(dependent),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )  # fmt: skip


def _config(kind: AttentionKind, many: bool, arch: int) -> AttentionConfig:
    """Return the tiles of split decodes whose keys threads load."""
    return attention_config(replace(kind, countable=False), Phase.DRAFTS if many else Phase.SPLIT, arch)


def _constants(
    kind: AttentionKind, config: AttentionConfig, many: bool, rotated: int, normed: int, dependent: bool
) -> dict[str, Any]:
    own = {"R": rotated, "NORMED": normed, "MANY": many, "MERGES": True, "MOST": MAX_SEGMENTS, "DEPENDENT": dependent}
    return own | constants(kind, config)


def _check(call: AttentionCall, new: NewKeys) -> None:
    tokens, heads, size = call.q.shape
    if call.max_query_len > split_tokens(call.kind):
        raise ValueError(f"max_query_len must be at most {split_tokens(call.kind)} for attention of new keys")
    dtype = call.q.dtype
    if dtype == torch.float32 or call.kv_layer.dtype != dtype:
        raise ValueError(f"kv_layer must be in 16 bits, as q, is {call.kv_layer.dtype}")
    if call.sinks is not None or call.latent is not None:
        raise ValueError("sinks, latent: not for attention of new keys")
    columns = (heads + 2 * call.num_kv_heads) * size
    if new.qkv.shape != (tokens, columns) or new.qkv.data_ptr() != call.q.data_ptr() or new.qkv.stride(1) != 1:
        raise ValueError(f"qkv must be [{tokens}, {columns}] and begin with q, is {list(new.qkv.shape)}")
    rotated = new.rope.cos.shape[-1]
    if rotated % 2 or rotated > size or new.rope.query_scales is not None:
        raise ValueError(f"rope must rotate an even number of columns up to {size}, and not scale queries")
    check("rope.cos", new.rope.cos, (len(new.rope.cos), rotated), dtype, torch.float32)
    check("rope.sin", new.rope.sin, tuple(new.rope.cos.shape), new.rope.cos.dtype)
    check("rope.rows", new.rope.rows, (tokens,), torch.int64)
    check("slots", new.slots, (tokens,), torch.int64)
    norms = new.norms
    if norms is not None:
        if norms.kind != "heads" or norms.v is not None or not rotated <= len(norms.q) <= size:
            raise ValueError(f"norms must be of heads, of {rotated} to {size} columns, and none of values")
        check("norms.q", norms.q, (len(norms.q),), dtype, torch.float32)
        check("norms.k", norms.k, (len(norms.q),), norms.q.dtype)


def variants() -> list[Variant]:
    """Return decodes and drafts of common heads, in both types, with norms or a window or neither, and half rotated."""
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        for size in (64, 128, 256):
            for many in (False, True):
                cases = [(False, False, size), (True, False, size), (False, True, size), (False, False, size // 2)]
                found += [each for case in cases for each in _variants(size, dtype, many, *case)]
                found += _variants(size, dtype, many, True, False, size, dependent=True)
    return found


def _variants(
    size: int, dtype: torch.dtype, many: bool, normed: bool, window: bool, rotated: int, dependent: bool = False
) -> list[Variant]:
    kind = AttentionKind(size, dtype, dtype, 16, window=window)
    by_config: dict[AttentionConfig, list[int]] = {}
    for arch in (arch for arch in ALL_ARCHS if arch >= LEAST_ARCH or not dependent):
        by_config.setdefault(_config(kind, many, arch), []).append(arch)
    element = DTYPES[dtype]
    floats = dict.fromkeys(("qkv", "cache", "cos", "sin", "q_weight", "k_weight", "out"), f"*{element}")
    known = floats | dict.fromkeys(("sums", "stats"), "*fp32") | dict.fromkeys(("slots", "angle_rows"), "*i64")
    known |= dict.fromkeys(("query_start_loc", "seq_lens", "block_tables", "counters"), "*i32")
    known |= dict.fromkeys(("eps", "scale", "softcap"), "fp32")
    marks = {"drafts": many, "normed": normed, "half": rotated < size, "dependent": dependent}
    found = []
    for config, archs in by_config.items():
        fixed = _constants(kind, config, many, rotated, size if normed else 0, dependent)
        signature = {
            name: "constexpr" if name in fixed else known.get(name, "i32") for name in new_keys_kernel.arg_names
        }
        name = " ".join(["attention of new keys", name_of(kind), *(mark for mark, there in marks.items() if there)])
        found.append(
            Variant(
                name=name if len(by_config) == 1 else f"{name} sm{archs[0]}",
                kernel=new_keys_kernel,
                signature=signature,
                constants=fixed,
                divisible=(*floats, "sums", "stats", "counters", "q_stride"),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                archs=tuple(archs),
                no_spills=True,
                dependent=dependent,
                quick=dependent and (size, dtype, many) == (128, torch.bfloat16, False),
            )
        )
    return found
