"""How many prompt tokens are found in the prefix cache where layers have windows or states, beside full attention?

Both services with the simulated executor, whose steps take no time: hits are counted, nothing is timed. Each case runs
with the KV groups and states of a model, and with attention without windows alone, in pools of as many bytes.
`shortened`: 64 requests at once share a prefix that was served before, shortened by 0, 1 or 100 tokens. `talk`:
conversations of 40 turns with a tool's answer after each, in turns. `split`: the requests of vLLM's issue 45238, 64
one after the other of 2,200 tokens, which share the first 1,600 or 1,500. `again`: those of 40696 and 51198, a prompt
and then the same one with a suffix. Nothing here depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.burst_client import local_services
from benchmarks.common.rows import BenchmarkError, Row, make_row
from cadenza import AsyncClient, SamplingParams

NAME = "prefix_hits"
_VOCABULARY = 32_000
_SHORTENED_BY = (0, 1, 100)
_NUM_SHARING = 64
_NUM_TURNS = 40
_SPLIT, _SPLIT_LENGTH = (1600, 1500), 2200
_AGAIN, _SUFFIX = (480, 552, 561, 979), 9


@dataclass(frozen=True, slots=True)
class Groups:
    """A model's KV groups, as `--simulate-kv-groups` names them."""

    windowed: str
    full: str
    prefix: int
    """Tokens of the shared prefix: longer than the window."""
    state_pages: int = 0
    """Pages of a sequence's recurrent state."""


MODELS = {
    "gemma-3-12b": Groups("full:1,1024:5", "full:6", 3000),
    "gpt-oss": Groups("full:1,128:1", "full:2", 1000),
    "qwen3-next": Groups("full:1", "full:1", 1000, 200),
    "qwen3.5-4b": Groups("full:1", "full:1", 1000, 99),
    "lfm2": Groups("full:1", "full:1", 1000, 1),
}


@dataclass(frozen=True, slots=True)
class Found:
    """What requests found in the cache."""

    num_prompt: int
    num_cached: int
    num_without: int
    """Requests that found nothing."""


async def shortened(client: AsyncClient, groups: Groups, missing: int, seed: int) -> Found:
    """Serve a prefix, and then requests that share all of it but the last `missing` tokens."""
    rng = random.Random(seed)
    text = _draw(rng, groups.prefix)
    await _serve(client, [text], 2)
    prompts = [[*text[: len(text) - missing], *_draw(rng, 20)] for _ in range(_NUM_SHARING)]
    return _found(await _serve(client, prompts, 2))


async def talk(client: AsyncClient, num_talks: int, seed: int) -> Found:
    """Conversations that take turns; the first one of each finds nothing, and does not count."""
    rng = random.Random(seed)
    talks = [_draw(rng, rng.randint(400, 1200)) for _ in range(num_talks)]
    served: list[_Served] = []
    for turn in range(_NUM_TURNS):
        for index, prompt in enumerate(talks):
            made = await _serve(client, [prompt], 32)
            served += made if turn else []
            talks[index] = [*prompt, *made[0].token_ids, *_draw(rng, rng.randint(20, 200))]
    return _found(served)


async def split(client: AsyncClient, num_shared: int, seed: int) -> Found:
    """Serve requests of one length that share their first tokens, one after the other."""
    rng = random.Random(seed)
    text, served = _draw(rng, num_shared), list[_Served]()
    for _ in range(_NUM_SHARING):
        served += await _serve(client, [[*text, *_draw(rng, _SPLIT_LENGTH - num_shared)]], 2)
    return _found(served)


async def again(client: AsyncClient, num_tokens: int, seed: int) -> Found:
    """Serve a prompt, then the same one with a suffix; what the second finds."""
    rng = random.Random(seed)
    prompt = _draw(rng, num_tokens)
    await _serve(client, [prompt], 1)
    return _found(await _serve(client, [[*prompt, *_draw(rng, _SUFFIX)]], 1))


@dataclass(frozen=True, slots=True)
class _Served:
    num_prompt: int
    num_cached: int
    token_ids: tuple[int, ...]


