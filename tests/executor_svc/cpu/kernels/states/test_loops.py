"""Inner loops of the recurrence: their sums, and what is added, are in registers on every instruction set."""

from __future__ import annotations

import pytest

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.isa import level
from executor_svc.cpu.kernels.listing import inner_loops
from executor_svc.cpu.kernels.states.recurrence import HeadKernel, recurrence
from executor_svc.plan.state_sizes import DeltaState, MambaState, Recurrence

SHAPES: dict[str, tuple[Recurrence, int]] = {
    "delta": (DeltaState(16, 32, 128, 128), 3),
    "delta by key": (DeltaState(32, 32, 128, 128, gate_by_key=True), 3),
    "mamba": (MambaState(128, 64, 128, 1), 2),
}
"""By name: a shape, and the products and sums of each number of a matrix."""


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_a_pass_is_a_few_operations_of_each_number(isa: str, name: str) -> None:
    code, (shape, fused) = Code(level(isa)), SHAPES[name]
    recurrence(code, "bfloat16", HeadKernel(shape, 1, 0))
    passes = [loop for loop in inner_loops(code.assembly()) if loop.multiplies()]
    unrolled = max(passes, key=lambda loop: len(loop.instructions))
    registers = 8 * 2  # 8 rows of 32 columns, or on AVX2 of 16 in two registers
    assert unrolled.count("vfm") == fused * registers
    assert unrolled.count("vmulps") == (registers if shape.unit.decays > 1 else 0)
    assert [loop.spills() for loop in passes] == [0] * len(passes)
