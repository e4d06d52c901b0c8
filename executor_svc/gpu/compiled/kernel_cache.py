"""The folder of compiled kernels and of what starts have found out about them, and how many came from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs

from cadenza_common.run_files import cache_folder

_US = 1e-6


@dataclass(slots=True)
class CompiledKernels:
    """Kernels that this process has compiled, or has found in Triton's cache."""

    num_compiled: int = 0
    num_cached: int = 0
    seconds: float = 0.0
    """Of all compilations together."""

    def note(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Count one, as Triton's listener."""
        if cache_hit:
            self.num_cached += 1
        else:
            self.num_compiled += 1
            self.seconds += times.total * _US

    def listen(self) -> None:
        """Count from now on, whatever was counted before."""
        self.num_compiled = self.num_cached = 0
        self.seconds = 0.0
        knobs.compilation.listener = self.note

    def __str__(self) -> str:
        return f"{self.num_compiled} kernels compiled in {self.seconds:.1f} s, {self.num_cached} from {knobs.cache.dir}"


COMPILED = CompiledKernels()
"""Those of this process."""


def use_kernel_cache(folder: str | None) -> Path:
    """Let Triton keep compiled kernels in `triton` of a folder; returns the folder.

    folder: of the option; None: `kernels` of this user's cache, and Triton's own as TRITON_CACHE_DIR says, if it does.
    """
    chosen = cache_folder() / "kernels" if folder is None else Path(folder).expanduser()
    if folder is not None or "TRITON_CACHE_DIR" not in os.environ:
        knobs.cache.dir = str(chosen / "triton")
    COMPILED.listen()
    return chosen
