"""Stages of LoRA adapters: batches of decoding sequences on services without places for adapters, and with some."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.common.benchmark import SEED
from benchmarks.common.burst_client import generate_burst
from benchmarks.common.random_adapters import make_adapters
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request
from benchmarks.gpu.cases import Metrics
from benchmarks.gpu.serving.run import Run
from benchmarks.gpu.serving.stages import equal_requests, services_of

COUNTS = (16, 64)
"""Sequences at once."""
NUM_ADAPTERS, RANK = 16, 16
_DISTINCT = 4
"""Contents: an adapter takes as long whatever it holds, and making contents takes seconds."""
_PROMPT, _OUTPUT, _TRIAL_OUTPUT = 16, 256, 12
_STAGE_S = 10.0


def serve_adapters(run: Run, model: Path, trial: bool) -> None:
    """Run the stages of one shape: all kinds of batches without places for adapters, and then with 16.

    Raises BenchmarkError if a service died.
    """
    counts = (4,) if trial else COUNTS
    output = _TRIAL_OUTPUT if trial else _OUTPUT
    batches = {count: equal_requests(count, _PROMPT, output, SEED, run.shape.vocab_size) for count in counts}
    limit_s = 0.0 if trial else _STAGE_S
    found: dict[tuple[int, str], Metrics] = {}
    with tempfile.TemporaryDirectory(prefix="cadenza-adapters-") as place:
        folders = make_adapters(model, Path(place), NUM_ADAPTERS, rank=RANK, distinct=_DISTINCT, seed=SEED)
        names = list(folders)
        sizes = {"max_loras": NUM_ADAPTERS, "max_cpu_loras": NUM_ADAPTERS, "max_lora_rank": RANK}
        adapted = {"lora": [f"{name}={folder}" for name, folder in folders.items()], **sizes}
        for options, kinds in ({}, {"base": []}), (adapted, {"unused": [], "1 adapter": names[:1], "16": names}):
            run.changed = {"max_num_seqs": max(counts), **options}
            with services_of(run, model) as services:
                for (count, requests), (kind, named) in itertools.product(batches.items(), kinds.items()):
                    work = partial(_measured, run, services.target, requests, named)
                    found[count, kind] = run.stage(f"{count} sequences, adapters: {kind}", limit_s, work, requests)
    for (count, kind), metrics in found.items():
        base = found[count, "base"]
        if kind != "base" and metrics and base:
            cost = {"cost_percent": 100 * (base["tokens_per_s"] / metrics["tokens_per_s"] - 1)}
            run.stage(f"{count} sequences, adapters: {kind} beside base", 0.0, partial(dict, cost), batches[count])


def _measured(run: Run, target: str, requests: Sequence[Request], names: Sequence[str]) -> Metrics:
    """Output tokens per second; the first round warms up, and gives tokens to compare with those of no adapter."""
    adapters = list(itertools.islice(itertools.cycle(names), len(requests))) if names else None
    tokens, _ = run.limited(generate_burst(target, requests, adapters))
    if names:
        plain, _ = run.limited(generate_burst(target, requests))
        if 2 * sum(a == b for a, b in zip(tokens, plain, strict=True)) > len(requests):
            raise BenchmarkError("most requests with an adapter have the base's tokens")
    _, wall_s = run.limited(generate_burst(target, requests, adapters))
    return {"tokens_per_s": sum(each.output_len for each in requests) / wall_s}
