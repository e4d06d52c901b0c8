"""Which configurations of the attention kernels are compiled ahead of time, for the two files that have kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from executor_svc.kernels.gpu.attention_config import (
    BLOCK_SIZES,
    HEAD_SIZES,
    AttentionConfig,
    Phase,
    attention_config,
    constants,
)
from executor_svc.kernels.gpu.variant import ALL_ARCHS, Variant

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
}
_POINTERS = ("query_start_loc", "seq_lens", "block_tables")
_FLOATS = ("scale", "softcap")
_QUICK = "128 bf16 block16"
_WIDE_GROUP = 17
"""Query heads of a KV head that do not fit a decode tile."""


@dataclass(frozen=True, slots=True)
class Case:
    """What sets one configuration of attention apart from others."""

    head_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    window: bool = False
    softcap: bool = False
    wide: bool = False
    """Are there more query heads to a KV head than a decode tile has rows."""

    @property
    def name(self) -> str:
        kv = f" kv-{_TYPES[self.kv_dtype]}" if self.scales else ""
        marks = (" window" * self.window, " softcap" * self.softcap, " wide" * self.wide)
        return f"{self.head_size} {_TYPES[self.dtype]}{kv} block{self.block_size}" + "".join(marks)

    @property
    def scales(self) -> bool:
        """Is the cache in fp8."""
        return self.kv_dtype != self.dtype

    @property
    def archs(self) -> tuple[int, ...]:
        return (90,) if self.scales else ALL_ARCHS

    def config(self, phase: Phase, arch: int) -> AttentionConfig:
        group = _WIDE_GROUP if self.wide else 1
        features = self.window or self.softcap
        return attention_config(phase, self.head_size, self.dtype, self.kv_dtype, group, features, arch)

    def constants(self, config: AttentionConfig) -> dict[str, Any]:
        return constants(config, self.head_size, self.block_size, self.window, self.softcap, self.scales)


def all_cases() -> Iterator[Case]:
    """Yield everything that can be launched, but for wide groups."""
    for head_size in HEAD_SIZES:
        for dtype, kv_dtype in _dtypes():
            for block_size in BLOCK_SIZES:
                for features in range(4):
                    yield Case(head_size, dtype, kv_dtype, block_size, bool(features & 1), bool(features & 2))


def cases(phase: Phase) -> Iterator[Case]:
    """Yield a choice of `all_cases`, in which each of its values is met with each head size and dtype."""
    for case in all_cases():
        plain = not case.window and not case.softcap and case.block_size == 16
        full = case.window and case.softcap and case.block_size == 64
        common = case.head_size == 128 and case.dtype == case.kv_dtype == torch.bfloat16
        if plain or full or common:
            yield case
    if phase is Phase.PREFILL:  # has the same tiles for wide groups
        return
    for head_size in HEAD_SIZES:
        for dtype, kv_dtype in _dtypes():
            yield Case(head_size, dtype, kv_dtype, 16, wide=True)


def _dtypes() -> Iterator[tuple[torch.dtype, torch.dtype]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield dtype, dtype
        if dtype.itemsize == 2:
            yield dtype, torch.float8_e4m3fn


def variants_of(
    kernel: Any,
    operation: str,
    phase: Phase,
    some: Iterable[Case],
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
        for arch in case.archs:
            by_config.setdefault(case.config(phase, arch), []).append(arch)
        for config, archs in by_config.items():
            mark = "" if len(by_config) == 1 else f" sm{archs[0]}"
            fixed = case.constants(config) | more(config)
            fixed |= {} if case.scales else {"k_scale": None, "v_scale": None}
            signature = {name: _type_of(name, case, fixed, pointers) for name in kernel.arg_names}
            found.append(
                Variant(
                    name=f"{operation} {case.name}{mark}",
                    kernel=kernel,
                    signature=signature,
                    constants={name: value for name, value in fixed.items() if name in signature},
                    divisible=tuple(
                        name for name in ("q", "kv_layer", "out", "q_stride", *pointers) if name in signature
                    ),
                    num_warps=config.num_warps,
                    num_stages=config.num_stages,
                    archs=tuple(archs),
                    no_spills=True,
                    wgmma=phase is Phase.PREFILL and case.dtype.itemsize == 2 and 90 in archs,
                    quick=case.name == _QUICK,
                )
            )
    return found


def _type_of(name: str, case: Case, fixed: Mapping[str, Any], pointers: Mapping[str, str]) -> str:
    known = {"q": case.dtype, "out": case.dtype, "kv_layer": case.kv_dtype}
    if name in fixed:
        return "constexpr"
    if name in known:
        return f"*{_TYPES[known[name]]}"
    if name in ("k_scale", "v_scale"):
        return "*fp32"
    if name in _POINTERS:
        return "*i32"
    return pointers.get(name, "fp32" if name in _FLOATS else "i32")
