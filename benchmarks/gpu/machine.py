"""What a part runs on: versions, the GPU and its driver; said at its start, and in every row."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.common.rows import Row, machine, versions

_QUERY = "name,memory.total,driver_version,power.limit,clocks.max.sm,clocks.max.mem,clocks.sm,temperature.gpu"
_PACKAGES = (
    "torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "pydantic", "pytest", "llvmlite",
    "flashinfer-python",
)  # fmt: skip


def out_folder(part: str) -> Path:
    """Where results go: $OUT, else benchmarks/scratch/gpu/<part>; made if need be."""
    from benchmarks.common.rows import ROOT

    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "scratch" / "gpu" / part)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def about_gpu() -> dict[str, Any]:
    """The GPU as PyTorch and nvidia-smi have it; `gpu` "none" where there is none."""
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
    """What a part says at its start, a few lines."""
    found = {name: _version(name) for name in _PACKAGES}
    lines = [f"== {part}: {versions()['commit']}, Python {versions()['python']}, {machine()}"]
    lines.append(", ".join(f"{name} {version}" for name, version in found.items()))
    lines.append(", ".join(f"{name} {value}" for name, value in about_gpu().items()))
    return "\n".join(lines)


def with_gpu(row: Row) -> Row:
    """The row with the GPU among what it says of the machine, and Triton among the versions."""
    commit = os.environ.get("GPU_COMMIT") or row.versions["commit"]
    more = {"triton": _version("triton"), "commit": commit}
    return replace(row, machine={**row.machine, **about_gpu()}, versions={**row.versions, **more})


def is_interpreted() -> bool:
    """Is a GPU's part played by Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


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
