"""Wheels for a GPU machine without a network: `python -m benchmarks.gpu.offline FOLDER`, run where there is one.

That machine has Python 3.12 on x86-64 Linux with PyTorch for CUDA, Triton and transformers, and a copy of this
repository. This downloads what else it needs, in the versions of constraints.txt, builds the wheel of this project for
its version number, and prints the commands for that machine.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.common.rows import ROOT, versions

PACKAGES = (
    "annotated-types", "execnet", "gguf", "googleapis-common-protos", "grpcio", "grpcio-health-checking",
    "grpcio-reflection", "grpcio-status", "hypothesis", "iniconfig", "llguidance", "pluggy", "protobuf", "pydantic",
    "pydantic-core", "pydantic-settings", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "python-dotenv",
    "sortedcontainers", "typing-extensions", "typing-inspection", "uvloop",
)  # fmt: skip
_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
_PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
_SITE = "/tmp/cadenza-site"


def pinned(names: Iterable[str], constraints: str) -> list[str]:
    """`name==version` of each package as in the constraints; raises KeyError for a package that they do not name."""
    lines = (line.partition("#")[0].strip() for line in constraints.splitlines())
    versions_of = {_normal(line.partition("==")[0]): line for line in lines if "==" in line}
    return [versions_of[_normal(name)] for name in names]


def commands(folder: Path) -> str:
    """The commands for the GPU machine. The repository's own code is imported before the project's wheel."""
    return (
        f"python3 -m pip install --no-index --no-deps --target {_SITE} {folder}/*.whl\n"
        f"export PYTHONPATH=.:client:{_SITE} BENCH_COMMIT={versions()['commit']}\n"
        "python3 -m benchmarks.gpu tests; python3 -m benchmarks.gpu kernels; python3 -m benchmarks.gpu serve"
    )


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 all wheels are in the folder, 1 pip failed, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.offline", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    folder: Path = parser.parse_args(arguments).folder
    if folder.is_dir() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    requirements = pinned(PACKAGES, (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    target = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    for command in (
        [*_PIP, "download", "--no-deps", *target, "--dest", str(folder), *requirements],
        [*_PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)],
    ):
        if subprocess.run(command, check=False).returncode:
            return 1
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(PACKAGES) + 1} wheels, {size / 2**20:.1f} MiB, in {folder}. On the GPU machine, in this repository:")
    print(commands(folder))
    return 0


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
