"""Which configurations of the attention kernels are compiled ahead of time, for the two files that have kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import torch

from executor_svc.kernels.gpu.attention_config import (
    BLOCK_SIZES,
    HEAD_SIZES,
    AttentionConfig,
    AttentionKind,
    Phase,
    attention_config,
    constants,
    padded,
)
from executor_svc.kernels.gpu.variant import ALL_ARCHS, Variant

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
}
_QUICK = ("128 bf16 block16", "128 bf16 block64")
_WIDE_GROUP = 17
"""Query heads of a KV head that do not fit a decode tile."""


def name_of(kind: AttentionKind) -> str:
    """Return how variants' names tell it from others."""
    kv = f" kv-{_TYPES[kind.kv_dtype]}" if kind.scales else ""
    marks = (" window" * kind.window, " softcap" * kind.softcap, " wide" * kind.wide)
    return f"{kind.head_size} {_TYPES[kind.dtype]}{kv} block{kind.block_size}" + "".join(marks)


def all_cases() -> Iterator[AttentionKind]:
    """Yield everything that can be launched, but for wide groups."""
    for head_size in HEAD_SIZES:
        for dtype, kv_dtype in _dtypes():
            for block_size in BLOCK_SIZES:
                for window, softcap in product((False, True), repeat=2):
                    yield AttentionKind(head_size, dtype, kv_dtype, block_size, 1, window, softcap)


def cases(phase: Phase) -> Iterator[AttentionKind]:
    """Yield a choice of `all_cases`, in which each of its values is met with each head size and dtype.

    Everything for which the copy engine is asked is among them.
    """
    for case in all_cases():
        plain = not case.window and not case.softcap and case.block_size == 16
        full = case.window and case.softcap and case.block_size == 64
        copied = attention_config(case, phase, 90).copies
        common = case.head_size == 128 and case.dtype == case.kv_dtype == torch.bfloat16
        if plain or full or copied or common:
            yield case
    if phase is Phase.PREFILL:  # has the same tiles for wide groups
        return
    for head_size in HEAD_SIZES:
        for dtype, kv_dtype in _dtypes():
            yield AttentionKind(head_size, dtype, kv_dtype, 16, _WIDE_GROUP)


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
    """Return the variants of a kernel for some cases; archs whose tiles differ have one each.

    Args:
        kernel: under @triton.jit.
        operation: what names start with.
        phase: whose tiles it has.
        some: the cases.
        more: gives the constants that only this kernel has, for its tiles.
        pointers: types of those arguments that only this kernel has.
    """
    found = []
    for case in some:
        by_config: dict[AttentionConfig, list[int]] = {}
        for arch in (90,) if case.scales else ALL_ARCHS:
            by_config.setdefault(attention_config(case, phase, arch), []).append(arch)
        for config, archs in by_config.items():
            mark = "" if len(by_config) == 1 else f" sm{archs[0]}"
            fixed = constants(case, config) | more(config)
            fixed |= {} if case.scales else {"k_scale": None, "v_scale": None}
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
                    wgmma=phase is Phase.PREFILL and case.dtype.itemsize == 2 and 90 in archs,
                    copies=config.copies and "cache" in signature,
                    quick=name_of(case) in _QUICK,
                )
            )
    return found


def _types(case: AttentionKind, config: AttentionConfig) -> dict[str, str]:
    """Types of arguments by name, but for constants and int32."""
    element, kept = _TYPES[case.dtype], _TYPES[case.kv_dtype]
    tile = f"tensordesc<{kept}[{config.tile}, {padded(case.head_size)}]>"
    types = {"q": f"*{element}", "out": f"*{element}", "cache": tile if config.copies else f"*{kept}"}
    types |= dict.fromkeys(("k_scale", "v_scale"), "*fp32") | dict.fromkeys(("scale", "softcap"), "fp32")
    return types | dict.fromkeys(("query_start_loc", "seq_lens", "block_tables"), "*i32")
