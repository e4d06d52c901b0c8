"""Processes whose wall clock a test moves, at any moment and without a restart."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("shifted_clock.c")


class ShiftedClock:
    """A wall clock; a process with its `environment` reads it, in Python as in C."""

    def __init__(self, folder: Path) -> None:
        """folder: for the compiled library and the offset. Skips the test if there is no C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler")
        library, self._offset = folder / "shifted_clock.so", folder / "offset_ns"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE)], check=True)
        self._offset.write_bytes(struct.pack("=q", 0))
        self.environment = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK_FILE": str(self._offset)}

    def shift(self, seconds: float) -> None:
        """Set its distance to the real clock; below 0 it is behind."""
        with self._offset.open("r+b") as file:  # the file stays the same: the processes have mapped it
            file.write(struct.pack("=q", round(seconds * 1e9)))
