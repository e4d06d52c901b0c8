"""What do experts cost that stay in their file (`--expert-weights mapped`)?

A step of a mixture with its experts in memory, and mapped: once its file is in the page cache, and after the system has
given all pages of the file back, so that each expert that is chosen comes from the disk. Hidden states must be equal.
Without --model it is a random checkpoint in bf16; a GGUF file of one tells what its format costs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.checkpoints import random_checkpoint
from benchmarks.common.forward_step import LoadedRunner, make_runner, step_batch
from benchmarks.common.rows import BenchmarkError, OtherLoad, Row, make_row, wait_quiet
from executor_svc.batch.forward_batch import ForwardBatch

NAME = "mapped_experts"
MEASURES = {"decode1": [(64, 1)], "decode16": [(64, 1)] * 16, "prompt512": [(0, 512)]}
"""By name: sequences as (cached tokens, new tokens)."""
_DONT_NEED = 4
"""MADV_DONTNEED."""


def _run(options: argparse.Namespace) -> Iterator[Row]:
    model = random_checkpoint(options.shape) if options.model is None else Path(options.model).resolve()
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    where = ("memory", "mapped")
    loaded = {each: make_runner(model, options.threads, more={"expert_weights": each}) for each in where}
    for measure, chunks in MEASURES.items():
        batch, repeats, others = step_batch(chunks, loaded["memory"].layout), list[dict[str, float]](), list[float]()
        hidden = [each.runner.forward(batch).clone() for each in loaded.values()]
        if not torch.equal(*hidden):
            raise BenchmarkError(f"{measure}: hidden states differ")
        for _ in range(options.repeats):
            wait_quiet(options.quiet_wait_s)
            with OtherLoad() as other:
                found = {f"{each}_ms": _milliseconds(loaded[each], batch, options.steps) for each in where}
                _give_back(files)
                found["cold_ms"] = _milliseconds(loaded["mapped"], batch, 1)
            repeats.append(found)
            others.append(other.cores)
            progress(f"{NAME}: {measure}: {', '.join(f'{name} {value:.1f}' for name, value in found.items())}")
        weight_bytes = loaded["memory"].weight_bytes
        params = {"measure": measure, "model": model.name, "threads": options.threads, "weight_bytes": weight_bytes}
        yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=others)


def _milliseconds(loaded: LoadedRunner, batch: ForwardBatch, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        loaded.runner.forward(batch)
    return 1e3 * (time.perf_counter() - start) / steps


def _give_back(files: list[Path]) -> None:
    """Take the files' pages from this process, and from the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        if path in map(str, files):
            start, stop = (int(each, 16) for each in addresses.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONT_NEED)
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # pages that are not written yet stay
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _describe(row: Row) -> str:
    found = row.medians
    ratios = (f"{way} {found[f'{way}_ms'] / found['memory_ms']:.1f}x" for way in ("mapped", "cold"))
    return f"{row.params['model']}, {row.params['measure']}: {found['memory_ms']:.1f} ms in memory; {', '.join(ratios)}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or GGUF file of a mixture")
    parser.add_argument("--shape", choices=("olmoe-4l", "qwen3-30b-a3b-3l"), default="olmoe-4l", help="without --model")
    parser.add_argument("--steps", type=positive, default=5, help="that are timed together (default 5)")
    parser.add_argument("--threads", type=positive, default=2, help="of the processor (default 2)")


BENCHMARK = Benchmark(NAME, "what do experts cost that stay in their file?", _add_options, _run, _describe)
