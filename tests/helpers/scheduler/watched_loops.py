"""Both services as processes under a watch of their event loops, and requests that may hold these."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2

VOCAB_SIZE = 128_000
MAX_MODEL_LEN = 131_072
_TIMEOUT_S = 120
SERVICE = "/cadenza.v1.GenerationService"


@dataclass(frozen=True, slots=True)
class Case:
    """Messages to one method, as bytes."""

    name: str
    method: str
    messages: list[bytes]


AFTER = Case("after each case", "Abort", [pb.AbortRequest(request_id="none").SerializeToString()])
"""A short call, which is served when the callbacks of the calls before it have ended."""


def ids(rng: random.Random, count: int, vocab_size: int) -> types_pb2.PromptPart:
    """A part of random token ids."""
    return types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[rng.randrange(vocab_size) for _ in range(count)]))


def generate(*prompt: types_pb2.PromptPart, **sampling: object) -> bytes:
    """A GenerateRequest for one token."""
    params = types_pb2.SamplingParams(**{"max_tokens": 1, **sampling})  # type: ignore[arg-type]
    return pb.GenerateRequest(prompt=prompt, sampling_params=params).SerializeToString()


def session(requests: list[tuple[types_pb2.PromptPart, dict[str, object]]]) -> list[bytes]:
    """The messages of a Session with these prompts and sampling parameters."""
    return [
        pb.SessionRequest(
            generate=pb.GenerateRequest(
                request_id=str(index),
                prompt=[prompt],
                sampling_params=types_pb2.SamplingParams(**{"max_tokens": 1, **sampling}),  # type: ignore[arg-type]
            )
        ).SerializeToString()
        for index, (prompt, sampling) in enumerate(requests)
    ]


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
                raise RuntimeError("the watch of a service does not report")
            await asyncio.sleep(0.01)
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def _lines(self) -> list[str]:
        return [line for line in self.file.read_text().split("\n")[:-1] if line] if self.file.exists() else []


@contextlib.asynccontextmanager
async def watched(module: str, file: Path, *options: str) -> AsyncIterator[Watched]:
    """Run a service under the watch; yields once it serves."""
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "tests.helpers.machine.loop_watch",
            str(file),
            module,
            "--listen",
            "127.0.0.1:0",
            *options,
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        if not line.startswith("ready "):
            raise RuntimeError(f"{module} did not start: {line!r}")
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
    """Send the messages of a case, one after the other; returns the statuses."""
    if case.method == "Session":
        session: Any = channel.stream_stream(f"{SERVICE}/Session")
        return [await _status(session(_all(case.messages), timeout=_TIMEOUT_S))]
    kind = channel.unary_stream if case.method == "Generate" else channel.unary_unary
    method: Any = kind(f"{SERVICE}/{case.method}")
    return [await _status(method(message, timeout=_TIMEOUT_S)) for message in case.messages]


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
