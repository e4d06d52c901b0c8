"""Stages of LoRA adapters and of n-gram drafts: batches of decoding sequences with them, beside the same without.

Random weights seldom repeat themselves, so a bias has each output repeat one token: nearly every draft is accepted, and
the gain is the most that drafts can give at these sizes.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.common.benchmark import SEED
from benchmarks.common.burst_client import generate_burst
from benchmarks.common.random_adapters import make_adapters
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request
from benchmarks.gpu.cases import Goal, Metrics
from benchmarks.gpu.serving.run import Run
from benchmarks.gpu.serving.stages import equal_requests, services_of
from cadenza import AsyncClient

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


DRAFT_COUNTS = (1, 4, 16)
"""Sequences at once."""
FORCED_TOKEN = 7
_MAX_NUM_SEQS, _NUM_DRAFTS = 128, 5
"""Rows of logits, and the most drafts: 16 sequences may have all of them."""


def repeating_requests(count: int, vocab_size: int, trial: bool) -> list[Request]:
    """Requests whose prompts are a short random text again and again."""
    rng = random.Random(SEED + 3)
    period, repeats, output_len = (4, 2, 12) if trial else (32, 16, 256)
    texts = ([rng.randrange(vocab_size) for _ in range(period)] for _ in range(count))
    return [Request(index, text * repeats, output_len) for index, text in enumerate(texts)]


def serve_drafts(run: Run, model: Path, trial: bool) -> None:
    """Run the stages of one shape: all counts without drafts, all with, and then their ratios.

    Raises BenchmarkError if a service died.
    """
    found: dict[tuple[str, int], Metrics] = {}
    for kind in ("off", "ngram"):
        drafting = {} if kind == "off" else {"num_speculative_tokens": _NUM_DRAFTS}
        run.changed = {"speculative": kind, "max_num_seqs": 16 if trial else _MAX_NUM_SEQS, **drafting}
        with services_of(run, model) as services:
            run.limited(generate_burst(services.target, run.load.warm_up))
            for count in DRAFT_COUNTS:
                requests = repeating_requests(count, run.shape.vocab_size, trial)
                measure = partial(run.limited_metrics, partial(served, services.target, requests, FORCED_TOKEN))
                found[kind, count] = run.stage(
                    f"{count} sequences, {kind}", 0.0 if trial else _STAGE_S, measure, requests
                )
    for count in DRAFT_COUNTS:
        without, drafted = found["off", count], found["ngram", count]
        if without and drafted:
            ratio = {"ratio": drafted["tokens_per_s"] / without["tokens_per_s"]}
            goal = Goal("ratio", at_least=1.0)
            run.stage(f"{count} sequences, drafts beside none", 0.0, partial(dict, ratio), goal=goal)


async def served(target: str, requests: Sequence[Request], forced_token: int | None) -> Metrics:
    """Output tokens per second, time of a step, tokens of a sequence in it, and the share of drafts accepted.

    forced_token: the only token of each output; None: those of the model.
    """
    async with AsyncClient(target) as client:
        before = (await client.server_info()).load
        _, wall_s = await generate_burst(target, requests, forced_token=forced_token)
        after = (await client.server_info()).load
    num_tokens = sum(each.output_len for each in requests)
    num_steps, num_drafts = after.num_steps - before.num_steps, after.num_drafts - before.num_drafts
    metrics = {
        "tokens_per_s": num_tokens / wall_s,
        "tokens_per_step": num_tokens / (num_steps * len(requests)),
        "step_ms": 1000 * wall_s / num_steps,
    }
    if num_drafts:
        metrics["acceptance"] = (after.num_accepted_drafts - before.num_accepted_drafts) / num_drafts
    return metrics
