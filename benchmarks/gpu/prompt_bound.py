"""What a tile of keys costs attention of prompts on a Hopper GPU, computed from the machine code: nothing is measured.

`python -m benchmarks.gpu.prompt_bound` compiles the kernels, which needs no GPU, counts the instructions of the loop
over tiles that have no mask, and prints their cycles by unit: each unit's least time, as if all others were free.
"""

from __future__ import annotations

import re
from collections import Counter

from executor_svc.gpu.kernels.attention.attention import variants as triton_variants
from executor_svc.gpu.kernels.attention.gluon.prefill import variants as gluon_variants
from executor_svc.gpu.kernels.compile.build import machine_code
from executor_svc.gpu.kernels.compile.machine_code import Instruction, instructions

FLOPS_OF_CYCLE = 4096
"""Of an SM's tensor cores, 16-bit numbers: 989 TFLOP/s of 132 SMs at 1.83 GHz (NVIDIA H100 Tensor Core GPU)."""
LANES = {
    "exponents": (r"MUFU", 4),
    "fp32": (r"FFMA|FMUL|FADD", 32),
    "compare and integers": (r"FMNMX|FSETP|FSEL|ISETP|SEL|LOP3|SHF|IADD3|VIADD|VIMNMX|LEA|PRMT|IMAD", 16),
    "conversions": (r"F2FP", 16),
    "shuffles": (r"SHFL", 8),
}
"""Instructions by unit, and lanes of a cycle of one of an SM's four parts (CUDA C++ Programming Guide, 9.0)."""
KERNELS = (("attention prompt gluon 128 bf16 blocks of 16 copied", 2, 128), ("attention prefill 128 bf16 sm90", 2, 64))
"""Variants, warpgroups that go through the loop, and keys of a turn."""


def loops_over_tiles(listed: list[Instruction]) -> list[list[Instruction]]:
    """Return the loops that multiply and weigh, without what a branch forward may leave out: the masks."""
    found = []
    for last in listed:
        if last.target is None or last.target >= last.address:
            continue
        body = [each for each in listed if last.target <= each.address <= last.address]
        names = Counter(each.name.split(".")[0] for each in body)
        inner = any(each is not last and each.target is not None and each.target < each.address for each in body)
        if names["HGMMA"] and names["MUFU"] and not inner:
            found.append(_without_masks(body))
    return found


def _without_masks(body: list[Instruction]) -> list[Instruction]:
    left = body
    for branch in body:
        if branch.target is not None and branch.address < branch.target <= body[-1].address:
            skipped = {each.address for each in body if branch.address < each.address < branch.target}
            if not any(each.address in skipped and each.name.startswith(("HGMMA", "MUFU")) for each in body):
                left = [each for each in left if each.address not in skipped]
    return left


def cycles(loop: list[Instruction], warpgroups: int) -> dict[str, float]:
    """Return an SM's cycles for one turn of a loop by so many warpgroups, by unit."""
    found = {"tensor cores": 0.0}
    for each in loop:
        if shape := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", each.name):
            rows, columns, inner = (int(size) for size in shape.groups())
            found["tensor cores"] += 2 * rows * columns * inner / FLOPS_OF_CYCLE
    for unit, (names, lanes) in LANES.items():
        found[unit] = sum(re.match(rf"(?:{names})\b", each.name) is not None for each in loop) * 32 / lanes
    found["issue"] = len(loop)
    return {unit: count * warpgroups for unit, count in found.items()}


def main() -> None:
    """Print the table."""
    by_name = {each.name: each for each in [*triton_variants(), *gluon_variants()]}
    for name, warpgroups, keys in KERNELS:
        (loop, *_) = loops_over_tiles(instructions(machine_code(by_name[name], 90)))
        rows = 64 * warpgroups
        print(f"{name}: {rows} rows and {keys} keys, cycles of an SM (computed)")
        for unit, count in cycles(loop, warpgroups).items():
            print(f"  {unit:22} {count:7.0f}  {count / (rows * keys / 128 / 128):7.0f} for 128 x 128")


if __name__ == "__main__":
    main()
