"""Instructions of the kernels of adapters. In a file of its own: `test_lora` replaces some, for absent levels."""

from __future__ import annotations

import pytest

from executor_svc.cpu.kernels import matmul_tiles
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Dtype
from executor_svc.cpu.kernels.codegen.isa import ISA_NAMES, IsaName, level
from executor_svc.cpu.kernels.listing import inner_loops
from executor_svc.cpu.kernels.lora import expand, shrink
from tests.helpers.marks import short_and_long

CASES: list[tuple[IsaName, Dtype]] = [(name, dtype) for name in ISA_NAMES for dtype in ("float32", "bfloat16")]
SHORT = [case for case in CASES if case[1] == "bfloat16" or case[0] in ("avx2", "avx512")]
"""Kernels of floats have vectors of 256 or of 512 bits."""


@pytest.mark.parametrize(("name", "dtype"), short_and_long(CASES, SHORT))
def test_loops_use_the_instructions_of_their_level(name: IsaName, dtype: Dtype) -> None:
    """And keep their sums in registers, whether this processor has the level or not."""
    code = Code(level(name))
    shrink.shrink(code, dtype)
    expand.expand(code, matmul_tiles.Output(dtype, dtype, False))
    loops = [loop for loop in inner_loops(code.assembly()) if loop.multiplies()]
    wide, pairs = name.startswith(("avx512", "amx")), dtype == "bfloat16" and name in ("avx512-bf16", "amx")
    assert loops
    for loop in loops:
        assert loop.spills() == 0
        assert ("zmm" in loop.registers()) == wide
        assert (loop.count("vdpbf16ps") > 0) == (pairs and loop.function.startswith("lora_shrink"))
