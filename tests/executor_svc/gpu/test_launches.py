"""Triton compiles and launches a start and steps for an H200; a stub of CUDA's driver refuses what that would."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tests.checkpoints import make_checkpoint
from tests.executor_svc.gpu.stubbed_start import LIBRARY, OPTIONS
from tests.helpers.models.mtp_heads import make_mimo
from tests.helpers.paths import ROOT

COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
"""As Triton looks for it."""
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are launched for good here"),
    pytest.mark.skipif(
        COMPILER is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
        reason="needs a C compiler and Python's headers, as Triton's launcher does",
    ),
]


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """The folder of CUDA's driver, and of `cc`, a compiler for Triton's launchers that does not optimize."""
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source = Path(__file__).with_name("stub_cuda.c")
    built = ["-shared", "-fPIC", "-o", str(tmp_path / LIBRARY), f"-Wl,-soname,{LIBRARY}"]
    assert COMPILER is not None
    subprocess.run([COMPILER, "-I", str(headers), *built, str(source)], check=True)
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {shlex.quote(COMPILER)} "$@" -O0\n')
    compiler.chmod(0o755)
    return tmp_path


def run(module: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A module of this repository, in a process of its own."""
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended


OF_EXPERTS = {"choose_kernel", "sum_kernel", "place_kernel", "_linear_of_experts", "_combine"}


OF_STATES = {"_begin_states", "_end_states", "_convolve", "_write_rings", "_recur", "_gated_norm"}
OF_PROMPTS = {"prompt_kernel"}
OF_HEADS = {"_read_next_tokens", "_keep_results", "_first_pass", "_next_pass", "_copy_columns"}


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("llama", set()),
        ("glm4_moe", OF_EXPERTS),
        ("qwen3_5_delta", OF_STATES),
        ("mimo", OF_HEADS),
        ("llama", OF_PROMPTS),
    ],
)
def test_kernels_are_compiled_and_launched_as_on_a_gpu(
    family: str, kernels: set[str], stub: Path, tmp_path: Path
) -> None:
    shape: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    shape |= {"num_hidden_layers": 2, "moe_intermediate_size": 48} if kernels is OF_EXPERTS else {}
    if kernels is OF_STATES:
        shape |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        shape |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 80}
    make = make_mimo if kernels is OF_HEADS else partial(make_checkpoint, family=family)
    folder = make(tmp_path / "model", vocab_size=500, dtype=torch.bfloat16, **shape)
    speculative = "mtp" if kernels is OF_HEADS else "ngram"
    gluon = {"attention_backend": "gluon", "kv_cache_dtype": "auto", "quantization": "none"}
    changed = gluon if kernels is OF_PROMPTS else {}
    cache, ahead = tmp_path / "cache", family == "llama" and not changed
    if ahead:
        options = {**OPTIONS, "model": folder, "speculative": speculative}
        del options["num_gpu_blocks"]
        arguments = [each for name, value in options.items() for each in (f"--{name.replace('_', '-')}", str(value))]
        into = ("--arch", "90", "--into", str(tmp_path))
        run("executor_svc.startup.compile_ahead", *into, *arguments, env=environment(stub, cache))
        cache = tmp_path / "triton"
    seen = seen_by(stub, folder, speculative, cache, **changed)
    assert seen["compiled_by_steps"] == []
    assert (seen["compiled_anew"] == 0) == ahead, "what was compiled ahead is what is launched"
    assert seen["from_cache"] + seen["compiled_anew"] > 30
    of_all = {"split_kernel", "_build_step", "_commit", "_lay_out"}
    of_all |= set() if kernels is OF_PROMPTS else {"attention_kernel"}
    of_all |= set() if kernels is OF_HEADS else {"_draft_ngrams"}
    assert of_all | kernels <= {name.rpartition(".")[2] for name in seen["compiled"]}
    assert len(seen["launches"]) == 5
    assert min(seen["launches"]) > 10
    assert seen["num_descriptors"] > 0, OPTIONS
    assert seen["differing"] == 0, "of launches that are repeated from those that they repeat"
    assert max(seen["repeated"][-3:]) >= 8, "hidden states, logits and the choice of the last step"


def environment(stub: Path, cache: Path) -> dict[str, str]:
    """Of processes that launch kernels on the stub; cache: the folder of Triton's."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRITON_")},
        "TRITON_LIBCUDA_PATH": str(stub),
        "TRITON_CACHE_DIR": str(cache),
        "CC": str(stub / "cc"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")]),
    }


def seen_by(stub: Path, folder: Path, drafts: str, cache: Path | None = None, **options: Any) -> dict[str, Any]:
    """What a process of `stubbed_start` prints."""
    arguments = (str(stub), str(folder), drafts, json.dumps(options))
    env = environment(stub, cache or stub / "cache")
    ended = run("tests.executor_svc.gpu.stubbed_start", *arguments, env=env)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found
