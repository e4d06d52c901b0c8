"""What does a tenant notice of another one that floods the service? Its TTFT alone and beside the flood, in one run.

Both services run as processes, the executor simulated: a step takes `--step-ms`, and longer when it computes more than
256 tokens, as on a GPU that is bound by its memory. The scheduler has a tenants file and its default order, fair. The
tenant `steady` sends requests at Poisson times. The tenant `flood` wants far more than there is: long prompts, as many
at once as the queue takes, and again as soon as it may after a refusal. Each repeat measures `steady` alone and then
beside the flood, on the same services, with the same arrivals.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.benchmark import Benchmark, positive, positive_number, progress
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.common.service_process import service_process
from benchmarks.common.stats import percentile
from cadenza import AsyncClient, CadenzaError, SamplingParams

NAME = "tenants"
_VOCAB_SIZE = 32768
_STEP_TOKENS = 256
_MAX_QUEUED = 256
_FLOOD_CLIENTS = 2
_FLOOD_PROMPTS = 2000
_TOKENS = {name: f"cadenza_benchmark-token-of-{name}" for name in ("steady", "flood", "watcher")}
_WARM_UP_S = 2.0
_WARM_UP_REQUESTS = 20


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, _VOCAB_SIZE) for _ in range(count)]


async def _one(client: AsyncClient, prompt: list[int], output_tokens: int) -> float:
    """Run one request; returns its TTFT in milliseconds."""
    params = SamplingParams(max_tokens=output_tokens, temperature=0.8, ignore_eos=True, detokenize=False)
    start, ttft_ms = time.perf_counter(), 0.0
    async for delta in client.stream(prompt, params):
        if not ttft_ms and delta.outputs:
            ttft_ms = 1e3 * (time.perf_counter() - start)
    return ttft_ms


async def _steady(target: str, options: argparse.Namespace, seed: int) -> list[float]:
    """The TTFT of each request of the steady tenant, in milliseconds."""
    rng = random.Random(seed)
    async with AsyncClient(target, token=_TOKENS["steady"]) as client, asyncio.TaskGroup() as group:
        await client.model_info()
        tasks, due = [], time.perf_counter()
        for _ in range(options.requests):
            due += rng.expovariate(options.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            prompt = _ids(rng, options.prompt_tokens)
            tasks.append(group.create_task(_one(client, prompt, options.output_tokens)))
    return [task.result() for task in tasks]


async def _flood(target: str, options: argparse.Namespace, seed: int) -> None:
    """Keep the queue full until cancelled."""
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=options.output_tokens, temperature=0.8, ignore_eos=True, detokenize=False)
    async with AsyncClient(target, token=_TOKENS["flood"]) as client:
        while True:
            await client.generate([_ids(rng, options.flood_prompt_tokens) for _ in range(_FLOOD_PROMPTS)], params)


async def _measure(target: str, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """One repeat: alone, then beside the flood."""
    await _steady(target, argparse.Namespace(**{**vars(options), "requests": _WARM_UP_REQUESTS}), seed + 9)
    alone = await _steady(target, options, seed)
    floods = [asyncio.create_task(_flood(target, options, seed + 1 + number)) for number in range(_FLOOD_CLIENTS)]
    async with AsyncClient(target, token=_TOKENS["watcher"]) as watcher:
        before = await _load_of(watcher, "flood")
        start = time.perf_counter()
        while (await _load_of(watcher, "flood"))[1] <= before[1]:  # until the queue has refused a request
            await asyncio.sleep(0.1)
            if any(task.done() for task in floods):
                raise BenchmarkError("the flood has ended")
        await asyncio.sleep(_WARM_UP_S)
        both = await _steady(target, options, seed)
        after, seconds = await _load_of(watcher, "flood"), time.perf_counter() - start
        refused = (await _load_of(watcher, "steady"))[1]
    for task in floods:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError, CadenzaError):
        await asyncio.gather(*floods)
    found = {
        f"{name}_p{mark}_ms": percentile(times, mark)
        for name, times in (("alone", alone), ("both", both))
        for mark in (50, 99)
    }
    return {
        **found,
        "ratio_p50": found["both_p50_ms"] / found["alone_p50_ms"],
        "ratio_p99": found["both_p99_ms"] / found["alone_p99_ms"],
        "flood_tokens_per_s": (after[0] - before[0]) / seconds,
        "flood_refused": after[1] - before[1],
        "steady_refused": refused,
    }


async def _load_of(watcher: AsyncClient, name: str) -> tuple[int, int]:
    """Output tokens and refused requests of a tenant since the start."""
    (load,) = [each for each in (await watcher.server_info()).tenants if each.name == name]
    return load.num_output_tokens, load.num_rejected


def _write_files(folder: str, options: argparse.Namespace) -> tuple[str, str]:
    """The files of step costs and of tenants."""
    costs, tenants = Path(folder, "costs.json"), Path(folder, "tenants.toml")
    costs.write_text(json.dumps({"step_us": 1000 * options.step_ms, "token_us": 50, "hidden_tokens": _STEP_TOKENS}))
    keys = {"steady": f"weight = {options.weight}", "flood": "", "watcher": "admin = true"}
    tables = []
    for name, more in keys.items():
        digest = hashlib.sha256(_TOKENS[name].encode()).hexdigest()
        tables.append(f'[tenants.{name}]\ntokens = ["sha256:{digest}"]\n{more}\n')
    tenants.write_text("\n".join(tables))
    return str(costs), str(tenants)


async def _repeat(costs: str, tenants: str, options: argparse.Namespace, seed: int) -> dict[str, float]:
    longest = max(options.prompt_tokens, options.flood_prompt_tokens) + options.output_tokens
    executor = (
        *("--simulate", costs, "--simulate-vocab-size", str(_VOCAB_SIZE), "--max-model-len", str(longest)),
        *("--max-num-seqs", "64", "--max-num-batched-tokens", str(_STEP_TOKENS), "--num-gpu-blocks", "2000"),
    )
    scheduler = ("--skip-tokenizer-init", "--tenants", tenants, "--max-queued-requests", str(_MAX_QUEUED))
    async with (
        service_process("executor_svc", *executor) as (_, address),
        service_process("scheduler_svc", "--executor", address, *scheduler) as (_, target),
    ):
        return await _measure(target, options, seed)


def _run(options: argparse.Namespace) -> Iterator[Row]:
    wait_quiet(options.quiet_wait_s)
    repeats, other_cores = [], []
    for index in range(options.repeats):
        with OtherLoad() as other, tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(_repeat(*_write_files(folder, options), options, options.seed + 10 * index))
        progress(f"{NAME}: repeat {index + 1} of {options.repeats}: p99 {found['ratio_p99']:.2f} times")
        repeats.append(found)
        other_cores.append(other.cores)
    names = ("weight", "rate", "requests", "prompt_tokens", "flood_prompt_tokens", "output_tokens", "step_ms")
    params = {name: getattr(options, name) for name in names}
    yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)


def _describe(row: Row) -> str:
    found = row.medians
    return (
        f"TTFT of the steady tenant: alone p50 {found['alone_p50_ms']:.0f} ms, p99 {found['alone_p99_ms']:.0f} ms;\n"
        f"  beside the flood p50 {found['both_p50_ms']:.0f} ms, p99 {found['both_p99_ms']:.0f} ms: "
        f"{found['ratio_p99']:.2f} times\n"
        f"  the flood got {found['flood_tokens_per_s']:.0f} output tokens/s, and {found['flood_refused']:.0f} refusals"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weight", type=positive, default=8, help="of the steady tenant; the other has 1 (default 8)")
    parser.add_argument("--rate", type=positive_number, default=8.0, help="steady requests a second (default 8)")
    parser.add_argument("--requests", type=positive, default=240, help="steady requests of a measurement (default 240)")
    parser.add_argument("--prompt-tokens", type=positive, default=200, help="of a steady request (default 200)")
    parser.add_argument("--flood-prompt-tokens", type=positive, default=1500, help="of the flood (default 1500)")
    parser.add_argument("--output-tokens", type=positive, default=48, help="of each request (default 48)")
    parser.add_argument("--step-ms", type=positive, default=25, help="time of a simulated step (default 25)")


BENCHMARK = Benchmark(NAME, "what does a tenant notice of one that floods?", _add_options, _run, _describe)
