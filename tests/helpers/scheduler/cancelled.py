"""The scheduler's resident memory before and after many cancels.

The scheduler runs as a process, with a simulated executor and after the executor was killed. Requests come over real
gRPC in batches: once all of a batch are queued or running, all are cancelled, and the next batch follows when the
scheduler has none left. Two ways: Generate calls that the client cancels, and requests of a Session that it aborts. One
request in `long_every` has a long prompt. A first round of each, not counted, fills the prefix cache and the
allocators' pools.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from benchmarks.common.plane_services import service_process
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import generation_pb2_grpc, types_pb2
from cadenza_common.wire.transport import channel_options

_BATCH = 200
_WARM_UP = 50 * _BATCH
_VOCAB_SIZE = 32768
_PROMPT_TOKENS, _LONG_PROMPT_TOKENS = 100, 8000
_STEP_MS = 10
_EXECUTOR = (
    *("--simulate-vocab-size", str(_VOCAB_SIZE), "--max-model-len", "16384"),
    *("--max-num-seqs", "64", "--max-num-batched-tokens", "2048", "--num-gpu-blocks", "4096"),
)


@dataclass
class Scheduler:
    """A scheduler process with an executor process."""

    stub: Any
    executor_pid: int
    long_every: int

    async def lose_executor(self) -> None:
        """Kill the executor, and wait until the scheduler has noticed."""
        os.kill(self.executor_pid, signal.SIGKILL)
        while (await self._info()).executors[0].connected:
            pass

    async def resident_bytes(self) -> int:
        """Resident memory of the scheduler's process."""
        return int((await self._info()).resident_bytes)

    async def cancel_calls(self, count: int) -> None:
        """Start Generate calls and cancel them, in batches."""
        for start in range(0, count, _BATCH):
            size = min(_BATCH, count - start)
            calls = [self.stub.Generate(self._request(index)) for index in range(size)]
            await self._until_queued(size)
            for call in calls:
                call.cancel()
            await self._until_queued(0)

    async def abort_in_session(self, count: int) -> None:
        """Start requests in a Session and abort them, in batches."""
        call = self.stub.Session()
        for start in range(0, count, _BATCH):
            ids = [str(index) for index in range(min(_BATCH, count - start))]
            for index, request_id in enumerate(ids):
                await call.write(pb.SessionRequest(generate=self._request(index, request_id)))
            await self._until_queued(len(ids))
            for request_id in ids:
                await call.write(pb.SessionRequest(abort=pb.AbortRequest(request_id=request_id)))
            ended: set[str] = set()
            while len(ended) < len(ids):
                message = await call.read()
                if message is grpc.aio.EOF:
                    raise RuntimeError("the session ended early")
                ended.update(event.request_id for event in message.events if event.done)
        await call.done_writing()
        if await call.code() is not grpc.StatusCode.OK:
            raise RuntimeError(f"the session ended with {await call.details()}")

    def _request(self, index: int, request_id: str = "") -> pb.GenerateRequest:
        num_tokens = _LONG_PROMPT_TOKENS if index % self.long_every == 0 else _PROMPT_TOKENS
        # Ids over 256: the interpreter keeps small integers anyway.
        ids = [300 + (index * 7 + place) % (_VOCAB_SIZE - 300) for place in range(num_tokens)]
        return pb.GenerateRequest(
            request_id=request_id,
            prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=ids))],
            sampling_params=types_pb2.SamplingParams(max_tokens=4000, ignore_eos=True, detokenize=False),
        )

    async def _info(self) -> pb.GetServerInfoResponse:
        return await self.stub.GetServerInfo(pb.GetServerInfoRequest())  # type: ignore[no-any-return]

    async def _until_queued(self, count: int) -> None:
        """Wait until this many requests wait or run."""
        while True:
            load = (await self._info()).load
            if load.num_waiting + load.num_running + load.num_swapped == count:
                return
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def served(long_every: int) -> AsyncIterator[Scheduler]:
    """Both processes, stopped at the end."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as costs:
        json.dump({"step_us": 1000 * _STEP_MS}, costs)
        costs.flush()
        async with _served(costs.name, long_every) as scheduler:
            yield scheduler


@contextlib.asynccontextmanager
async def _served(costs: str, long_every: int) -> AsyncIterator[Scheduler]:
    async with (
        service_process("executor_svc", "--simulate", costs, *_EXECUTOR) as (executor, executor_address),
        service_process("scheduler_svc", "--executor", executor_address, "--skip-tokenizer-init") as (_, address),
        grpc.aio.insecure_channel(address, options=channel_options()) as channel,
    ):
        yield Scheduler(generation_pb2_grpc.GenerationServiceStub(channel), executor, long_every)


async def measure(count: int, long_every: int, warm_up: int = _WARM_UP) -> dict[str, float]:
    """Growth of resident memory by `count` cancels of each kind, with an executor and without, in MB."""
    found: dict[str, float] = {}
    async with served(long_every) as scheduler:
        for state in ("connected", "alone"):
            if state == "alone":
                await scheduler.lose_executor()
            for kind, cancel in (("calls", scheduler.cancel_calls), ("session", scheduler.abort_in_session)):
                await cancel(warm_up)
                before = await scheduler.resident_bytes()
                await cancel(count)
                found[f"{state}_{kind}_growth_mb"] = (await scheduler.resident_bytes() - before) / 1e6
        found["resident_mb"] = await scheduler.resident_bytes() / 1e6
    return found
