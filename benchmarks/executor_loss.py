"""How long do streams stand still when their executor dies? On two executors, beside one that is restarted.

The services run as `cadenza up` runs them. `--streams` requests decode on the executor that is killed; with two
executors as many decode on the other one. Measured, for each of the former streams: from SIGKILL to its next token.
`--executor cpu` is a tiny model on the CPU, whose process takes longer to start than the simulated one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.checkpoints import DEMO_MODEL
from benchmarks.common.other_load import OtherLoad
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.common.stats import percentile
from cadenza import AsyncClient, SamplingParams
from cadenza.v1 import admin_pb2
from cadenza.v1.admin_pb2_grpc import AdminServiceStub
from cadenza_launcher.local import LocalServices
from cadenza_launcher.services.supervisor import RestartPolicy

NAME = "executor_loss"
_STEP_US = 8000
_LIMIT_S = 60.0
_MAX_TOKENS = 100_000


class _Stream:
    """One endless request: when its last token came."""

    def __init__(self, client: AsyncClient, index: int) -> None:
        self.last = 0.0
        self.came = asyncio.Event()
        prompt = [5 + (7 * index + place) % 200 for place in range(20)]
        self.task = asyncio.create_task(self._read(client, prompt))

    async def _read(self, client: AsyncClient, prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
        async for _ in client.stream(prompt, params):
            self.last = time.monotonic()
            self.came.set()

    async def first(self) -> None:
        """Wait for its first token."""
        await asyncio.wait_for(self.came.wait(), _LIMIT_S)

    async def next_after(self, moment: float) -> float:
        """Seconds from a moment to its next token."""
        async with asyncio.timeout(_LIMIT_S):
            while self.last <= moment:
                self.came.clear()
                await self.came.wait()
        return self.last - moment


async def _stalls(services: LocalServices, num_streams: int) -> list[float]:
    """Seconds for each stream of the executor that is killed."""
    async with AsyncClient(services.target) as client:
        admin = AdminServiceStub(client.channel)
        other = [services.addresses[name] for name in services.executors[1:]]
        for target in other:
            await admin.DrainExecutor(admin_pb2.DrainExecutorRequest(target=target, timeout_s=0))
        streams = [_Stream(client, index) for index in range(num_streams)]
        await asyncio.gather(*(each.first() for each in streams))
        for target in other:
            await admin.ResumeExecutor(admin_pb2.ResumeExecutorRequest(target=target))
        beside = [_Stream(client, num_streams + index) for index in range(num_streams * len(other))]
        await asyncio.gather(*(each.first() for each in beside))
        os.kill(services.pids()[services.executors[0]], signal.SIGKILL)
        killed_at = time.monotonic()
        # A token may have been on its way.
        await asyncio.sleep(0.05)
        found = await asyncio.gather(*(each.next_after(killed_at + 0.05) for each in streams))
        for each in (*streams, *beside):
            each.task.cancel()
        await asyncio.gather(*(each.task for each in (*streams, *beside)), return_exceptions=True)
        return [seconds + 0.05 for seconds in found]


def _measure(executors: int, options: argparse.Namespace) -> list[float]:
    """The stalls of all repeats."""
    back = threading.Event()
    found = []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as costs:
        json.dump({"step_us": _STEP_US}, costs)
        costs.flush()
        kind: dict[str, Any] = {"device": "cpu", "num_threads": 1}
        if options.executor == "simulated":
            kind = {"simulate": costs.name}
        with LocalServices(
            DEMO_MODEL, executors=executors, restarts=RestartPolicy(max_deaths=None), num_gpu_blocks=4000,
            max_num_seqs=4 * options.streams, on_log=lambda service, line: None, on_event=lambda line: None,
            on_back=lambda service: back.set(), **kind,
        ) as services:  # fmt: skip
            for repeat in range(options.repeats):
                back.clear()
                stalls = asyncio.run(_stalls(services, options.streams))
                progress(
                    f"{executors} executors, {repeat}: {percentile(stalls, 50):.2f} s, at most {max(stalls):.2f} s"
                )
                found += stalls
                if not back.wait(_LIMIT_S):
                    raise BenchmarkError("the executor did not come back")
                asyncio.run(_serving(services.target, executors))
    return found


async def _serving(target: str, count: int) -> None:
    async with AsyncClient(target) as client, asyncio.timeout(_LIMIT_S):
        while sum(each.connected for each in (await client.server_info()).executors) < count:
            pass  # each look is a call


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=positive, default=8, help="on the executor that is killed (default 8)")
    parser.add_argument("--executor", choices=("simulated", "cpu"), default="simulated")


def _run(options: argparse.Namespace) -> Iterator[Row]:
    metrics: dict[str, float] = {}
    with OtherLoad() as other:
        for name, count in (("one_restarted", 1), ("two", 2)):
            stalls = _measure(count, options)
            metrics |= {
                f"{name}_p50_s": round(percentile(stalls, 50), 3),
                f"{name}_max_s": round(max(stalls), 3),
            }
    yield make_row(
        NAME,
        seed=options.seed,
        params={"streams": options.streams, "executor": options.executor, "kills": options.repeats},
        repeats=[metrics],
        other_cores=[other.cores],
    )


def _describe(row: Row) -> str:
    m = row.medians
    return (
        f"{row.params['executor']}: streams of a killed executor stand still for "
        f"{m['two_p50_s']:.2f} s (p50), {m['two_max_s']:.2f} s (max) beside another executor; "
        f"{m['one_restarted_p50_s']:.2f} and {m['one_restarted_max_s']:.2f} s if the only one is restarted"
    )


BENCHMARK = Benchmark(
    NAME, "how long do streams stand still when one of two executors dies, or the only one?", _add_options, _run,
    _describe,
)  # fmt: skip
