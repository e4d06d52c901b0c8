"""Weights in few bits: what a value of --weights is for Cadenza and for the peers beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from benchmarks.common.checkpoints import CACHE
from benchmarks.common.rows import ROOT, BenchmarkError
from benchmarks.peers.gguf_file import QUANTIZED_TYPES, gguf_path

BF16 = "bf16"
GGUF_WEIGHTS = tuple(QUANTIZED_TYPES)
"""llama.cpp's file types: one file for Cadenza and llama.cpp."""
ROUNDED_WEIGHTS = ("int8", "int4")
"""Rounded to nearest when Cadenza loads the checkpoint."""
WEIGHTS = (BF16, *GGUF_WEIGHTS, *ROUNDED_WEIGHTS)
_OPENVINO = {"Q8_0": "int8", "Q4_0": "int4", "Q4_K_M": "int4"}


def openvino_weights(weights: str) -> str:
    """Return the weights of OpenVINO's export that are measured beside others: bf16, int8 or int4."""
    return _OPENVINO.get(weights, weights)


def model_path(folder: Path, weights: str) -> Path:
    """Return --model for Cadenza: the checkpoint's folder, or its GGUF file."""
    return gguf_path(folder, CACHE, weights) if weights in GGUF_WEIGHTS else folder


def rounding_option(weights: str) -> dict[str, Any]:
    """Return the option that rounds a checkpoint while Cadenza loads it, if one is needed."""
    return {"quantization": weights} if weights in ROUNDED_WEIGHTS else {}


def prepare_weights(folder: Path, weights: str, llama_python: Path | None) -> None:
    """Make the checkpoint's GGUF file under llama.cpp's interpreter, unless it is in the cache or not needed.

    Raises BenchmarkError without an interpreter, or with the end of what llama.cpp printed.
    """
    if weights not in GGUF_WEIGHTS or model_path(folder, weights).exists():
        return
    if llama_python is None:
        raise BenchmarkError(f"--weights {weights}: --llama-python is needed once, whose llama.cpp makes the GGUF file")
    command = [str(llama_python), "-m", "benchmarks.peers.gguf_file", str(folder), str(CACHE), weights]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BenchmarkError(f"--llama-python {llama_python}: {error}") from None
    if done.returncode:
        raise BenchmarkError(f"--weights {weights}: " + "\n".join(done.stderr.strip().splitlines()[-5:]))
