"""A row: one measurement with everything needed to judge it, one JSON line in results/<benchmark>.jsonl."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.other_load import note_on
from benchmarks.common.stats import medians

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("torch", "transformers", "grpcio", "cadenza")


class BenchmarkError(Exception):
    """The benchmark found an error, in its arguments or in the measured system, and gives no row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. Metrics and parameters carry their unit in their name: _s, _ms, _us, _bytes, per_s."""

    benchmark: str
    date: str  # UTC, ISO 8601
    machine: dict[str, Any]
    versions: dict[str, str]
    seed: int
    repeats: int
    params: dict[str, Any]
    medians: dict[str, float]  # over the repeats
    other_cores: float  # most cores that other processes used during a repeat
    note: str  # empty for an undisturbed measurement
    runs: tuple[dict[str, Any], ...] = ()  # the runs behind the row, from benchmarks that print them; not recorded

    def to_json(self) -> str:
        """One line."""
        content = asdict(self)
        del content["runs"]
        return json.dumps(content, ensure_ascii=False)

    def with_runs(self, runs: Iterable[dict[str, Any]]) -> Row:
        """The same row with the runs behind it."""
        return replace(self, runs=tuple(runs))


def make_row(
    benchmark: str,
    *,
    seed: int,
    params: Mapping[str, Any],
    repeats: Sequence[Mapping[str, float]],
    other_cores: Sequence[float],
) -> Row:
    """A row for this machine and time, from the metrics of all repeats and the other load during each."""
    most = max(other_cores, default=0.0)
    return Row(
        benchmark=benchmark,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        versions=versions(),
        seed=seed,
        repeats=len(repeats),
        params=dict(params),
        medians=medians(repeats),
        other_cores=round(most, 2),
        note=note_on(most),
    )


def append_row(row: Row, folder: Path | None = None) -> Path:
    """Append a row to its benchmark's file in `folder`, by default RESULTS; creates and returns the file."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{row.benchmark}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(row.to_json() + "\n")
    return path


@cache
def machine() -> dict[str, Any]:
    """The machine: CPU model, cores that this process may use, memory in GiB."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def versions() -> dict[str, str]:
    """Versions of Python and relevant packages, and the commit, with `-dirty` if tracked files differ from it."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "commit": _commit()}


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    # Uncommitted rows of an earlier benchmark do not affect the measurement.
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    """The output of git; empty without git or outside a repository. Takes no locks."""
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
