"""How many more tokens do several executors give, with the scheduler on one core?

Simulated executors as processes, one scheduler pinned to the first core, executors and client on the others. Each
executor runs as many sequences at once as it may; there are twice as many requests for each executor. The ratio is to
one executor in the same run. The scheduler's own calls are timed (`common/plan_watch.py`): `plan_ms` and `apply_ms` are
CPU times of planning and of applying results for one step of all executors, `plan_percent` their sum's share of a step.
With --finished the client takes whole outputs, so that little is written.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import uvloop

from benchmarks.common import plan_watch
from benchmarks.common.benchmark import Benchmark, positive, positive_number, progress
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.plane_clients import PROMPT_TOKENS, VOCAB_SIZE, Load, by_client_generate, over_sessions
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.common.service_process import cpu_s, service_process

NAME = "executor_scaling"
_MAX_EXECUTORS = 4
_SCHEDULER_CORE = min(os.sched_getaffinity(0))
_REPORT_S = 10.0


@contextlib.asynccontextmanager
async def _services(count: int, options: argparse.Namespace) -> AsyncIterator[tuple[str, int, Path]]:
    """Yield the scheduler's address, process id and file of plan times. Executors run where this process does."""
    with tempfile.TemporaryDirectory() as folder:
        costs, plans = Path(folder) / "costs.json", Path(folder) / "plans.jsonl"
        costs.write_text(json.dumps({"step_us": 1000 * options.step_ms}))
        os.environ[plan_watch.FILE] = str(plans)
        running, longest = options.running, options.output_tokens + PROMPT_TOKENS
        limits = ["--max-num-seqs", str(running), "--max-num-batched-tokens", "8192", "--max-model-len", str(longest)]
        simulated = ["--simulate", str(costs), "--simulate-vocab-size", str(VOCAB_SIZE), *limits]
        async with contextlib.AsyncExitStack() as stack:
            addresses = []
            for _ in range(count):
                _, address = await stack.enter_async_context(service_process("executor_svc", *simulated))
                addresses += ["--executor", address]
            own = ["--skip-tokenizer-init", "--max-queued-requests", "1000000"]
            scheduler = service_process("benchmarks.common.plan_watch", *addresses, *own)
            pid, target = await stack.enter_async_context(scheduler)
            for thread in psutil.Process(pid).threads():
                os.sched_setaffinity(thread.id, {_SCHEDULER_CORE})
            warm_up = Load(count * running, 32, text=False)
            await _send(target, warm_up, finished=options.finished)
            yield target, pid, plans


async def _send(target: str, load: Load, *, finished: bool) -> None:
    if finished:
        await by_client_generate(target, load)
    else:
        await over_sessions(target, load, 1)
    load.check()


def _plan_times(pid: int, file: Path) -> dict[str, int]:
    """Let the scheduler report, and begin anew; waits without serving this process's loop, which has nothing to do."""
    before, deadline = _num_reports(file), time.monotonic() + _REPORT_S
    os.kill(pid, signal.SIGUSR1)
    while _num_reports(file) == before:
        if time.monotonic() > deadline:
            raise BenchmarkError("the scheduler does not report its times")
        time.sleep(0.01)
    found: dict[str, int] = json.loads(file.read_text().splitlines()[-1])
    return found


def _num_reports(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


async def _speed(count: int, options: argparse.Namespace) -> dict[str, float]:
    async with _services(count, options) as (target, pid, plans):
        load = Load(2 * count * options.running, options.output_tokens, text=False)
        _plan_times(pid, plans)
        before, start = cpu_s(pid), time.perf_counter()
        await _send(target, load, finished=options.finished)
        wall_s, cores = time.perf_counter() - start, cpu_s(pid) - before
        times = _plan_times(pid, plans)
        if not times["plans"]:
            raise BenchmarkError("the scheduler has made no plan")
        rounds = times["plans"] / count
        plan_ms, apply_ms = times["plan_ns"] / 1e6 / rounds, times["apply_ns"] / 1e6 / rounds
        return {
            "tokens_per_s": load.num_tokens / wall_s,
            "scheduler_cores": cores / wall_s,
            "scheduler_us_per_token": 1e6 * cores / load.num_tokens,
            "plan_ms": plan_ms,
            "apply_ms": apply_ms,
            "plan_percent": 100 * (plan_ms + apply_ms) / options.step_ms,
            "real_step_ms": 1000 * wall_s / rounds,
        }


def _counts(most: int) -> list[int]:
    """1, 2, 4, … up to the most."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _run(options: argparse.Namespace) -> Iterator[Row]:
    wait_quiet(options.quiet_wait_s)
    counts = _counts(options.executors)
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
            "finished": options.finished,
        }
        yield make_row(NAME, seed=options.seed, params=params, repeats=repeats[count], other_cores=other_cores[count])


def _describe(row: Row) -> str:
    found = row.medians
    return (
        f"{row.params['executors']} executors: {found['tokens_per_s']:.0f} output tokens/s, {found['ratio']:.2f} times "
        f"one; the scheduler took {found['scheduler_cores']:.2f} cores, {found['scheduler_us_per_token']:.1f} us a "
        f"token\n  a step of all: plans {found['plan_ms']:.2f} ms, results {found['apply_ms']:.2f}, "
        f"{found['plan_percent']:.1f}% of the modelled step; it took {found['real_step_ms']:.1f} ms"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--executors", type=positive, default=_MAX_EXECUTORS, help="at most so many (default 4)")
    parser.add_argument("--step-ms", type=positive_number, default=10.0, help="time of a step (default 10)")
    parser.add_argument("--running", type=positive, default=64, help="sequences of an executor (default 64)")
    parser.add_argument("--output-tokens", type=positive, default=256, help="of each request (default 256)")
    parser.add_argument("--finished", action="store_true", help="clients take whole outputs only")


BENCHMARK = Benchmark(NAME, "how many more tokens do several executors give?", _add_options, _run, _describe)
