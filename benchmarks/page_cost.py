"""What does the live page cost while it is open? CPU time of the scheduler for a step, and steps a second.

Scheduler, executor (simulated) and gateway run as processes; `--running` sequences decode all the time, each that ends
is replaced. Periods without a page and with `--pages` open ones take turns on the same services, so that other load
disturbs both alike. What the page adds to the scheduler's CPU time of a step, over the time of a step, is the most that
it can slow steps by; the gateway's CPU time is shown beside it, which a core of its own takes.

Checked: open pages get the schedule's columns, and lose no record.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientSession, ClientTimeout

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.common.service_process import cpu_s, service_process
from cadenza import AsyncClient, SamplingParams

NAME = "page_cost"
_VOCAB_SIZE = 32768
_RUNNING = (16, 256)
_MAX_LINE_BYTES = 2**24
_SETTLE_S = 1.0
"""After a page has opened or closed, before the next period is measured."""


@dataclass(frozen=True, slots=True)
class _Services:
    """What runs: addresses, and process ids."""

    target: str
    url: str
    scheduler: int
    gateway: int


@dataclass(slots=True)
class _Seen:
    """What the open pages got."""

    num_columns: int = 0
    num_dropped: int = 0
    num_bytes: int = 0


@contextlib.asynccontextmanager
async def _services(options: argparse.Namespace, running: int) -> AsyncIterator[_Services]:
    length = options.prompt_tokens + options.output_tokens + 1
    with tempfile.TemporaryDirectory() as folder:
        executor = (
            *(
                "--simulate",
                _write_costs(folder, options.step_ms),
                "--simulate-vocab-size",
                str(_VOCAB_SIZE),
                "--max-model-len",
                str(length),
            ),
            *("--max-num-seqs", str(running), "--max-num-batched-tokens", "4096"),
            *("--num-gpu-blocks", str((running + 4) * (length // 16 + 2))),
        )
        async with (
            service_process("executor_svc", *executor) as (_, address),
            service_process("scheduler_svc", "--executor", address, "--skip-tokenizer-init") as (scheduler, target),
            service_process("gateway_svc", "--target", target, "--page", listen="--http") as (gateway, http),
        ):
            yield _Services(target, f"http://{http}", scheduler, gateway)


def _write_costs(folder: str, step_ms: int) -> str:
    path = Path(folder, "costs.json")
    path.write_text(json.dumps({"step_us": 1000 * step_ms}))
    return str(path)


@contextlib.asynccontextmanager
async def _load(client: AsyncClient, options: argparse.Namespace, running: int) -> AsyncIterator[None]:
    """Requests that run while the body does, so many at a time; raises what one of them raised."""
    params = SamplingParams(temperature=0, max_tokens=options.output_tokens, ignore_eos=True, detokenize=False)

    async def go_on(place: int) -> None:
        for number in range(10**9):
            first = 300 + (place * 7919 + number * 31) % (_VOCAB_SIZE - 300 - options.prompt_tokens)
            prompt = list(range(first, first + options.prompt_tokens))
            async for _ in client.stream(prompt, params):
                pass

    tasks = [asyncio.create_task(go_on(place)) for place in range(running)]
    try:
        while (await client.server_info()).load.num_running < running:  # noqa: ASYNC110  # no event says so
            await asyncio.sleep(0.05)
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _open_pages(services: _Services, count: int) -> AsyncIterator[_Seen]:
    """Pages that take all events while the body runs."""
    seen = _Seen()

    async def take(http: ClientSession) -> None:
        async with http.get(f"{services.url}/page/events") as response:
            if response.status != 200:
                raise BenchmarkError(f"HTTP {response.status}: {await response.text()}")
            async for line in response.content:
                seen.num_bytes += len(line)
                event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {}
                for lane in event.get("lanes", {}).values() if event.get("type") == "frame" else ():
                    seen.num_columns += len(lane.get("schedule", {}).get("columns", ()))
                seen.num_dropped = max(seen.num_dropped, event.get("dropped", 0))

    async with ClientSession(timeout=ClientTimeout(total=None), read_bufsize=_MAX_LINE_BYTES) as http:
        tasks = [asyncio.create_task(take(http)) for _ in range(count)]
        try:
            yield seen
            for task in tasks:
                if task.done():
                    task.result()
                    raise BenchmarkError("a page's stream has ended")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _period(client: AsyncClient, services: _Services, seconds: float) -> dict[str, float]:
    """Figures of so many seconds from now."""
    await asyncio.sleep(_SETTLE_S)
    steps, began = await _num_steps(client), time.perf_counter()
    scheduler, gateway = cpu_s(services.scheduler), cpu_s(services.gateway)
    await asyncio.sleep(seconds)
    scheduler, gateway = cpu_s(services.scheduler) - scheduler, cpu_s(services.gateway) - gateway
    steps, wall_s = await _num_steps(client) - steps, time.perf_counter() - began
    if steps <= 0:
        raise BenchmarkError("no step ran")
    return {
        "step_ms": 1e3 * wall_s / steps,
        "scheduler_us_per_step": 1e6 * scheduler / steps,
        "gateway_us_per_step": 1e6 * gateway / steps,
    }


async def _num_steps(client: AsyncClient) -> int:
    return sum(executor.num_steps for executor in (await client.server_info()).executors)


async def _measure(options: argparse.Namespace, running: int) -> dict[str, float]:
    closed: list[dict[str, float]] = []
    opened: list[dict[str, float]] = []
    num_bytes = 0
    async with _services(options, running) as services, AsyncClient(services.target) as client:
        await client.model_info()
        async with _load(client, options, running):
            for _ in range(options.turns):
                closed.append(await _period(client, services, options.seconds))
                async with _open_pages(services, options.pages) as seen:
                    opened.append(await _period(client, services, options.seconds))
                if not seen.num_columns or seen.num_dropped:
                    raise BenchmarkError(f"the pages got {seen.num_columns} columns, {seen.num_dropped} were lost")
                num_bytes += seen.num_bytes
    found = {f"closed_{name}": _mean(closed, name) for name in closed[0]}
    found |= {f"open_{name}": _mean(opened, name) for name in opened[0]}
    added_us = found["open_scheduler_us_per_step"] - found["closed_scheduler_us_per_step"]
    return {
        **found,
        "added_us_per_step": added_us,
        "added_share_of_step": added_us / (1e3 * found["closed_step_ms"]),
        "page_bytes_per_s": num_bytes / (options.pages * options.turns * (options.seconds + _SETTLE_S)),
    }


def _mean(periods: list[dict[str, float]], name: str) -> float:
    return sum(period[name] for period in periods) / len(periods)


def _run(options: argparse.Namespace) -> Iterator[Row]:
    if options.quick:
        options.running, options.seconds, options.turns, options.repeats = [4], 1, 1, 1
    else:
        wait_quiet(options.quiet_wait_s)
    for running in options.running or _RUNNING:
        repeats, other_cores = [], []
        for index in range(options.repeats):
            progress(f"{NAME}: {running} running, repeat {index + 1} of {options.repeats}")
            with OtherLoad() as other:
                repeats.append(asyncio.run(_measure(options, running)))
            other_cores.append(other.cores)
        names = ("pages", "step_ms", "seconds", "turns", "prompt_tokens", "output_tokens")
        params = {"running": running, **{name: getattr(options, name) for name in names}}
        yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)


def _describe(row: Row) -> str:
    found = row.medians
    return (
        f"{row.params['running']} running, steps of {found['closed_step_ms']:.2f} ms: {row.params['pages']} open pages "
        f"add {found['added_us_per_step']:.0f} us of the scheduler's CPU time to a step's "
        f"{found['closed_scheduler_us_per_step']:.0f} us: {found['added_share_of_step']:.2%} of a step\n"
        f"  with them steps take {found['open_step_ms']:.2f} ms; the gateway takes "
        f"{found['open_gateway_us_per_step']:.0f} us a step, and sends each {found['page_bytes_per_s'] / 1e3:.1f} kB/s"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=positive, action="append", help="sequences that decode; default 16, then 256")
    parser.add_argument("--pages", type=positive, default=2, help="open pages (default 2)")
    parser.add_argument("--step-ms", type=positive, default=10, help="time of a simulated step (default 10)")
    parser.add_argument("--seconds", type=positive, default=8, help="length of a period (default 8)")
    parser.add_argument("--turns", type=positive, default=3, help="pairs of periods in a repeat (default 3)")
    parser.add_argument("--prompt-tokens", type=positive, default=32, help="of each request (default 32)")
    parser.add_argument("--output-tokens", type=positive, default=512, help="of each request (default 512)")
    parser.add_argument("--quick", action="store_true", help="few sequences and short periods: whether it works at all")


BENCHMARK = Benchmark(NAME, "what does the live page cost while it is open?", _add_options, _run, _describe)
