"""How many more tokens do several executors give, with the scheduler on one core?

Simulated executors as processes, one scheduler pinned to the first core, executors and client on the others. Each
executor runs as many sequences at once as it may; there are twice as many requests for each executor. The ratio is to
one executor in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import uvloop

from benchmarks.common.benchmark import Benchmark, positive, positive_number, progress
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.plane_clients import PROMPT_TOKENS, VOCAB_SIZE, Load, over_sessions
from benchmarks.common.rows import Row, make_row
from benchmarks.common.service_process import cpu_s, service_process

NAME = "executor_scaling"
_MAX_EXECUTORS = 4
_SCHEDULER_CORE = min(os.sched_getaffinity(0))


@contextlib.asynccontextmanager
async def _services(count: int, step_ms: float, running: int, max_tokens: int) -> AsyncIterator[tuple[str, int]]:
    """Yield the scheduler's address and process id. Executors run where this process does."""
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.json"
        costs.write_text(json.dumps({"step_us": 1000 * step_ms}))
        options = ["--simulate", str(costs), "--simulate-vocab-size", str(VOCAB_SIZE), "--max-num-seqs", str(running)]
        options += ["--max-num-batched-tokens", "8192", "--max-model-len", str(max_tokens + PROMPT_TOKENS)]
        async with contextlib.AsyncExitStack() as stack:
            addresses = []
            for _ in range(count):
                _, address = await stack.enter_async_context(service_process("executor_svc", *options))
                addresses += ["--executor", address]
            scheduler = service_process("scheduler_svc", *addresses, "--skip-tokenizer-init")
            pid, target = await stack.enter_async_context(scheduler)
            for thread in psutil.Process(pid).threads():
                os.sched_setaffinity(thread.id, {_SCHEDULER_CORE})
            warm_up = Load(count * running, 32, text=False)
            await over_sessions(target, warm_up, 1)
            yield target, pid


async def _speed(count: int, options: argparse.Namespace) -> dict[str, float]:
    async with _services(count, options.step_ms, options.running, options.output_tokens) as (target, pid):
        load = Load(2 * count * options.running, options.output_tokens, text=False)
        before, start = cpu_s(pid), time.perf_counter()
        await over_sessions(target, load, 1)
        wall_s = time.perf_counter() - start
        load.check()
        return {"tokens_per_s": load.num_tokens / wall_s, "scheduler_cores": (cpu_s(pid) - before) / wall_s}


def _run(options: argparse.Namespace) -> Iterator[Row]:
    wait_quiet(options.quiet_wait_s)
    counts = [1, *(count for count in (2, _MAX_EXECUTORS) if count <= options.executors)]
    repeats: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    other_cores: dict[int, list[float]] = {count: [] for count in counts}
    # Inherited by the executors, and by the scheduler until it is pinned.
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {_SCHEDULER_CORE} or {_SCHEDULER_CORE})
    for number in range(options.repeats):
        for count in counts:
            progress(f"{NAME}: {count} executors, {number + 1} of {options.repeats}")
            with OtherLoad() as other, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                found = runner.run(_speed(count, options))
            repeats[count].append(
                found | {"ratio": found["tokens_per_s"] / (repeats[1] or [found])[-1]["tokens_per_s"]}
            )
            other_cores[count].append(other.cores)
    for count in counts:
        params = {
            "executors": count,
            "step_ms": options.step_ms,
            "running": options.running,
            "output_tokens": options.output_tokens,
        }
        yield make_row(NAME, seed=options.seed, params=params, repeats=repeats[count], other_cores=other_cores[count])


def _describe(row: Row) -> str:
    found = row.medians
    return (
        f"{row.params['executors']} executors: {found['tokens_per_s']:.0f} output tokens/s, {found['ratio']:.2f} times "
        f"one; the scheduler took {found['scheduler_cores']:.2f} cores"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--executors", type=positive, default=_MAX_EXECUTORS, help="at most so many (default 4)")
    parser.add_argument("--step-ms", type=positive_number, default=10.0, help="time of a step (default 10)")
    parser.add_argument("--running", type=positive, default=64, help="sequences of an executor (default 64)")
    parser.add_argument("--output-tokens", type=positive, default=256, help="of each request (default 256)")


BENCHMARK = Benchmark(NAME, "how many more tokens do several executors give?", _add_options, _run, _describe)
