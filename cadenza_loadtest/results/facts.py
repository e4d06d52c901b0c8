"""Facts about the client's machine: its speed affects what it measures."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

import cadenza


class ClientFacts(BaseModel):
    """The machine and the software that sent the requests or ran the simulation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: str
    cores: int
    """Cores that the process may use."""
    memory_gib: float | None
    """None: not known."""
    platform: str
    python: str
    cadenza_version: str
    commit: str | None
    """Commit of the source tree that Cadenza runs from, with "-dirty" if tracked files differ; None without a tree."""


@cache
def client_facts() -> ClientFacts:
    """The facts of this machine and process."""
    return ClientFacts(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=_memory_gib(),
        platform=platform.platform(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        cadenza_version=cadenza.__version__,
        commit=_commit(),
    )


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "not known"


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _commit() -> str | None:
    folder = Path(cadenza.__file__).parent
    # If Cadenza is installed inside another project's repository, the commit would be that project's.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/")
    return f"{commit}-dirty" if commit and changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git; None if it fails. Takes no locks."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
