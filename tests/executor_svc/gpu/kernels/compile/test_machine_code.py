"""What is read in a listing of machine code: exponents beside products, and registers of products that still run."""

from __future__ import annotations

import pytest

from executor_svc.gpu.kernels.compile.machine_code import instructions, num_overlapped, touching

EXP, RECIPROCAL = "MUFU.EX2 R1, R1", "MUFU.RCP R2, R2"
SCORES = "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT, gsb0"
SUMS = "HGMMA.64x16x16.F32.BF16 R88, R180, gdesc[UR12].tnspB, R88, gsb0"
BUT_ONE, ALL = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def listing(*lines: str) -> str:
    """As cuobjdump prints it, with an encoding behind each and in a line of its own."""
    encoding = " " * 60 + "/* 0x000fea0003800000 */"
    rows = (
        f"        /*{16 * place:04x}*/    {line} ;  /* 0x00000004 */\n{encoding}" for place, line in enumerate(lines)
    )
    return "\n".join(rows)


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        ([], 0),
        ([EXP, ALL, EXP], 0),
        ([BUT_ONE, ALL, EXP], 0),
        ([EXP, BUT_ONE, EXP, RECIPROCAL, f"@P0 {EXP}", ALL, EXP], 2),
        ([BUT_ONE, EXP, EXP, ALL, BUT_ONE, EXP, ALL], 1),
    ],
)
def test_exponents_between_the_waits(lines: list[str], count: int) -> None:
    """The least of all loops; those before a wait, or behind the last one, run beside nothing."""
    assert num_overlapped(instructions(listing(*lines))) == count


@pytest.mark.parametrize(
    ("between", "wait", "behind", "found"),
    [
        ("FADD R1, R1, R24", BUT_ONE, "FADD R1, R1, R25", [0x20]),
        ("FADD R1, R1, R2", BUT_ONE, "FADD R1, R1, R95", [0x40]),
        ("FADD R1, R1, R2", BUT_ONE, "@!P1 FMUL R88, R88, R2", [0x40]),
        ("MOV R183, R2", BUT_ONE, "F2FP.BF16.F32.PACK_AB R180, R3, R4", [0x20, 0x40]),
        ("FADD R1, R1, R180", BUT_ONE, "STG.E [R96.64], R183", []),
        ("FADD R1, R1, R32", BUT_ONE, "FADD R1, R96, R87", []),
        ("FADD R1, R1, R2", ALL, "FADD R88, R88, R180", []),
    ],
)
def test_registers_of_products_that_run(between: str, wait: str, behind: str, found: list[int]) -> None:
    """Sums may not be named, left operands not be written, before the wait that leaves none of their product."""
    listed = instructions(listing(SCORES, SUMS, between, wait, behind, ALL, "FADD R24, R88, R180"))
    assert [each.address for each in touching(listed)] == found
