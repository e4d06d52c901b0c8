"""Rows of latents: their norm, the rotation of the key beside them and the write to the cache; rotation of queries.

Rounded where `rope` rounds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.kernels import Rope
from executor_svc.device.latent import latent_columns, padded_latent
from executor_svc.gpu.kernels.heads import load_heads, normalized_values, rotate_heads, store_heads
from executor_svc.gpu.kernels.rope import BLOCK_SIZES, FP8
from executor_svc.gpu.kernels.rows import DTYPES, check, check_rows, options, variant
from executor_svc.gpu.kernels.variant import ALL_ARCHS, Variant

_MAX_ELEMENTS = 2048
_MAX_WARPS = 4
_WRITE = "latents", "norm", "cos", "sin", "positions", "slots", "kv_layer", "scale"
_ROTATE = "q", "into", "cos", "sin", "positions", "factors"


@triton.jit(do_not_specialize=["block_rows"])
def write_latents_kernel(
    latents,
    norm,
    cos,
    sin,
    positions,
    slots,
    kv_layer,
    scale,
    eps,
    block_rows,
    L: tl.constexpr,
    R: tl.constexpr,
    FIRST: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    HALF: tl.constexpr,
    PAD: tl.constexpr,
):
    """Write the row of one token: the latent up to FIRST, the key, and PAD or fewer columns of zeros up to P."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    angle = tl.maximum(tl.load(positions + token), 0) * R
    source = latents + token * STRIDE
    row, columns = tl.arange(0, 1), tl.arange(0, WHOLE)
    latent = load_heads(source, 1, row, columns, STRIDE, L)
    latent = normalized_values(latent, norm, eps, columns, L, L)
    written = tl.where(slot >= 0, 1, 0)
    into = kv_layer + (slot // B * block_rows + slot % B) * P
    store_heads(tl.where(columns[None, :] < L, latent, 0.0), scale, written, row, columns, into, P, FIRST, SCALED)
    rotate_heads(
        source + L, into + FIRST, 1, written, row, cos + angle, sin + angle, norm, eps, scale, norm,
        P, R, R, 0, False, False, SCALED, False, HALF, 0,
    )  # fmt: skip
    if PAD > 0:
        rest = tl.arange(0, PAD)
        zeros = tl.zeros([1, PAD], latent.dtype)
        store_heads(zeros, scale, written, row, rest, into + FIRST + R, P, P - FIRST - R, SCALED)


@triton.jit
def rotate_queries_kernel(
    q,
    into,
    cos,
    sin,
    positions,
    factors,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    FIRST: tl.constexpr,
    P: tl.constexpr,
    STRIDE: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    HALF: tl.constexpr,
    PAD: tl.constexpr,
):
    """Write the last R columns of some heads of one token to `into` from FIRST on; multiply the first N in place."""
    parts: tl.constexpr = (H + HEADS - 1) // HEADS
    program = tl.program_id(0)
    token, rows = (program // parts).to(tl.int64), program % parts * HEADS + tl.arange(0, HEADS)
    position = tl.maximum(tl.load(positions + token), 0)
    source, target = q + token * STRIDE, into + token * (H * P) + FIRST
    rotate_heads(
        source + N, target, H, H, rows, cos + position * R, sin + position * R, cos, 0.0, cos, factors + position,
        P, N + R, R, 0, False, False, False, MULTIPLIED, HALF, 0,
    )  # fmt: skip
    if PAD > 0:
        zeros = tl.zeros([HEADS, PAD], q.dtype.element_ty)
        store_heads(zeros, cos, H, rows, tl.arange(0, PAD), target + R, P, P - FIRST - R, False)
    if MULTIPLIED:
        columns = tl.arange(0, PLAIN)
        plain = load_heads(source, H, rows, columns, N + R, N)
        plain = (plain.to(tl.float32) * tl.load(factors + position).to(tl.float32)).to(plain.dtype)
        store_heads(plain, cos, H, rows, columns, source, N + R, N, False)


def write_latents(
    kv: Tensor,
    norm: Tensor,
    eps: float,
    rope: Rope,
    kv_layer: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None = None,
) -> None:
    """Write the rows of the cache of kv [T, L + R]; raises ValueError for shapes that do not match.

    Args:
        kv, norm, eps, rope, kv_layer: as in `LatentKernels.write_latents`.
        slot_mapping: [T] int64, block * B + offset; -1: not written.
        scale: [1], for a cache in fp8 only. Values above 448 after the division are stored as 448.
    """
    check_rows("kv", kv)
    tokens, latent, rotated = len(kv), norm.shape[0], rope.cos.shape[1]
    _check_rope(kv, rope)
    check("norm", norm, (latent,), kv.dtype, torch.float32)
    check("slot_mapping", slot_mapping, (tokens,), torch.int64)
    columns = latent_columns(latent, rotated)
    if kv.shape[1] != latent + rotated:
        raise ValueError(f"kv must be [T, {latent + rotated}], is {list(kv.shape)}")
    if kv_layer.dim() != 5 or kv_layer.shape[2] != 1 or kv_layer.shape[4] != columns:
        raise ValueError(f"kv_layer must be [blocks, 2, 1, block size, {columns}], is {list(kv_layer.shape)}")
    if kv_layer.shape[3] not in BLOCK_SIZES or kv_layer.stride()[3:] != (columns, 1) or kv_layer.stride(0) % columns:
        raise ValueError(f"kv_layer must have rows of 8 to 64 tokens, blocks whole rows apart, is {kv_layer.stride()}")
    if (kv_layer.dtype, scale is None) not in ((kv.dtype, True), (FP8, False)):
        raise ValueError(f"kv_layer must be {kv.dtype}, or {FP8} with a scale, is {kv_layer.dtype}")
    if scale is not None:
        check("scale", scale, (1,), torch.float32)
    constants = writing_constants(latent, rotated, kv_layer.shape[3], kv.stride(0), scale is not None)
    if tokens:
        write_latents_kernel[tokens,](
            kv,
            norm,
            rope.cos,
            rope.sin,
            rope.rows,
            slot_mapping,
            kv_layer,
            kv if scale is None else scale,
            float(eps),
            kv_layer.stride(0) // columns,
            **constants,
            **options(constants["WHOLE"], _MAX_WARPS),
        )


def rotate_queries(q: Tensor, rope: Rope, num_heads: int, into: Tensor, latent: int) -> None:
    """Write the rotated columns of heads q [T, H * (N + R)] to into [T, H, P], from the column of keys to the last one.

    With query scales the other columns of q are multiplied too, in place. Raises ValueError for wrong shapes.
    """
    check_rows("q", q)
    _check_rope(q, rope)
    tokens, rotated = len(q), rope.cos.shape[1]
    check("into", into, (tokens, num_heads, latent_columns(latent, rotated)), q.dtype)
    if q.shape[1] % num_heads or q.shape[1] // num_heads < rotated:
        raise ValueError(f"q must have {num_heads} heads of {rotated} columns or more, is {list(q.shape)}")
    factors = rope.query_scales
    if factors is not None:
        check("query_scales", factors, (rope.cos.shape[0],), q.dtype, torch.float32)
    plain = q.shape[1] // num_heads - rotated
    constants = rotating_constants(num_heads, plain, rotated, latent, q.stride(0), factors is not None)
    if tokens:
        rotate_queries_kernel[tokens * -(-num_heads // constants["HEADS"]),](
            q,
            into,
            rope.cos,
            rope.sin,
            rope.rows,
            q if factors is None else factors,
            **constants,
            **options(constants["HEADS"] * _columns(constants), _MAX_WARPS),
        )


def writing_constants(latent: int, rotated: int, block_size: int, stride: int, scaled: bool) -> dict[str, Any]:
    """Return the constants of the kernel that writes, for rows `stride` numbers apart."""
    sizes = {"L": latent, "R": rotated, **_places(latent, rotated), "B": block_size, "STRIDE": stride}
    return {**sizes, "SCALED": scaled, "WHOLE": triton.next_power_of_2(padded_latent(latent)), "HALF": _half(rotated)}


def rotating_constants(
    num_heads: int, plain: int, rotated: int, latent: int, stride: int, multiplied: bool
) -> dict[str, Any]:
    """Return the constants of the kernel that rotates queries, for rows `stride` numbers apart."""
    constants = {"H": num_heads, "N": plain, "R": rotated, **_places(latent, rotated), "STRIDE": stride}
    constants |= {"MULTIPLIED": multiplied, "PLAIN": triton.next_power_of_2(max(1, plain)), "HALF": _half(rotated)}
    heads = min(_MAX_ELEMENTS // _columns(constants), triton.next_power_of_2(num_heads))
    return {**constants, "HEADS": heads}


def _places(latent: int, rotated: int) -> dict[str, int]:
    first, columns = padded_latent(latent), latent_columns(latent, rotated)
    pad = columns - first - rotated
    return {"FIRST": first, "P": columns, "PAD": triton.next_power_of_2(pad) if pad else 0}


def _half(rotated: int) -> int:
    return int(triton.next_power_of_2(rotated // 2))


def _columns(constants: dict[str, Any]) -> int:
    """Return the columns of a head that a program has at once."""
    plain = int(constants["PLAIN"]) if constants["MULTIPLIED"] else 0
    return max(2 * int(constants["HALF"]), int(constants["PAD"]), plain)


def _check_rope(x: Tensor, rope: Rope) -> None:
    rotated = rope.cos.shape[1]
    if rotated % 2 or not rotated:
        raise ValueError(f"cos must have an even number of columns, has {rotated}")
    check("cos", rope.cos, tuple(rope.cos.shape), x.dtype, torch.float32)
    check("sin", rope.sin, tuple(rope.cos.shape), rope.cos.dtype)
    check("rows", rope.rows, (len(x),), torch.int64)


_HEADS = (16, 20, 64, 128)
"""Of the models: V2-Lite, GLM-4.7-Flash, Kimi K2, V3."""


def variants() -> list[Variant]:
    """Return the configurations compiled ahead of time: of 512 and 64 columns, in rows as wide as a query's latent."""
    found = []
    for dtype in DTYPES.values():
        for weight, cache in dict.fromkeys(((dtype, dtype), ("fp32", dtype), (dtype, "fp8e4nv"))):
            scaled = cache != dtype
            if scaled and dtype == "fp32":
                continue
            constants = writing_constants(512, 64, 16, 2112, scaled)
            types = [f"*{dtype}", f"*{weight}", f"*{dtype}", f"*{dtype}", "*i64", "*i64", f"*{cache}"]
            types.append("*fp32" if scaled else f"*{dtype}")
            arguments = dict(zip(_WRITE, types, strict=True)) | {"eps": "fp32", "block_rows": "i32"}
            name = f"write_latents {dtype}{' wide norm' if weight != dtype else ''}{' fp8 cache' if scaled else ''}"
            launched, archs = options(constants["WHOLE"], _MAX_WARPS), (90,) if scaled else ALL_ARCHS
            quick = (dtype, weight, scaled) == ("bf16", "bf16", False)
            found.append(variant(name, write_latents_kernel, arguments, constants, launched, quick, archs))
        for num_heads in _HEADS:
            for multiplied in (False, True):
                constants = rotating_constants(num_heads, 128, 64, 512, num_heads * 192, multiplied)
                types = [*[f"*{dtype}"] * 4, "*i64", f"*{dtype}"]
                arguments = dict(zip(_ROTATE, types, strict=True))
                name = f"rotate_queries q{num_heads} {dtype}{' multiplied' if multiplied else ''}"
                launched = options(constants["HEADS"] * _columns(constants), _MAX_WARPS)
                found.append(variant(name, rotate_queries_kernel, arguments, constants, launched))
    return found