async def _serve(client: AsyncClient, prompts: Sequence[list[int]], max_tokens: int) -> list[_Served]:
    outputs = await client.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=max_tokens))
    served = []
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.num_cached_tokens is None or len(output.outputs[0].token_ids) != max_tokens:
            raise BenchmarkError(f"a request of {len(prompt)} tokens was cut short")
        served.append(_Served(len(prompt), output.num_cached_tokens, tuple(output.outputs[0].token_ids)))
    return served


def _found(served: Sequence[_Served]) -> Found:
    return Found(
        sum(each.num_prompt for each in served),
        sum(each.num_cached for each in served),
        sum(not each.num_cached for each in served),
    )


def _draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(count)]


def measure(groups: Groups, what: str, num: int, seed: int, *, windowed: bool, num_pages: int) -> Found:
    """One case in services of its own. num: by how many tokens the prefix is shortened, or the number of talks."""
    options = {
        "simulate": "instant", "simulate_vocab_size": _VOCABULARY, "max_model_len": 8192, "max_num_seqs": 64,
        "max_num_batched_tokens": 2048, "num_gpu_blocks": num_pages,
        "simulate_kv_groups": groups.windowed if windowed else groups.full,
        "simulate_state_pages": groups.state_pages if windowed else 0,
    }  # fmt: skip
    with local_services(Path("simulated"), **options) as services:
        return asyncio.run(_measure(services.target, groups, what, num, seed))


async def _measure(target: str, groups: Groups, what: str, num: int, seed: int) -> Found:
    async with AsyncClient(target) as client:
        if what == "shortened":
            return await shortened(client, groups, num, seed)
        return await {"talk": talk, "split": split, "again": again}[what](client, num, seed)


def _run(options: argparse.Namespace) -> Iterator[Row]:
    cases = [("shortened", missing) for missing in _SHORTENED_BY]
    cases += [("talk", num_talks) for num_talks in options.talks]
    cases += [("split", num) for num in _SPLIT] + [("again", num) for num in _AGAIN]
    cases = [(what, num) for what, num in cases if what in options.cases]
    for model in options.models:
        for what, num in cases:
            repeats = []
            for seed in range(options.seed, options.seed + options.repeats):
                progress(f"{NAME}: {model}, {what} {num}, seed {seed}")
                repeats.append(_compare(MODELS[model], what, num, seed, options.pages))
            params = {"model": model, "what": what, "num": num, "pages": options.pages}
            yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=[])


def _compare(groups: Groups, what: str, num: int, seed: int, num_pages: int) -> dict[str, float]:
    found = measure(groups, what, num, seed, windowed=True, num_pages=num_pages)
    full = measure(groups, what, num, seed, windowed=False, num_pages=num_pages)
    return {
        "cached_share": found.num_cached / found.num_prompt,
        "requests_without": float(found.num_without),
        "full_cached_share": full.num_cached / full.num_prompt,
        "full_requests_without": float(full.num_without),
    }


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    what = {
        "shortened": f"{_NUM_SHARING} requests, {params['num']} less",
        "talk": f"{params['num']} talks",
        "split": f"{_NUM_SHARING} requests that share {params['num']} of {_SPLIT_LENGTH} tokens",
        "again": f"a prompt of {params['num']} tokens again",
    }[params["what"]]
    return (
        f"{params['model']}, {what}: {found['cached_share']:.1%} of the prompt tokens cached, "
        f"{found['requests_without']:.0f} requests find nothing; full attention in as many bytes: "
        f"{found['full_cached_share']:.1%}, {found['full_requests_without']:.0f}"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default all)")
    cases = ("shortened", "talk", "split", "again")
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases), help="(default all)")
    parser.add_argument("--talks", type=positive, nargs="+", default=[1, 4], help="at once (default 1 4)")
    parser.add_argument("--pages", type=positive, default=6000, help="of the pool (default 6000)")


BENCHMARK = Benchmark(
    NAME, "prompt tokens found in the prefix cache where layers have windows or states?", _add_options, _run, _describe
)
