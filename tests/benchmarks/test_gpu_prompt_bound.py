"""Cycles of a loop over tiles of keys, counted in machine code; that of a kernel is not compiled here."""

from __future__ import annotations

import pytest

from benchmarks.gpu.prompt_bound import KERNELS, cycles, loops_over_tiles
from executor_svc.gpu.kernels.attention.attention import variants as triton_variants
from executor_svc.gpu.kernels.attention.gluon.prefill import variants as gluon_variants
from executor_svc.gpu.kernels.compile.machine_code import instructions

SASS = """
        /*0010*/              @!P0 BRA 0x20 ;                              /* 0x0000000400200947 */
                                                                           /* 0x000fea0003800000 */
        /*0020*/                   MUFU.RCP R3, R3 ;                       /* 0x0 */
        /*0030*/               @P0 BRA 0x20 ;                              /* 0x0 */
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R88, R180, gdesc[UR12].tnspB, R88, gsb0 ;
        /*0060*/              @!P1 BRA 0x90 ;                              /* 0x0 */
        /*0070*/                   ISETP.GE.AND P3, PT, R4, R5, PT ;       /* 0x0 */
        /*0080*/                   FSEL R24, R24, -INF , P3 ;              /* 0x0 */
        /*0090*/                   FMNMX R9, R24, R25, !PT ;               /* 0x0 */
        /*00a0*/                   SHFL.BFLY PT, R8, R9, 0x2, 0x1f ;       /* 0x0 */
        /*00b0*/                   FFMA R24, R24, R7, -R8 ;                /* 0x0 */
        /*00c0*/                   MUFU.EX2 R24, R24 ;                     /* 0x0 */
        /*00d0*/                   F2FP.BF16.F32.PACK_AB R152, R25, R24 ;  /* 0x0 */
        /*00e0*/               @P2 BRA 0x40 ;                              /* 0x0 */
        /*00f0*/                   EXIT ;                                  /* 0x0 */
"""


def test_the_loop_without_its_mask() -> None:
    (loop,) = loops_over_tiles(instructions(SASS))
    assert [each.address for each in loop] == [0x40, 0x50, 0x60, *range(0x90, 0xF0, 0x10)]


def test_cycles_by_unit() -> None:
    (loop,) = loops_over_tiles(instructions(SASS))
    assert cycles(loop, 2) == {
        "tensor cores": 2 * (64 + 32),
        "exponents": 2 * 8,
        "fp32": 2 * 1,
        "compare and integers": 2 * 2,
        "conversions": 2 * 2,
        "shuffles": 2 * 4,
        "issue": 2 * 9,
    }


@pytest.mark.parametrize("name", [name for name, _, _ in KERNELS])
def test_the_kernels_are_there(name: str) -> None:
    assert name in {each.name for each in [*triton_variants(), *gluon_variants()]}
