"""The machine of a run (GPU, driver, package versions) and the folders that results go to."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.common.rows import RESULTS, ROOT, Row, append_row, machine, versions

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
