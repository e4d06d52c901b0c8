"""The machine of a run (GPU, driver, package versions), the folders for results, and outcomes as rows and tables."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.common.rows import RESULTS, ROOT, Row, append_row, machine, make_row, versions
from benchmarks.gpu.cases import Goal, Outcome

_QUERY = "name,memory.total,driver_version,power.limit,clocks.max.sm,clocks.max.mem,clocks.sm,temperature.gpu"
_PACKAGES = (
    "torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "pydantic", "pytest", "llvmlite",
    "flashinfer-python",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Output:
    """Where a part writes."""

    rows: Path
    """Folder of <benchmark>.jsonl."""
    files: Path
    """Folder of tables, logs and traces."""

    @classmethod
    def of(cls, part: str, out: Path | None, trial: bool) -> Output:
        """Rows in benchmarks/results, files in benchmarks/scratch/gpu/PART; all in `out` if given.

        Rows of a trial mean nothing and stay among the files.
        """
        files = out or ROOT / "benchmarks" / "scratch" / "gpu" / part
        files.mkdir(parents=True, exist_ok=True)
        return cls(files if out or trial else RESULTS, files)

    def add(self, row: Row) -> None:
        """Append a row at once, so that it survives if the process is killed."""
        append_row(row, self.rows)

    def write(self, name: str, text: str) -> None:
        """Add a text to a file of this name; earlier runs may have written there, as `part-b` does several times."""
        with (self.files / name).open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def places(self, benchmark: str) -> str:
        """One line that names the written files."""
        return f"rows: {_shown(self.rows / benchmark)}.jsonl; tables and logs: {_shown(self.files)}"


@cache
def about_gpu() -> dict[str, Any]:
    """The GPU as PyTorch and nvidia-smi describe it; `gpu` is "none" without one."""
    import torch

    found: dict[str, Any] = {"gpu": "none", "cuda": str(torch.version.cuda), **_smi()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "arch": properties.major * 10 + properties.minor,
            "num_sms": properties.multi_processor_count,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def header(part: str) -> str:
    """The first lines of a part's output: commit, machine, versions, GPU."""
    found = {name: _version(name) for name in _PACKAGES}
    lines = [f"== {part}: {_commit()}, Python {versions()['python']}, {machine()}"]
    lines.append(", ".join(f"{name} {version}" for name, version in found.items()))
    lines.append(", ".join(f"{name} {value}" for name, value in about_gpu().items()))
    return "\n".join(lines)


def with_gpu(row: Row) -> Row:
    """The row with the GPU in `machine` and Triton in `versions`."""
    more = {"triton": _version("triton"), "commit": _commit()}
    return replace(row, machine={**row.machine, **about_gpu()}, versions={**row.versions, **more})


def is_interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _commit() -> str:
    """BENCH_COMMIT names the commit of a copy without git."""
    return os.environ.get("BENCH_COMMIT") or versions()["commit"]


def _smi() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {"nvidia_smi": "does not answer"}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(("smi_name", "smi_memory", "driver", *_QUERY.split(",")[3:]), values, strict=False))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def row_of(benchmark: str, outcome: Outcome, seed: int, other_cores: float = 0.0) -> Row:
    """The row of an outcome that has metrics."""
    params = {"group": outcome.group, "case": outcome.case, **outcome.params}
    row = make_row(benchmark, seed=seed, params=params, repeats=[outcome.metrics], other_cores=[other_cores])
    return with_gpu(row)


def as_line(outcome: Outcome, goal: Goal | None = None) -> str:
    """An outcome in one line."""
    where = f"{outcome.group}: {outcome.case}: "
    if outcome.error:
        return where + "FAILED: " + outcome.error
    if outcome.skipped:
        return where + "skipped: " + outcome.skipped
    metrics = ", ".join(f"{name} {number(value)}" for name, value in outcome.metrics.items())
    judged = goal.judge(outcome.metrics) if goal else ""
    return where + metrics + (f" (goal {judged})" if judged else "")


def table(title: str, rows: Sequence[tuple[Outcome, Goal | None]]) -> str:
    """One group: a line per case with all metrics of the group; failed and skipped cases are listed below."""
    columns = list(dict.fromkeys(name for outcome, _ in rows for name in outcome.metrics))
    goals = any(goal for _, goal in rows)
    head = ["case", *columns, *(["goal"] if goals else [])]
    lines = [head]
    for outcome, goal in rows:
        if outcome.metrics:
            values = [number(outcome.metrics[name]) if name in outcome.metrics else "" for name in columns]
            lines.append([outcome.case, *values, *([_judged(outcome.metrics, goal)] if goals else [])])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [f"== {title}", *("  ".join(_cells(line, widths)).rstrip() for line in lines)]
    text += [as_line(outcome) for outcome, _ in rows if not outcome.metrics]
    return "\n".join(text)


def summary(done: Sequence[tuple[Outcome, Goal | None]]) -> str:
    """Counts of cases that failed or were skipped, and of goals that were met or missed."""
    judged = [goal.judge(outcome.metrics) for outcome, goal in done if goal]
    failed, skipped = (sum(bool(getattr(outcome, name)) for outcome, _ in done) for name in ("error", "skipped"))
    return (
        f"== {len(done)} cases: {failed} failed, {skipped} skipped; goals: {judged.count('met')} met, "
        f"{judged.count('missed')} missed"
    )


def number(value: float) -> str:
    """Four significant digits, without an exponent."""
    if value == 0 or not 1e-4 <= abs(value) < 1e15:
        return f"{value:.4g}"
    digits = max(0, 4 - len(str(int(abs(value))).lstrip("0")))
    return f"{value:.{min(digits, 6)}f}" if abs(value) < 1e4 else f"{value:.0f}"


def best_of(rows: Sequence[Outcome], by: Sequence[str], metric: str) -> list[str]:
    """A line for each set of rows with equal parameters `by`: the row with the largest `metric`."""
    found: dict[tuple[Any, ...], Outcome] = {}
    for outcome in rows:
        key = tuple(outcome.params.get(name) for name in by)
        if metric in outcome.metrics and (key not in found or outcome.metrics[metric] > found[key].metrics[metric]):
            found[key] = outcome
    return [f"best: {outcome.case}, {metric} {number(outcome.metrics[metric])}" for outcome in found.values()]


def _judged(metrics: Mapping[str, float], goal: Goal | None) -> str:
    if goal is None or not (judged := goal.judge(metrics)):
        return ""
    bound = f">= {goal.at_least:g}" if goal.at_least is not None else f"<= {goal.at_most:g}"
    return f"{judged}: {goal.metric} {bound}"


def _cells(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.ljust(width) if column == 0 or column == len(widths) - 1 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
