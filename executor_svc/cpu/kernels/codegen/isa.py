"""Instruction sets that kernels are compiled for: levels of x86-64, or whatever another processor has.

A kernel's bits depend on its source and on its level only: LLVM keeps the order of floating-point operations, and the
source asks for the level's instructions, not for the processor's model. So two processors that run one level compute
the same bits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Literal

from llvmlite import binding as llvm

from executor_svc.cpu.kernels.codegen.permission import tiles_permitted

IsaName = Literal["avx2", "avx-vnni", "avx512", "avx512-vnni", "avx512-bf16", "amx"]

_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_ADDED: dict[IsaName, tuple[str, ...]] = {
    "avx2": (),
    "avx-vnni": ("avxvnni",),
    "avx512": _AVX512,
    "avx512-vnni": (*_AVX512, "avx512vnni"),
    "avx512-bf16": (*_AVX512, "avx512vnni", "avx512bf16"),
    "amx": (*_AVX512, "avx512vnni", "avx512bf16", "amx-tile", "amx-bf16", "amx-int8"),
}
"""LLVM's features of each level beyond x86-64-v3, from the lowest level to the highest."""
ISA_NAMES: tuple[IsaName, ...] = tuple(_ADDED)
_V3 = (
    *("avx", "avx2", "bmi", "bmi2", "cmov", "crc32", "cx16", "cx8", "f16c", "fma", "fxsr", "lzcnt", "mmx", "movbe"),
    *("popcnt", "sahf", "sse", "sse2", "sse3", "sse4.1", "sse4.2", "ssse3", "xsave"),
)
_UNNAMED = ("crc32", "cx8", "sahf", "fxsr", "mmx", "cmov", "sse", "sse2")
"""Features that every 64-bit processor with AVX2 has, though LLVM does not always list them."""


@dataclass(frozen=True, slots=True)
class Isa:
    """What kernels are compiled for."""

    name: str
    """A level's name; of another processor, LLVM's name of the processor and its features."""
    cpu: str
    """LLVM's name of a processor."""
    features: frozenset[str]
    """LLVM's names of features that kernels may use."""
    flags: str
    """LLVM's feature string."""

    def has(self, feature: str) -> bool:
        """Return whether kernels may use a feature, by LLVM's name, such as avx512bf16."""
        return feature in self.features


def level(name: IsaName) -> Isa:
    """Return a level, whether this processor has it or not."""
    features = (*_V3, *_ADDED[name])
    # Vectors of 512 bits are used as they are written.
    flags = ",".join(f"+{feature}" for feature in features) + ",-prefer-256-bit"
    return Isa(name, "x86-64-v3", frozenset(features), flags)


def available(features: Collection[str]) -> tuple[IsaName, ...]:
    """Return the levels that a processor with these features has, from the lowest to the highest."""
    known = {*features, *_UNNAMED}
    return tuple(name for name in ISA_NAMES if known.issuperset((*_V3, *_ADDED[name])))


@cache
def host_isa() -> Isa:
    """Return the level that this processor runs by default; on one without a level, what it has."""
    return forced_isa(None)


def forced_isa(name: IsaName | None) -> Isa:
    """Return a level of this processor, by default the highest; raises ValueError for one it lacks."""
    features = _host_features()
    found = available(features)
    permitted = tuple(each for each in found if each != "amx" or tiles_permitted())
    if name is None:
        return level(permitted[-1]) if permitted else _native(features)
    if name in found and name not in permitted:
        raise ValueError("the system does not grant AMX's tiles to this process")
    if name not in found:
        raise ValueError(f"this processor lacks {name}; it has {', '.join(found) or 'no level of x86-64 with AVX2'}")
    return level(name)


@cache
def _host_features() -> frozenset[str]:
    llvm.initialize_native_target()
    return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


def _native(features: frozenset[str]) -> Isa:
    flags = llvm.get_host_cpu_features().flatten()
    cpu = llvm.get_host_cpu_name()
    return Isa(f"{cpu} {flags}", cpu, features, flags)
