"""All variants of the attention kernels, for the two modules that define kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from executor_svc.gpu.kernels.attention.config import (
    COPIED_BLOCK,
    HEAD_SIZES,
    AttentionConfig,
    AttentionKind,
    Phase,
    attention_config,
    constants,
    padded,
)
from executor_svc.gpu.kernels.variant import ALL_ARCHS, Variant

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
}
_QUICK = ("128 bf16", "128 bf16 copied")
_ANY_BLOCK = 16
"""Represents all block sizes for which the copy engine is not used."""
_EXTRAS = ((False, False), (True, False), (False, True))
"""Softcap and sinks: no model has both."""
_CHUNKED = 128
"""The head size of models with chunks."""
_WGMMA_ROWS = 64
"""Rows of the products of a Hopper GPU's tensor cores that are faster than others."""
_WIDE_GROUP = 17
"""A number of query heads per KV head that does not fit a decode tile."""
_LATENTS = ((512, 64), (256, 32))
"""Columns of latents, and of the rotated keys beside them: DeepSeek's and MiniCPM3's."""


def name_of(kind: AttentionKind) -> str:
    """Return the part of variants' names that identifies a kind."""
    kv = f" kv-{_TYPES[kind.kv_dtype]}" if kind.scales else ""
    copied = kind.block_size == COPIED_BLOCK
    windowed = kind.window and not kind.chunked
    marks = {
        "window": windowed,
        "chunks": kind.chunked,
        "softcap": kind.softcap,
        "sinks": kind.sinks,
        "wide": kind.wide,
        "copied": copied,
        "latent": kind.more > 0,
    }
    return " ".join([f"{kind.head_size} {_TYPES[kind.dtype]}{kv}", *(name for name, there in marks.items() if there)])


def cases(phase: Phase) -> Iterator[AttentionKind]:
    """Yield all kinds of attention: for any block size, and for the one that the copy engine loads."""
    # Prefill has the same tiles for wide groups.
    groups = (1, _WIDE_GROUP) if phase in (Phase.DECODE, Phase.SPLIT) else (1,)
    for head_size, (dtype, kv_dtype), group in product(HEAD_SIZES, _dtypes(), groups):
        if dtype == torch.float32 and (phase is Phase.DRAFTS or (head_size == HEAD_SIZES[-1] and group > 1)):
            continue
        kinds = product((False, True), _EXTRAS, (_ANY_BLOCK, COPIED_BLOCK))
        for window, (softcap, sinks), block_size in kinds:
            kind = AttentionKind(head_size, dtype, kv_dtype, block_size, group, window, softcap, sinks=sinks)
            if block_size == _ANY_BLOCK or attention_config(kind, phase, 90).copies:
                yield kind
            if head_size == _CHUNKED and window and not softcap and not sinks and block_size == _ANY_BLOCK:
                yield replace(kind, chunked=True)

    for (latent, rope), (dtype, kv_dtype), group in product(_LATENTS, _dtypes(), groups):
        if dtype != torch.float32 or (phase is not Phase.DRAFTS and group == 1):
            yield AttentionKind(latent, dtype, kv_dtype, _ANY_BLOCK, group, more=rope)


def _dtypes() -> Iterator[tuple[torch.dtype, torch.dtype]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield dtype, dtype
        if dtype.itemsize == 2:
            yield dtype, torch.float8_e4m3fn


def variants_of(
    kernel: Any,
    operation: str,
    phase: Phase,
    some: Iterable[AttentionKind],
    more: Callable[[AttentionConfig], dict[str, Any]],
    pointers: Mapping[str, str],
) -> list[Variant]:
    """Return the variants of a kernel for some cases, one for each set of archs with the same tiles.

    Args:
        kernel: under @triton.jit.
        operation: the beginning of the names.
        phase: decides the tiles.
        some: the cases.
        more: returns the constants that only this kernel has, for its tiles.
        pointers: types of the arguments that only this kernel has.
    """
    found = []
    for case in some:
        by_config: dict[AttentionConfig, list[int]] = {}
        for arch in (90,) if case.scales or case.block_size == COPIED_BLOCK else ALL_ARCHS:
            by_config.setdefault(attention_config(case, phase, arch), []).append(arch)
        for config, archs in by_config.items():
            mark = "" if len(by_config) == 1 else f" sm{archs[0]}"
            fixed = constants(case, config) | more(config)
            fixed |= {} if case.scales else {"k_scale": None, "v_scale": None}
            fixed |= {} if case.sinks else {"sinks": None}
            known = _types(case, config) | dict(pointers)
            signature = {name: "constexpr" if name in fixed else known.get(name, "i32") for name in kernel.arg_names}
            divisible = ("q", "cache", "out", "q_stride", *pointers)
            found.append(
                Variant(
                    name=f"{operation} {name_of(case)}{mark}",
                    kernel=kernel,
                    signature=signature,
                    constants={name: value for name, value in fixed.items() if name in signature},
                    divisible=tuple(name for name in divisible if re.match(r"\*|i32", signature.get(name, ""))),
                    num_warps=config.num_warps,
                    num_stages=config.num_stages,
                    archs=tuple(archs),
                    no_spills=True,
                    wgmma=phase is Phase.PREFILL
                    and case.dtype.itemsize == 2
                    and 90 in archs
                    and config.rows >= _WGMMA_ROWS,
                    copies=config.copies and "cache" in signature,
                    # Of the copy engine's tiles the prompts' are enough.
                    quick=name_of(case) in _QUICK and (phase is Phase.PREFILL or not config.copies),
                )
            )
    return found


def _types(case: AttentionKind, config: AttentionConfig) -> dict[str, str]:
    """Types of arguments by name, except constants and int32."""
    element, kept = _TYPES[case.dtype], _TYPES[case.kv_dtype]
    tile = f"tensordesc<{kept}[{config.tile}, {padded(case.head_size)}]>"
    types = {"q": f"*{element}", "out": f"*{element}", "cache": tile if config.copies else f"*{kept}"}
    types |= dict.fromkeys(("k_scale", "v_scale", "sinks"), "*fp32") | dict.fromkeys(("scale", "softcap"), "fp32")
    return types | dict.fromkeys(("query_start_loc", "seq_lens", "block_tables"), "*i32")
