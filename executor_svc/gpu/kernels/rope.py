"""Norms of query and key heads, rotary position embedding, and keys and values written to the cache, in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.kernels import HeadNorms, KVScales
from executor_svc.gpu.kernels.heads import load_heads, normalized_values, rotate_heads, store_heads
from executor_svc.gpu.kernels.rows import DTYPES, check, check_rows, options

BLOCK_SIZES = range(8, 65)
"""Tokens in a block of the cache."""
FP8 = torch.float8_e4m3fn

_HEAD_MULTIPLE = 8
_MAX_ELEMENTS, _MAX_WARPS = 2048, 4


@triton.jit(do_not_specialize=["block_rows", "value_rows"])
def rope_write_kv_kernel(
    qkv, q_out, cos, sin, positions, slots, kv_layer, q_weight, k_weight, v_weight, eps, k_scale, v_scale,
    query_scales, block_rows, value_rows, H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    B: tl.constexpr, IN_PLACE: tl.constexpr, BY_POSITION: tl.constexpr, NORMED: tl.constexpr, AFTER: tl.constexpr,
    SCALED: tl.constexpr, MULTIPLIED: tl.constexpr, KV_PARTS: tl.constexpr, VALUES_NORMED: tl.constexpr,
    BETWEEN: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    heads: tl.constexpr = H + KV_PARTS * KVH + BETWEEN
    q_parts: tl.constexpr = (H + Q_HEADS - 1) // Q_HEADS
    parts: tl.constexpr = q_parts + (0 if KV_PARTS == 0 else (KVH + KV_HEADS - 1) // KV_HEADS)
    program = tl.program_id(0)
    token, part = (program // parts).to(tl.int64), program % parts
    slot = tl.load(slots + token)
    position = token
    if BY_POSITION:
        position = tl.maximum(tl.load(positions + token), 0)
    angle = position * R
    source = qkv + token * (heads * D)
    if part < q_parts:
        queries = q_out + token * ((heads if IN_PLACE else H) * D)
        rotate_heads(
            source, queries, H, H, part * Q_HEADS + tl.arange(0, Q_HEADS), cos + angle, sin + angle, q_weight, eps,
            k_scale, query_scales + position, D, D, R, NORMED, AFTER, not IN_PLACE, False, MULTIPLIED, HALF, REST,
        )  # fmt: skip
    else:
        rows, columns = (part - q_parts) * KV_HEADS + tl.arange(0, KV_HEADS), tl.arange(0, WHOLE)
        value = load_heads(source + (H + (KV_PARTS - 1) * KVH) * D, KVH, rows, columns, D, D)
        if VALUES_NORMED:
            value = normalized_values(value, v_weight, eps, columns, NORMED, D)
        written = tl.where(slot >= 0, KVH, 0)
        keys = kv_layer + slot // B * (block_rows * D) + slot % B * D
        rotate_heads(
            source + H * D, keys, KVH, written, rows, cos + angle, sin + angle, k_weight, eps, k_scale, query_scales,
            B * D, D, R, NORMED, AFTER, True, SCALED, False, HALF, REST,
        )  # fmt: skip
        store_heads(value, v_scale, written, rows, columns, keys + value_rows * D, B * D, D, SCALED)


def rope_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    kv_layer: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    norms: HeadNorms | None = None,
    scales: KVScales | None = None,
    q_out: Tensor | None = None,
    query_scales: Tensor | None = None,
) -> None:
    """Normalize and rotate q and k; write q to q_out or in place, k and v to the cache.

    Raises ValueError for shapes that do not match. Keys and values in qkv do not change.

    Args:
        qkv: [T, (H + 2 KVH) * D], rows any number of heads apart; D is a multiple of 8. With (H + KVH) heads keys are
            the values too, before their norm and rotation; with H alone nothing is written to the cache.
        cos: [positions, R] cosines of the angles of each position, in the dtype of qkv or in fp32, with the meaning
            described in `device.kernels.Rope`; R is even and at most D. Only the first R columns of a head are rotated.
        sin: [positions, R] sines, the first half negated.
        positions: [T] int64 rows of cos and sin, a negative one counts as 0; None: row t for token t.
        kv_layer: [N, 2, KVH, B, D] in the dtype of qkv, or in fp8 e4m3; blocks, and the keys and values of one,
            may be any number of rows [D] apart.
        norms: [N] each: the first N columns of heads padded with zeros are normalized; of values [D].
        slot_mapping: [T] int64, block * B + offset, the place of a token's key and value; -1: not written.
        scales: required for a cache in fp8, None otherwise. Values above 448 after the division are stored as 448.
        q_out: [T, H, D]; None: queries in qkv are overwritten.
        query_scales: [positions] in the dtype of qkv or in fp32: queries are multiplied with them in the end.
    """
    tokens = _check_shapes(qkv, cos, sin, positions, kv_layer, slot_mapping, num_heads, q_out)
    head_size = kv_layer.shape[4]
    _check_options(qkv, cos.shape[1], kv_layer, norms, scales)
    if not tokens:
        return
    constants = _constants_of(qkv, cos, positions, kv_layer, num_heads, norms, scales, q_out, query_scales)
    if query_scales is not None:
        check("query_scales", query_scales, (cos.shape[0],), qkv.dtype, torch.float32)
    rope_write_kv_kernel[tokens * programs_per_token(constants),](
        qkv,
        qkv if q_out is None else q_out,
        cos,
        sin,
        slot_mapping if positions is None else positions,
        slot_mapping,
        kv_layer,
        qkv if norms is None else norms.q,
        qkv if norms is None else norms.k,
        qkv if norms is None or norms.v is None else norms.v,
        0.0 if norms is None else float(norms.eps),
        qkv if scales is None else scales.k,
        qkv if scales is None else scales.v,
        qkv if query_scales is None else query_scales,
        kv_layer.stride(0) // head_size,
        kv_layer.stride(1) // head_size,
        **constants,
        **launch_options(constants),
    )


def _constants_of(
    qkv: Tensor,
    cos: Tensor,
    positions: Tensor | None,
    kv_layer: Tensor,
    num_heads: int,
    norms: HeadNorms | None,
    scales: KVScales | None,
    q_out: Tensor | None,
    query_scales: Tensor | None,
) -> dict[str, Any]:
    """Return the constants of the kernel for arguments of `rope_write_kv`."""
    kv_heads, head_size = kv_layer.shape[2], kv_layer.shape[4]
    return rope_constants(
        heads=(num_heads, kv_heads),
        head_size=head_size,
        rotated=cos.shape[1],
        block_size=kv_layer.shape[3],
        in_place=q_out is None,
        by_position=positions is not None,
        normed=0 if norms is None else norms.q.shape[0],
        scaled=scales is not None,
        norms_after=norms is not None and norms.kind == "heads after rope",
        multiplied=query_scales is not None,
        kv_parts=(qkv.shape[1] // head_size - num_heads) // kv_heads,
        values_normed=norms is not None and norms.v is not None,
        heads_between=(qkv.stride(0) - qkv.shape[1]) // head_size,
    )


def rope_constants(
    *,
    heads: tuple[int, int],
    head_size: int,
    rotated: int,
    block_size: int,
    in_place: bool,
    by_position: bool,
    normed: int,
    scaled: bool,
    norms_after: bool = False,
    multiplied: bool = False,
    kv_parts: int = 2,
    values_normed: bool = False,
    heads_between: int = 0,
) -> dict[str, Any]:
    """Return the constants of the kernel.

    heads: (of queries, of keys); normed: normalized columns of a head, or 0; kv_parts: what rows hold beside queries,
    keys and values, keys alone, or nothing; heads_between: from the end of a row to the next one's beginning.
    """
    num_heads, kv_heads = heads
    half = max(1, triton.next_power_of_2(rotated // 2))
    rest = triton.next_power_of_2(head_size - rotated) if rotated < head_size else 0
    columns = triton.next_power_of_2(2 * half + rest)
    many = normed and (head_size > 256 or (scaled and columns > head_size))  # for the registers
    most = _MAX_ELEMENTS // (2 if many else 1) // columns
    return {
        "H": num_heads,
        "KVH": kv_heads,
        "D": head_size,
        "R": rotated,
        "B": block_size,
        "IN_PLACE": in_place,
        "BY_POSITION": by_position,
        "NORMED": normed,
        "AFTER": norms_after,
        "SCALED": scaled,
        "MULTIPLIED": multiplied,
        "KV_PARTS": kv_parts,
        "VALUES_NORMED": values_normed,
        "BETWEEN": heads_between,
        "Q_HEADS": min(most, triton.next_power_of_2(num_heads)),
        "KV_HEADS": min(most, triton.next_power_of_2(kv_heads)),
        "HALF": half,
        "REST": rest,
        "WHOLE": triton.next_power_of_2(head_size),
    }


def programs_per_token(constants: Mapping[str, Any]) -> int:
    """Return the number of programs per token: programs for queries come first, then for keys and values."""
    pairs = (("H", "Q_HEADS"), ("KVH", "KV_HEADS")) if constants["KV_PARTS"] else (("H", "Q_HEADS"),)
    return sum(-(-constants[heads] // constants[tile]) for heads, tile in pairs)


def launch_options(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the launch options of the kernel with these constants."""
    columns = triton.next_power_of_2(2 * constants["HALF"] + constants["REST"])
    return options(constants["Q_HEADS"] * columns // 2, _MAX_WARPS)


def _check_shapes(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    kv_layer: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    q_out: Tensor | None,
) -> int:
    """Raise ValueError for shapes or types that do not match; return the number of tokens."""
    if kv_layer.dim() != 5 or kv_layer.shape[1] != 2 or kv_layer.shape[3] not in BLOCK_SIZES:
        raise ValueError(f"kv_layer must be [blocks, 2, KV heads, 8 to 64, head size], is {list(kv_layer.shape)}")
    tokens, (_, _, kv_heads, block_size, head_size) = qkv.shape[0], kv_layer.shape
    strides = kv_layer.stride()
    if strides[2:] != (block_size * head_size, head_size, 1) or any(stride % head_size for stride in strides[:2]):
        raise ValueError(f"kv_layer must have contiguous heads, whole rows apart, has strides {list(strides)}")
    if head_size % _HEAD_MULTIPLE:
        raise ValueError(f"kv_layer must have heads of a multiple of {_HEAD_MULTIPLE} columns, has {head_size}")
    parts = (qkv.shape[1] // head_size - num_heads) // kv_heads
    heads = num_heads + min(2, max(0, parts)) * kv_heads
    check_rows("qkv", qkv, *DTYPES)
    if qkv.shape[1] != heads * head_size or qkv.stride(0) % head_size:
        raise ValueError(
            f"qkv must be [{tokens}, {heads * head_size}], whole heads apart, is {list(qkv.shape)} with strides "
            f"{list(qkv.stride())}"
        )
    rotated = cos.shape[-1]
    if rotated % 2 or rotated > head_size:
        raise ValueError(f"cos must have 0 to {head_size} columns, an even number, has {rotated}")
    check("cos", cos, (tokens if positions is None else cos.shape[0], rotated), qkv.dtype, torch.float32)
    check("sin", sin, tuple(cos.shape), cos.dtype)
    if positions is not None:
        check("positions", positions, (tokens,), torch.int64)
    check("slot_mapping", slot_mapping, (tokens,), torch.int64)
    if q_out is not None:
        check("q_out", q_out, (tokens, num_heads, head_size), qkv.dtype)
    return tokens


def _check_options(
    qkv: Tensor, rotated: int, kv_layer: Tensor, norms: HeadNorms | None, scales: KVScales | None
) -> None:
    kv_heads, head_size = kv_layer.shape[2], kv_layer.shape[4]
    if norms is not None:
        size = norms.q.shape[0]
        if not rotated <= size <= head_size:
            raise ValueError(f"norms.q must have {rotated} to {head_size} numbers, has {size}")
        check("norms.q", norms.q, (size,), qkv.dtype, torch.float32)
        check("norms.k", norms.k, (size,), norms.q.dtype)
        if norms.v is not None:
            check("norms.v", norms.v, (head_size,), norms.q.dtype)
    if scales is None:
        if kv_layer.dtype != qkv.dtype:
            raise ValueError(f"kv_layer must be {qkv.dtype}, is {kv_layer.dtype}; an fp8 cache needs scales")
        return
    if kv_layer.dtype != FP8:
        raise ValueError(f"kv_layer must be {FP8} where scales are given, is {kv_layer.dtype}")
    check("scales.k", scales.k, (kv_heads,), torch.float32)
    check("scales.v", scales.v, (kv_heads,), torch.float32)
