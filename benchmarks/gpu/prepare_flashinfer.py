"""`run.sh prepare --flashinfer`: FlashInfer with its decode modules compiled here, as one file to be carried.

By itself it brings 70 MB of headers, needs larger packages than that, and compiles for minutes when it is first used.
Decode attention needs its Python code and two modules, which nvcc makes here for Hopper. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.downloading import PrepareError, download

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = "flashinfer.zip"
PACKAGE = "flashinfer-python==0.6.18.post1"
FFI = "apache-tvm-ffi==0.1.15.post2"
IMPORTED = (
    "certifi", "charset-normalizer", "einops", "idna", "nvidia-ml-py", "requests", "tabulate", "tqdm", "urllib3",
)  # fmt: skip
"""What the package imports here; the lent machine has them."""
ARCH = "9.0a"
_HEADERS = ("cccl", "cutlass", "include", "spdlog")
_LIMIT_S = 1800.0


def make(folder: Path) -> Path:
    """Make the archive in a folder: minutes, by nvcc on all cores; returns its path, raises PrepareError."""
    home = cuda_home()
    with tempfile.TemporaryDirectory(prefix="cadenza-flashinfer-") as made:
        here, tree, wheels = (Path(made, name) for name in ("here", "tree", "wheels"))
        _pip_install([PACKAGE], tree)
        _pip_install([FFI, *IMPORTED], here)
        environment = build_environment(home, here, tree, Path(made, "work"))
        _modules("build", environment)
        for name in _HEADERS:
            shutil.rmtree(tree / "flashinfer" / "data" / name)
        _modules("load", {**environment, "FLASHINFER_DISABLE_JIT": "1"})
        download([FFI], wheels)
        return pack(tree, wheels, folder)


def cuda_home() -> Path:
    """Where the CUDA compiler lies that is on the path or in CUDA_HOME; raises PrepareError without one."""
    places = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if found := shutil.which("nvcc"):
        places.insert(1, str(Path(found).resolve().parents[1]))
    for place in places:
        if place and Path(place, "bin", "nvcc").is_file() and Path(place, "include", "cuda_runtime.h").is_file():
            return Path(place)
    raise PrepareError("FlashInfer's modules are compiled here, and there is no nvcc: set CUDA_HOME")


def build_environment(home: Path, here: Path, tree: Path, work: Path) -> dict[str, str]:
    """For a process that compiles and loads: its packages, FlashInfer's settings, and a linker that needs no driver."""
    libraries = work / "lib"
    libraries.mkdir(parents=True)
    # The modules take nothing from the driver's library, but are linked with it, and here is none.
    stub = ["cc", "-shared", "-x", "c", os.devnull, "-Wl,-soname,libcuda.so.1", "-o", str(libraries / "libcuda.so.1")]
    _run(stub, dict(os.environ), "the compiler")
    (libraries / "libcuda.so").symlink_to("libcuda.so.1")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, here, tree))),
        "CUDA_HOME": str(home),
        "LIBRARY_PATH": str(libraries),
        "LD_LIBRARY_PATH": os.pathsep.join((str(home / "lib64"), str(libraries))),
        "FLASHINFER_CUDA_ARCH_LIST": ARCH,
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "MAX_JOBS": str(os.cpu_count() or 1),
    }


def pack(tree: Path, wheels: Path, folder: Path) -> Path:
    """One archive of the packages in a tree and in wheels."""
    for wheel in wheels.glob("*.whl"):
        shutil.unpack_archive(wheel, tree, "zip")
    for cache in list(tree.rglob("__pycache__")):
        shutil.rmtree(cache)
    return Path(shutil.make_archive(str(folder / Path(ARCHIVE).stem), "zip", tree))


def _pip_install(requirements: Sequence[str], target: Path) -> None:
    asked = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(target)]
    _run([*asked, *requirements], dict(os.environ), "pip")


def _modules(what: str, environment: dict[str, str]) -> None:
    asked = [sys.executable, "-m", "benchmarks.gpu.flashinfer_modules", what]
    _run(asked, environment, f"FlashInfer's modules, {what}")


def _run(asked: Sequence[str], environment: dict[str, str], name: str) -> None:
    try:
        done = subprocess.run(asked, env=environment, cwd=ROOT, check=False, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrepareError(f"{name}: {error}") from error
    if done.returncode:
        raise PrepareError(f"{name}: exit code {done.returncode}")
