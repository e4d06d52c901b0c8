"""How wheels for the lent machine are asked for. Standard library only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

PYTHON = "3.12"
PLATFORMS = tuple(
    f"{name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
)


class PrepareError(Exception):
    """What is to be carried can not be had as it must be."""


def command(requirements: Iterable[str], folder: Path) -> list[str]:
    """How pip is asked: built wheels for the lent machine's Python alone, and none of what they need in turn."""
    platforms = [argument for each in PLATFORMS for argument in ("--platform", each)]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--python-version", PYTHON, "--implementation", "cp", *platforms, "--dest", str(folder)),
        *requirements,
    ]


def download(requirements: Iterable[str], folder: Path) -> None:
    """Download wheels into a folder; raises PrepareError."""
    if subprocess.run(command(requirements, folder), check=False).returncode:
        raise PrepareError("pip could not download the wheels")
