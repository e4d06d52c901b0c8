"""Kernels that begin while the one before them ends: programmatic dependent launches, of compute capability 9.0.

Two rules make that safe, see decision 0082. Each program of a dependent kernel calls `begin_dependent` before it reads
what any kernel writes, before it writes, and before it may end; what it does before that is on weights alone. And the
next kernel may begin only after that call: so the kernel before the one before has ended by then.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

LEAST_ARCH = 90
"""The least compute capability that has such launches."""
_WAIT = tl.constexpr("griddepcontrol.wait; // $0")
_LAUNCH = tl.constexpr("griddepcontrol.launch_dependents; // $0")
"""As Triton's `gdc_wait` and `gdc_launch_dependents`, which its interpreter cannot call."""
_PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")
SECTOR = tl.constexpr(32)
"""Bytes that the L2 cache loads at least."""


@triton.jit
def begin_dependent():
    """Wait until the kernel before has ended and all that it wrote is seen, then let the next one begin."""
    tl.inline_asm_elementwise(_WAIT, "=r", [], tl.int32, False, 1)
    launch_dependents()


@triton.jit
def launch_dependents():
    """Let the next kernel begin, once all programs of this one have begun: each only when it needs no earlier one."""
    tl.inline_asm_elementwise(_LAUNCH, "=r", [], tl.int32, False, 1)


@triton.jit
def prefetch(places):
    """Ask for the sector of each of these addresses to come to the L2 cache; neighbours' are asked for together."""
    tl.inline_asm_elementwise(_PREFETCH, "=r,l", [places], tl.int32, False, 1)


def dependent_options(dependent: bool) -> dict[str, Any]:
    """Return the options of Triton's launcher for a kernel that may begin before the one before it has ended."""
    return {"launch_pdl": True} if dependent else {}
