"""A row: one measurement with everything needed to judge it, one JSON line in results/<benchmark>.jsonl.

Here too: the statistics that rows hold, and the load of other processes, which gives a row from a disturbed machine a
note.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

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


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile with linear interpolation between neighbours; `percent` is 0 to 100.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def medians(repeats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each metric over all repeats, which must have the same metrics; four significant digits."""
    return {name: float(f"{statistics.median(each[name] for each in repeats):.4g}") for name in repeats[0]}


DISTURBED_CORES = 0.15
"""If others used more cores than this, the measurement gets a note."""


class OtherLoad:
    """Cores used, on average while the block ran, by processes that are neither this one nor its descendants.

    `cores` is set after the block. The kernel counts CPU time in ticks of 10 ms, so blocks should last 0.2 s or more.
    Children whose ids are in `others` count as others, with their descendants: systems that must be idle.
    """

    cores: float = 0.0

    def __init__(self, others: Collection[int] = ()) -> None:
        self._others = others

    def __enter__(self) -> OtherLoad:
        self._start, self._busy, self._own = time.monotonic(), _busy_s(), _own_s(self._others)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        others = (_busy_s() - self._busy) - (_own_s(self._others) - self._own)
        self.cores = max(0.0, others) / max(time.monotonic() - self._start, 1e-9)


def note_on(other_cores: float) -> str:
    """A row's note on other load; empty if the machine was quiet."""
    if other_cores <= DISTURBED_CORES:
        return ""
    return f"disturbed: other processes used up to {other_cores:.2f} cores meanwhile"


def wait_quiet(limit_s: float, others: Collection[int] = ()) -> bool:
    """Wait until others have used at most DISTURBED_CORES cores for a second; False if that takes over `limit_s` s.

    `others` as for OtherLoad.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with OtherLoad(others) as other:
            time.sleep(1.0)
        if other.cores <= DISTURBED_CORES:
            return True
    return False


def _busy_s() -> float:
    """CPU seconds used by all processes since the machine started; time stolen by a hypervisor counts as used."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0))


def _own_s(others: Collection[int] = ()) -> float:
    """CPU seconds of this process and its descendants, including reaped ones; without those under `others`."""
    total, left = 0.0, [psutil.Process(os.getpid())]
    while left:
        process = left.pop()
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            left += [child for child in process.children() if child.pid not in others]
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
