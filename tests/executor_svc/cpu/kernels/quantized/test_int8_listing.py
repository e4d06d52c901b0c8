"""The instructions of products with int8 activations on every level, as compiled."""

from __future__ import annotations

import pytest

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.isa import ISA_NAMES, IsaName, level
from executor_svc.cpu.kernels.listing import Loop, inner_loops
from executor_svc.cpu.kernels.matmul_tiles import Output
from executor_svc.cpu.kernels.quantized.int8_product import int8_product
from executor_svc.cpu.kernels.quantized.layout import PackedLayout
from executor_svc.cpu.stored_linear import int8_rows
from executor_svc.device.stored_linear import QuantFormat
from tests.executor_svc.cpu.kernels.quantized.formats import INT8_ROWS, Q4_0, Q4_K, Q6_K, Q8_0, format_of
from tests.helpers.marks import short_and_long

COLUMNS = 512
_BYTES, _PAIRS, _VNNI = "vpmaddubsw", "vpmaddwd", "vpdpbusd"
_FUNCTIONS = ("int8_tile_", "int8_chunk_tile_", "int8_tiles_", "int8_tile_sums_")
WITH_MINIMUMS = QuantFormat("8 bits with minimums", 8, 32, offsets="minimum")


def loops_of(name: IsaName, kind: QuantFormat, whole_row: bool = False) -> dict[str, list[Loop]]:
    """Return the inner loops of a format's product that multiply bytes, by the beginnings of their functions' names."""
    code, layout = Code(level(name)), PackedLayout(kind, COLUMNS)
    steps = int8_rows(code.isa, layout, whole_row)
    assert steps is not None
    int8_product(code, layout, steps, Output("bfloat16", "bfloat16", with_bias=False))
    found: dict[str, list[Loop]] = {
        each: [] for each in ("int8_tile_", "int8_chunk_tile_", "int8_tiles_", "int8_tile_sums_")
    }
    for loop in inner_loops(code.assembly()):
        if any(used(loop, each) for each in (_BYTES, _PAIRS, _VNNI, "tdp")):
            found[max((each for each in found if loop.function.startswith(each)), key=len)].append(loop)
    return found


def used(loop: Loop, instruction: str) -> set[str]:
    """Return the kinds of registers of an instruction's uses: empty where it is not used."""
    own = [line.removeprefix("{vex} ") for line in loop.instructions]
    return Loop("", tuple(line for line in own if line.startswith(instruction))).registers()


CASES = [(name, kind) for name in ISA_NAMES for kind in (Q4_0, Q8_0)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "kind"), short_and_long(CASES, [case for case in CASES if case[1] == Q4_0 or case[0] in ("avx2", "amx")])
)
def test_products_use_the_instructions_of_their_level(name: IsaName, kind: QuantFormat) -> None:
    wide = "zmm" if name.startswith(("avx512", "amx")) else "ymm"
    found = loops_of(name, kind)
    assert found["int8_tile_"]
    assert bool(found["int8_chunk_tile_"]) == (wide == "ymm")
    for loop in (*found["int8_tile_"], *found["int8_chunk_tile_"]):
        has_dot = name not in ("avx2", "avx512")
        assert used(loop, _VNNI) == ({wide} if has_dot else set())
        assert used(loop, _PAIRS) == (set() if has_dot else {wide})
        assert used(loop, _BYTES) == ({wide} if not has_dot and kind == Q4_0 else set())
        assert all(line.startswith("{vex}") == (wide == "ymm") for line in loop.instructions if _VNNI in line)
        assert loop.count("call") == 0
        assert wide == "ymm" or loop.spills() == 0


def test_codes_are_unpacked_once_for_many_rows() -> None:
    """With 512 bits those of groups of 16 columns alone are, and those of AMX's tiles are elsewhere."""
    for name in ("avx2", "avx512", "avx512-vnni"):
        for loop in loops_of(name, Q6_K)["int8_chunk_tile_"]:
            assert (loop.count("vpand"), loop.count("vpsrl"), loop.count("vpor")) == (0, 0, 0)
            assert name == "avx2" or loop.spills() == 0
    assert not loops_of("avx512-vnni", Q4_K)["int8_chunk_tile_"]
    assert not loops_of("amx", Q6_K)["int8_chunk_tile_"]


def test_tiles_are_signed_where_codes_are() -> None:
    """And only AMX has them."""
    for kind, name, other in ((Q4_K, "tdpbssd", "tdpbsud"), (WITH_MINIMUMS, "tdpbsud", "tdpbssd")):
        pairs, last = loops_of("amx", kind)["int8_tiles_"]
        assert (pairs.count(name), last.count(name), pairs.count(other)) == (2, 1, 0)
        assert pairs.count("tilestored") == pairs.count("tilezero") == 2
        assert pairs.registers() == {"tmm", "zmm"}
        assert (pairs.count("vcvtdq2ps"), pairs.count("vfmadd")) == (2 * 16, 2 * 2 * 16)
    assert not loops_of("avx512-bf16", Q4_K)["int8_tiles_"]


def test_sums_of_whole_rows_stay_in_tiles() -> None:
    """Two blocks of rows and both halves of a panel: each tile that is loaded is multiplied twice."""
    loops = loops_of("amx", format_of(INT8_ROWS, COLUMNS), whole_row=True)["int8_tile_sums_"]
    assert sorted((loop.count("tileloadd"), loop.count("tdpbssd")) for loop in loops) == [(3, 2), (4, 4)]
    assert not any(loop.count("tilestored") or loop.count("tilezero") for loop in loops)
