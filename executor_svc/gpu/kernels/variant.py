"""What a Triton kernel is launched with: told by each kernel's file, compiled ahead of time by `compile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ALL_ARCHS = (80, 90)
"""Compute capabilities that kernels are compiled for: Ampere's A100 and Hopper's H100 and H200."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration of a kernel that its launcher can launch."""

    name: str
    """Unique among all kernels: operation, then what sets it apart, as in `attention head128 bf16 prefill`."""
    kernel: Any
    """The function under @triton.jit."""
    signature: Mapping[str, str]
    """Type of every argument by name, as Triton spells it: '*bf16', 'i32', 'constexpr'."""
    constants: Mapping[str, Any]
    """Value of every constexpr argument by name."""
    divisible: tuple[str, ...] = ()
    """Arguments that are always multiples of 16, as addresses and most strides are: what the launcher's arguments
    have at run time, since Triton specializes on it."""
    num_warps: int = 4
    num_stages: int = 2
    fp_fusion: bool = True
    archs: tuple[int, ...] = ALL_ARCHS
    no_spills: bool = False
    """Must it compile without spilling registers, on every arch."""
    wgmma: bool = False
    """Must its sm_90 PTX multiply with wgmma."""
    copies: bool = False
    """Must its sm_90 PTX fetch with the copy engine."""
    quick: bool = False
    """Is it among the few that every `make test` compiles."""
