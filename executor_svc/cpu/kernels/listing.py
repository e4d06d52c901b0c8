"""Reads the instructions of compiled kernels: those of their inner loops, for levels that this processor may lack.

`python -m executor_svc.cpu.kernels.listing [LEVEL ...]` prints the inner loops of matrix products that multiply.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from dataclasses import dataclass

from executor_svc.cpu.kernels import matmul
from executor_svc.cpu.kernels.amx import product
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Dtype
from executor_svc.cpu.kernels.codegen.isa import ISA_NAMES, IsaName, level
from executor_svc.cpu.kernels.matmul_tiles import Output, has_tiles

_LABEL = re.compile(r'^"?([\w.$-]+)"?:')
_JUMP = re.compile(r"^j\w+\s+(\.L\w+)$")
_PRODUCT = re.compile(r"^(vfn?m(add|sub)|vdpbf16ps|vpdp|tdp)")
_FRAME = "(%rsp"
"""LLVM uses %rbp for other addresses, or for arguments."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop without another loop in it."""

    function: str
    instructions: tuple[str, ...]
    """Lines of assembly, such as `vaddps %zmm0, %zmm1, %zmm2`, the jump back last."""

    def count(self, prefix: str) -> int:
        """Return the number of instructions whose name begins so."""
        return sum(instruction.startswith(prefix) for instruction in self.instructions)

    def registers(self) -> set[str]:
        """Return the kinds of vector and tile registers: xmm, ymm, zmm, tmm."""
        return {kind for line in self.instructions for kind in re.findall(r"%([xyzt]mm)\d", line)}

    def multiplies(self) -> bool:
        return any(_PRODUCT.match(instruction) for instruction in self.instructions)

    def spills(self) -> int:
        """Return the number of instructions that move a vector to or from the function's frame, or use one there."""
        return sum(bool(_FRAME in line and re.search(r"%[xyzt]mm\d", line)) for line in self.instructions)


def inner_loops(assembly: str) -> list[Loop]:
    """Return the innermost loops of all functions, in order: what lies between a label and a jump back to it."""
    loops: list[Loop] = []
    function, lines, places = "", list[str](), dict[str, int]()
    newest = -1  # where the last loop that was found begins
    for raw in assembly.splitlines():
        line = " ".join(raw.split("#")[0].split())
        label, jump = _LABEL.match(line), _JUMP.match(line)
        if label:
            places[label.group(1)] = len(lines)
            if not label.group(1).startswith(".L"):
                function = label.group(1)
        elif line and not line.startswith("."):
            lines.append(line)
        if jump and places.get(jump.group(1), -1) > newest:
            newest = places[jump.group(1)]
            loops.append(Loop(function, tuple(lines[newest:])))
    return loops


def products(name: IsaName, dtype: Dtype) -> list[Loop]:
    """Return the inner loops of a level's matrix products that multiply."""
    code = Code(level(name))
    if has_tiles(code.isa, dtype):
        product.matmul(code, Output(dtype, dtype, with_bias=False))
    else:
        matmul.matmul(code, Output(dtype, dtype, with_bias=False))
    return [loop for loop in inner_loops(code.assembly()) if loop.multiplies()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=f"of {', '.join(ISA_NAMES)}; all by default")
    chosen = parser.parse_args().levels
    for name in (each for each in ISA_NAMES if each in chosen or not chosen):
        for dtype in ("float32", "bfloat16"):
            for loop in products(name, dtype):
                found = Counter(line.split()[0] for line in loop.instructions)
                counts = ", ".join(f"{count} {mnemonic}" for mnemonic, count in found.most_common())
                print(f"{name} {loop.function} ({loop.spills()} spills): {counts}")


if __name__ == "__main__":
    main()
