"""Stages of n-gram drafts beside none: few sequences that decode together, with both services on the same requests.

Random weights seldom repeat themselves, so a bias has each output repeat one token: nearly every draft is accepted, and
the gain is the most that drafts can give at these sizes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.common.benchmark import SEED
from benchmarks.common.burst_client import generate_burst
from benchmarks.common.workload import Request
from benchmarks.gpu.cases import Goal, Metrics
from benchmarks.gpu.serving.run import Run
from benchmarks.gpu.serving.stages import services_of
from cadenza import AsyncClient

COUNTS = (1, 4, 16)
"""Sequences at once."""
_STAGE_S = 10.0
_FORCED_TOKEN = 7
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
            for count in COUNTS:
                requests = repeating_requests(count, run.shape.vocab_size, trial)
                measure = partial(_measured, run, services.target, requests)
                found[kind, count] = run.stage(
                    f"{count} sequences, {kind}", 0.0 if trial else _STAGE_S, measure, requests
                )
    for count in COUNTS:
        without, drafted = found["off", count], found["ngram", count]
        if without and drafted:
            ratio = {"ratio": drafted["tokens_per_s"] / without["tokens_per_s"]}
            goal = Goal("ratio", at_least=1.0)
            run.stage(f"{count} sequences, drafts beside none", 0.0, partial(dict, ratio), goal=goal)


def _measured(run: Run, target: str, requests: Sequence[Request]) -> Metrics:
    metrics: Metrics = run.limited(_served(target, requests))
    return metrics


async def _served(target: str, requests: Sequence[Request]) -> Metrics:
    """Output tokens per second, tokens of a sequence in a step, and the share of drafts that were accepted."""
    async with AsyncClient(target) as client:
        before = (await client.server_info()).load
        _, wall_s = await generate_burst(target, requests, forced_token=_FORCED_TOKEN)
        after = (await client.server_info()).load
    num_tokens = sum(each.output_len for each in requests)
    num_steps, num_drafts = after.num_steps - before.num_steps, after.num_drafts - before.num_drafts
    metrics = {"tokens_per_s": num_tokens / wall_s, "tokens_per_step": num_tokens / (num_steps * len(requests))}
    if num_drafts:
        metrics["acceptance"] = (after.num_accepted_drafts - before.num_accepted_drafts) / num_drafts
    return metrics
