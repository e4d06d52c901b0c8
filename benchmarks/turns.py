"""How long does a conversation's next turn take to its first token, beside computing its whole prompt again?

Both services on the CPU, a checkpoint with random weights. A conversation grows by an answer and a question a turn; its
turns are served one after the other with the prefix cache, then some of the same prompts without it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.burst_client import local_services
from benchmarks.common.checkpoints import SHAPES, random_checkpoint, vocab_size
from benchmarks.common.first_token import first_token
from benchmarks.common.rows import OtherLoad, Row, make_row, percentile, wait_quiet
from cadenza import AsyncClient

NAME = "turns"
_FIRST, _QUESTION, _ANSWER = 1000, 64, 16
"""Tokens of the first prompt, of a question and of an answer."""
_MOST_TOKENS = 6144


def _run(options: argparse.Namespace) -> Iterator[Row]:
    for shape in options.shapes:
        folder = random_checkpoint(shape)
        repeats, others = [], []
        for repeat in range(options.repeats):
            progress(f"{NAME}: {shape}, repeat {repeat + 1}")
            wait_quiet(options.quiet_wait_s)
            with OtherLoad() as other:
                repeats.append(_repeat(folder, options.turns, options.seed + repeat))
            others.append(other.cores)
        params = {"model": folder.name, "turns": options.turns, "question": _QUESTION, "answer": _ANSWER}
        yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=others)


def _repeat(folder: Path, num_turns: int, seed: int) -> dict[str, float]:
    compared = sorted({turn for turn in (2, 10, 20, 40) if turn < num_turns} | {num_turns})
    prompts, with_cache = _served(folder, caching=True, talk=(num_turns, seed))
    chosen = [prompts[turn - 1] for turn in compared]
    _, without = _served(folder, caching=False, prompts=chosen)
    found = {f"turn{turn}_share": with_cache[turn - 1] / again for turn, again in zip(compared, without, strict=True)}
    found |= {f"turn{turn}_ms": 1e3 * with_cache[turn - 1] for turn in compared}
    found |= {f"turn{turn}_again_ms": 1e3 * again for turn, again in zip(compared, without, strict=True)}
    return {**found, "ttft_p50_ms": 1e3 * percentile(with_cache[1:], 50), "prompt_tokens": float(len(prompts[-1]))}


def _served(
    folder: Path, *, caching: bool, talk: tuple[int, int] = (0, 0), prompts: Sequence[list[int]] = ()
) -> tuple[list[list[int]], list[float]]:
    """Serve these prompts, or a conversation of so many turns with a seed; return them, and seconds to first tokens."""
    options = {"enable_prefix_caching": caching, "max_model_len": _MOST_TOKENS, "max_num_seqs": 4}
    with local_services(folder, **options) as services:
        return asyncio.run(_serve(services.target, vocab_size(folder), talk, prompts))


async def _serve(
    target: str, vocabulary: int, talk: tuple[int, int], prompts: Sequence[list[int]]
) -> tuple[list[list[int]], list[float]]:
    num_turns, seed = talk
    rng = random.Random(seed)
    served, times = [], []
    prompt = [rng.randrange(5, vocabulary) for _ in range(_FIRST)]
    async with AsyncClient(target) as client:
        await first_token(client, [5, 6, 7], _ANSWER)  # so that the times do not include connecting
        for given in prompts or [[]] * num_turns:
            taken, answer = await first_token(client, given or prompt, _ANSWER)
            served.append(given or prompt)
            times.append(taken)
            prompt = [*prompt, *answer, *(rng.randrange(5, vocabulary) for _ in range(_QUESTION))]
    return served, times


def _describe(row: Row) -> str:
    found = row.medians
    shares = ", ".join(
        f"turn {name.removeprefix('turn').removesuffix('_share')} {value:.1%}"
        for name, value in found.items()
        if name.endswith("_share")
    )
    return f"{row.params['model']}: to the first token {found['ttft_p50_ms']:.0f} ms; of that without a cache: {shares}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(SHAPES), default=["lfm2.5-1.2b", "qwen3.5-0.8b"], help="(default hybrids)"
    )
    parser.add_argument("--turns", type=positive, default=40, help="of the conversation (default 40)")


BENCHMARK = Benchmark(NAME, "time to the first token of a conversation's next turn?", _add_options, _run, _describe)
