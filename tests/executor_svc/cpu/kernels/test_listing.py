"""The instructions of every level's matrix products, as compiled, whether this processor has the level or not."""

from __future__ import annotations

import sys

import pytest

from executor_svc.cpu.kernels import listing
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Dtype
from executor_svc.cpu.kernels.codegen.isa import ISA_NAMES, IsaName, level
from executor_svc.cpu.kernels.listing import Loop, inner_loops, products
from executor_svc.cpu.kernels.matmul_tiles import widen_rows
from tests.helpers.marks import short_and_long

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
NESTED = """
work:
	xorl	%eax, %eax                      # a comment
.LBB0_1:
	movq	(%rdi), %rdx
.LBB0_2:
	vfmadd231ps	(%rsi), %zmm1, %zmm0
	vmovups	%zmm2, 64(%rsp)                 # 64-byte Spill
	jl	.LBB0_2
	addq	$8, %rdi
	jl	.LBB0_1
.LBB0_3:
	tileloadd	(%r10,%rdi), %tmm1
	callq	other
	jmp	.LBB0_3
	je	.LBB0_4
.LBB0_4:
	retq
	.size	work, .Lend-work
other:
	retq
"""


def test_inner_loops_of_a_text() -> None:
    first, second = inner_loops(NESTED)
    fused, spill = "vfmadd231ps (%rsi), %zmm1, %zmm0", "vmovups %zmm2, 64(%rsp)"
    assert first == Loop("work", (fused, spill, "jl .LBB0_2"))
    assert first.multiplies()
    assert (first.count("vfmadd"), first.spills(), first.registers()) == (1, 1, {"zmm"})
    assert second == Loop("work", ("tileloadd (%r10,%rdi), %tmm1", "callq other", "jmp .LBB0_3"))
    assert not second.multiplies()
    assert (second.count("call"), second.spills(), second.registers()) == (1, 0, {"tmm"})


CASES = [(name, dtype) for name in ISA_NAMES for dtype in DTYPES]
SHORT = [case for case in CASES if case[1] == "bfloat16" or case[0] in ("avx2", "avx512")]
"""Kernels of floats have vectors of 256 or of 512 bits."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "dtype"), short_and_long(CASES, SHORT))
def test_products_use_the_instructions_of_their_level(name: IsaName, dtype: Dtype) -> None:
    loops = products(name, dtype)
    assert loops
    special = {"avx512-bf16": "vdpbf16ps", "amx": "tdpbf16ps"} if dtype == "bfloat16" else {}
    wide = name.startswith(("avx512", "amx"))
    for loop in loops:
        assert loop.count(special.get(name, "vfmadd")) > 0
        assert loop.count("call") == 0
        assert "tmm" in loop.registers() if special.get(name) == "tdpbf16ps" else "tmm" not in loop.registers()
        assert ("zmm" in loop.registers()) == (wide and "tmm" not in loop.registers())
        # Of two rows, whose pace is that of memory, 16 registers cannot hold all columns' weights.
        if wide or not loop.function.endswith("_bfloat16_2"):
            assert loop.spills() == 0
        if special.get(name):
            assert loop.count("vfmadd") == 0


def test_products_through_tiles() -> None:
    """Each step loads tiles of x and of the weight once, multiplies each with each, and stores none."""
    few, more, many = products("amx", "bfloat16")
    for loop, loads, multiplied in ((few, 3, 2), (more, 4, 4), (many, 4, 4)):
        assert loop.count("tileloadd") == loads
        assert loop.count("tdpbf16ps") == multiplied
        assert loop.count("tilestored") == loop.count("tilezero") == loop.count("ldtilecfg") == 0
        assert not any("(%rsp" in line for line in loop.instructions), "nothing is spilled"


def test_the_listing_that_developers_print(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["listing", "amx"])
    listing.main()
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"amx"}
    assert any("4 tileloadd, 4 tdpbf16ps" in line for line in lines)


def test_rows_are_widened_by_whole_vectors() -> None:
    """AVX2 has no load of some bfloat16: a loop of such loads has a branch for each number."""
    code = Code(level("avx2"))
    widen_rows(code)
    loops = inner_loops(code.assembly())
    assert any(loop.count("vpmovzxwd") and loop.count("j") == 1 for loop in loops)
