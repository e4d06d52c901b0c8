"""How long does a request hold the event loops? The longest callback of scheduler and executor, for extreme requests.

Both services run as processes, the executor simulated, each under `common.loop_watch`. Each case sends its messages one
after the other, as bytes, and waits for their ends. `cpu` is the longest callback in CPU time of the loop's thread,
which other load on the machine does not lengthen; `late` is how late a timer was at most, which other load and other
threads do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.common.benchmark import Benchmark, progress
from benchmarks.common.loop_cases import AFTER, SERVICE, Case, cases
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import ROOT, BenchmarkError, Row, make_row
from cadenza_common.wire.transport import channel_options

NAME = "loop_lag"
VOCAB_SIZE = 128_000
MAX_MODEL_LEN = 131_072
_TIMEOUT_S = 120
_SETTLE_S = 0.1
_LOOPS = ("scheduler", "executor")


@dataclass
class Watched:
    """A service as a process, and the file that its watch reports to."""

    process: asyncio.subprocess.Process
    address: str
    file: Path

    async def report(self) -> dict[str, Any]:
        """What was measured since the last report."""
        known = self._lines()
        self.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + _TIMEOUT_S
        while len(lines := self._lines()) == len(known):
            if time.monotonic() > until or self.process.returncode is not None:
                raise BenchmarkError("the watch of a service does not report")
            await asyncio.sleep(0.01)
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def _lines(self) -> list[str]:
        return [line for line in self.file.read_text().split("\n")[:-1] if line] if self.file.exists() else []


@contextlib.asynccontextmanager
async def watched(module: str, file: Path, *options: str) -> AsyncIterator[Watched]:
    """Run a service under the watch; yields once it serves."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.common.loop_watch", str(file), module, "--listen", "127.0.0.1:0", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        if not line.startswith("ready "):
            raise BenchmarkError(f"{module} did not start: {line!r}")
        yield Watched(process, line.split()[1], file)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def services(tokenizer: str, *, num_executors: int = 1) -> AsyncIterator[list[Watched]]:
    """A scheduler, then simulated executors whose model has 131,072 positions."""
    simulated = (
        *("--simulate", "instant", "--simulate-vocab-size", str(VOCAB_SIZE), "--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-seqs", "256", "--max-num-batched-tokens", "8192", "--num-gpu-blocks", "40000"),
    )
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        executors = [
            await stack.enter_async_context(watched("executor_svc", folder / f"executor {index}", *simulated))
            for index in range(num_executors)
        ]
        scheduler = await stack.enter_async_context(
            watched(
                *("scheduler_svc", folder / "scheduler"),
                *(option for executor in executors for option in ("--executor", executor.address)),
                *(("--tokenizer", tokenizer) if tokenizer else ("--skip-tokenizer-init",)),
            )
        )
        yield [scheduler, *executors]


async def send(channel: grpc.aio.Channel, case: Case) -> list[str]:
    """Send the messages of a case, one after the other, or as one Session a round; returns the statuses."""
    if case.method == "Session":
        session: Any = channel.stream_stream(f"{SERVICE}/Session")
        return [await _status(session(_all(case.messages), timeout=_TIMEOUT_S)) for _ in range(case.num_rounds)]
    kind = channel.unary_stream if case.method == "Generate" else channel.unary_unary
    method: Any = kind(f"{SERVICE}/{case.method}")
    return [await _status(method(message, timeout=_TIMEOUT_S)) for message in case.messages * case.num_rounds]


async def _all(messages: list[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def _status(call: Any) -> str:
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as exc:
        return exc.code().name
    return "OK"


async def measure(tokenizer: str, chosen: list[Case]) -> dict[str, dict[str, Any]]:
    """Run each case; by case and loop, what the watch found, and the statuses."""
    found: dict[str, dict[str, Any]] = {}
    for num_executors in sorted({case.num_executors for case in chosen}):
        some = [case for case in chosen if case.num_executors == num_executors]
        found |= await _measure(tokenizer, some, num_executors)
    return found


async def _measure(tokenizer: str, chosen: list[Case], num_executors: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    async with (
        services(tokenizer, num_executors=num_executors) as watches,
        grpc.aio.insecure_channel(watches[0].address, options=channel_options()) as channel,
    ):
        for case in chosen:
            for each in watches:
                await each.report()
            statuses = await send(channel, case)
            # A status is sent before the callback that sends it ends, and only whole callbacks are counted.
            await send(channel, AFTER)
            await asyncio.sleep(_SETTLE_S)
            scheduler, *executors = [await each.report() for each in watches]
            reports = [scheduler, max(executors, key=lambda report: float(report["cpu_ms"]))]
            found[case.name] = dict(zip(_LOOPS, reports, strict=True)) | {"statuses": sorted(set(statuses))}
            progress(f"{NAME}: {_line(case.name, found[case.name])}")
    return found


def _line(name: str, found: dict[str, Any]) -> str:
    parts = [
        f"{loop} cpu {found[loop]['cpu_ms']:.1f} ms ({found[loop]['longest']}), late {found[loop]['late_ms']:.1f} ms"
        for loop in _LOOPS
    ]
    return f"{name}: {'; '.join(parts)}; {', '.join(found['statuses'])}"


def _run(options: argparse.Namespace) -> Iterator[Row]:
    wait_quiet(options.quiet_wait_s)
    chosen = [case for case in cases(random.Random(options.seed), VOCAB_SIZE) if options.case in case.name]
    if not options.tokenizer:
        chosen = [case for case in chosen if not case.needs_tokenizer]
    repeats: list[dict[str, float]] = []
    other_cores = []
    for _ in range(options.repeats):
        with OtherLoad() as other:
            found = asyncio.run(measure(options.tokenizer, chosen))
        repeats.append(
            {
                f"{name}_{loop}_{what}": each[loop][what]
                for name, each in found.items()
                for loop in _LOOPS
                for what in ("cpu_ms", "late_ms")
            }
        )
        other_cores.append(other.cores)
    params = {"cases": [case.name for case in chosen], "vocab_size": VOCAB_SIZE, "max_model_len": MAX_MODEL_LEN}
    yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)


def _describe(row: Row) -> str:
    lines = ["the longest callback in CPU time, and the latest timer, of the scheduler's and the executor's loop:"]
    for name in row.params["cases"]:
        parts = [
            f"{loop} {row.medians[f'{name}_{loop}_cpu_ms']:.1f} ms, {row.medians[f'{name}_{loop}_late_ms']:.1f} ms late"
            for loop in _LOOPS
        ]
        lines.append(f"  {name}: {'; '.join(parts)}")
    return "\n".join(lines)


def _add_options(parser: argparse.ArgumentParser) -> None:
    demo = ROOT / "models" / "cadenza-demo"
    parser.add_argument("--case", default="", help="only cases with this in their name")
    parser.add_argument(
        "--tokenizer", default=str(demo) if demo.exists() else "", help="folder of a tokenizer; empty: no texts"
    )


BENCHMARK = Benchmark(NAME, "how long does a request hold the event loops?", _add_options, _run, _describe)
