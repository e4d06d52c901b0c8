"""A configuration of a Triton kernel: listed by the kernel's module, compiled ahead of time by `compile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALL_ARCHS = (80, 90)
"""Compute capabilities that kernels are compiled for: Ampere's A100, and Hopper's H100 and H200."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration in which a kernel's launcher can launch it."""

    name: str
    """Unique among all kernels: the operation, then its distinguishing options: `attention head128 bf16 prefill`."""
    kernel: Any
    """The function under @triton.jit."""
    signature: Mapping[str, str]
    """Type of every argument by name, in Triton's notation: '*bf16', 'i32', 'constexpr'."""
    constants: Mapping[str, Any]
    """Value of every constexpr argument by name."""
    divisible: tuple[str, ...] = ()
    """Arguments that are multiples of 16 in every launch, as addresses and most strides: Triton specializes on it."""
    num_warps: int = 4
    num_stages: int = 2
    fp_fusion: bool = True
    max_registers: int | None = None
    """Of a thread, so that more programs fit a multiprocessor; None: ptxas decides."""
    archs: tuple[int, ...] = ALL_ARCHS
    no_spills: bool = False
    """Whether it must compile without register spills, on every arch."""
    wgmma: bool = False
    """Whether its sm_90 PTX must multiply with wgmma."""
    products: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """By arch: the tensor cores' instructions that its code must have, and no others, as "wgmma m64n64k16"."""
    whole_rows: bool = False
    """Whether each row of a product's result must be in one warp, on sm_90: then its sums have one order."""
    copies: bool = False
    """Whether its sm_90 PTX must load with the copy engine."""
    narrow_loads: int | None = None
    """Most instructions that read less than 16 bytes of global memory at once; None: any number."""
    roles: bool = False
    """Whether its warps must have roles on sm_90: one copies, the others compute weights while a product runs."""
    dependent: bool = False
    """Whether it may begin before the kernel before has ended: its PTX must then wait first, as `dependent` says."""
    quick: bool = False
    """Whether every `make test` compiles it."""
