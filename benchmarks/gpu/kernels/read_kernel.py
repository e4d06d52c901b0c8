"""A kernel that only reads, for the bandwidth of reading."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
PER_SM = 8
"""Programs per multiprocessor."""


@triton.jit
def _sum_blocks(x, sums, num_blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program sums one in num_programs blocks of x."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.int32)
    for block in range(program, num_blocks, tl.num_programs(0)):
        acc += tl.load(x + tl.cast(block, tl.int64) * BLOCK + columns)
    tl.store(sums + program, tl.sum(acc, 0))


def read_all(x: Tensor, sums: Tensor) -> None:
    """Read x (int32, a multiple of BLOCK elements) with one program per element of `sums` (int32)."""
    if x.numel() % BLOCK:
        raise ValueError(f"x must have a multiple of {BLOCK} elements")
    _sum_blocks[(sums.numel(),)](x, sums, x.numel() // BLOCK, BLOCK=BLOCK, num_warps=8, num_stages=4)
