"""`run.sh prepare`: download the wheels that the lent machine lacks, where there is a package index.

With --flashinfer its archive too, compiled here. Standard library only. What is made lies in benchmarks/gpu/.wheels,
which git ignores and the device tool's `carry` takes.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.gpu import prepare_flashinfer
from benchmarks.gpu.downloading import PrepareError, download

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WHEELS = HERE / ".wheels"
MAX_BYTES = 40 << 20
"""The lent machine takes 64 MiB with the working tree."""
NOT_CARRIED = ("torch", "triton", "transformers", "llvmlite")
"""The machine has the first three, made for its GPU; the GPU executor needs no llvmlite."""


def normal(name: str) -> str:
    """A package's name as wheels have it in their file names."""
    return re.sub(r"[-_.]+", "_", name).lower()


def names_in(text: str) -> list[str]:
    """The names of a list, one a line; # begins a comment."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def pinned(names: Iterable[str], constraints: str) -> list[str]:
    """`name==version` for each, as the constraints have it; raises PrepareError for one that they do not."""
    versions = {normal(line.partition("==")[0]): line for line in names_in(constraints) if "==" in line}
    found = []
    for name in names:
        if normal(name) in NOT_CARRIED:
            raise PrepareError(f"{name} is not to be carried")
        if normal(name) not in versions:
            raise PrepareError(f"{name} has no version in constraints.txt")
        found.append(versions[normal(name)])
    return found


def check(folder: Path, names: Iterable[str]) -> int:
    """See that there is one wheel for each name, in all no more than may travel; returns the bytes, or PrepareError."""
    wheels = sorted(folder.glob("*.whl"))
    there = sorted(wheel.name.partition("-")[0].lower() for wheel in wheels)
    wanted = sorted(normal(name) for name in names)
    if there != wanted:
        differing = ", ".join(sorted(set(there) ^ set(wanted))) or "one has several versions"
        raise PrepareError(f"the wheels are not those of wheels.txt: {differing}")
    size = sum(each.stat().st_size for each in folder.iterdir())
    if size > MAX_BYTES:
        raise PrepareError(f"what is to be carried has {size} bytes, more than {MAX_BYTES}")
    return size


def prepare(with_flashinfer: bool) -> str:
    """Make all in a folder of its own, check, and put it in place of the last; returns what was done, in one line."""
    names = names_in((HERE / "wheels.txt").read_text(encoding="utf-8"))
    requirements = pinned(names, (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix=".wheels-", dir=HERE) as made:
        folder = Path(made) / "wheels"
        folder.mkdir()
        download(requirements, folder)
        if with_flashinfer:
            prepare_flashinfer.make(folder)
        size = check(folder, names)
        shutil.rmtree(WHEELS, ignore_errors=True)
        folder.rename(WHEELS)
    what = f"{len(names)} wheels" + (" and FlashInfer" if with_flashinfer else "")
    return f"{what}, {size / 2**20:.1f} MiB, in {WHEELS.relative_to(ROOT)}"


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 the wheels are there, 1 they are not and what was there still is, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh prepare", description=__doc__.partition("\n")[0])
    parser.add_argument("--flashinfer", action="store_true", help="FlashInfer too, compiled here in minutes")
    options = parser.parse_args(arguments)
    try:
        print(prepare(options.flashinfer))
    except PrepareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
