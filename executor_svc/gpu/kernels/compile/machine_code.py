"""Reads a GPU's machine code (SASS), as cuobjdump of Triton's package prints it: what ptxas made of products and waits.

Products of a Hopper GPU's warpgroups (HGMMA) run on after they are issued. `gsb0` ends a group of them, and DEPBAR
waits until no more than a number of groups run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triton import knobs

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z]\S*)([^;]*);")
_WAIT = "WARPGROUP.DEPBAR.LE"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a kernel."""

    address: int
    name: str
    """With what stands behind its dots: HGMMA.64x128x16.F32.BF16."""
    operands: str

    @property
    def target(self) -> int | None:
        """Where a branch goes to."""
        found = re.search(r"0x([0-9a-f]+)", self.operands) if self.name.startswith("BRA") else None
        return None if found is None else int(found[1], 16)

    @property
    def registers(self) -> list[int]:
        """Numbers of the registers that it names, in order."""
        return [int(number) for number in re.findall(r"\bR(\d+)\b", self.operands)]

    @property
    def awaited(self) -> int | None:
        """Groups of products that may still run behind it; None: it does not wait for products."""
        found = re.search(r"gsb0, 0x([0-9a-f]+)", self.operands) if self.name == _WAIT else None
        return None if found is None else int(found[1], 16)


def disassembled(cubin: bytes) -> str:
    """Return the listing of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> list[Instruction]:
    """Return the instructions of a listing, in order."""
    return [Instruction(int(address, 16), name, operands) for address, name, operands in _LINE.findall(sass)]


def num_overlapped(listed: Iterable[Instruction]) -> int:
    """Return the least number of exponents between a wait for all products but one and the next one for all."""
    counts, count = [], None
    for each in listed:
        if each.awaited == 1:
            count = 0
        elif each.awaited == 0 and count is not None:
            counts.append(count)
            count = None
        elif each.name == "MUFU.EX2" and count is not None:
            count += 1
    return min(counts, default=0)


def touching(listed: Sequence[Instruction]) -> list[Instruction]:
    """Return the instructions that name sums of a product which may still run, or write its left operand.

    Instructions are taken in the order of their addresses, as if no branch were taken.
    """
    found: list[Instruction] = []
    running: list[tuple[set[int], set[int]]] = []
    sums: set[int] = set()
    lefts: set[int] = set()
    for each in listed:
        if product := re.match(r"HGMMA\.\d+x(\d+)", each.name):
            first, *others = [part.strip() for part in each.operands.split(",")]
            sums |= {int(first[1:]) + index for index in range(int(product[1]) // 2)}
            if left := re.fullmatch(r"R(\d+)", others[0]):
                lefts |= {int(left[1]) + index for index in range(4)}
            if "gsb0" in each.operands:
                running.append((sums, lefts))
                sums, lefts = set(), set()
        elif each.awaited is not None:
            running = running[max(0, len(running) - each.awaited) :]
        elif each.registers and not each.name.startswith(("BAR", "SYNCS")):
            written = set() if each.name.startswith("ST") else {each.registers[0]}
            if any(set(each.registers) & some or written & left for some, left in [*running, (sums, lefts)]):
                found.append(each)
    return found
