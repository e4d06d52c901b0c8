"""Floods of streams: opened and left, never read, or all at once; and a normal request among them.

`python -m tests.fuzz.wire.floods --streams 10000` prints the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from cadenza.v1 import admin_pb2, admin_pb2_grpc, execution_pb2_grpc
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import generation_pb2_grpc as pb_grpc
from cadenza_common.wire.transport import channel_options
from tests.checkpoints import make_llama
from tests.fuzz.wire.fuzz_executor import ExecutorFuzz
from tests.fuzz.wire.processes import NORMAL, VOCAB, FuzzedService, executor, scheduler

_STREAMS_PER_CHANNEL = 1000
_NORMAL_S = 300.0
_REQUESTS_PER_SESSION = 5
_SIZES = ("--max-model-len", "256", "--num-gpu-blocks", "8192", "--max-num-seqs", "256")
LONG = pb.GenerateRequest(
    prompt=[{"tokens": {"ids": [5, 6, 7]}}],
    sampling_params={"max_tokens": 120, "temperature": 1.0, "seed": 1, "logprobs": 20, "ignore_eos": True},
)
"""A request whose output is far more than a connection's window holds."""


@dataclass
class Figures:
    """What a flood did to a service."""

    num_streams: int
    open_s: float = 0.0
    """Until all streams were open, or ended."""
    normal_s: float = 0.0
    """Of the slowest normal request meanwhile."""
    num_refused: int = 0
    """Attempts of normal requests that found a full queue."""
    before_bytes: int = 0
    peak_bytes: int = 0
    """Resident, with all streams open."""
    after_bytes: int = 0
    """Resident, once they are gone."""
    statuses: Counter[str] = field(default_factory=Counter)
    """How the streams ended, of those that did."""

    @property
    def bytes_per_stream(self) -> float:
        return (self.peak_bytes - self.before_bytes) / self.num_streams

    def __str__(self) -> str:
        ended = ", ".join(f"{count} {status}" for status, count in self.statuses.items()) or "none"
        return (
            f"{self.num_streams} streams in {self.open_s:.1f} s, a normal request takes {self.normal_s:.2f} s "
            f"({self.num_refused} times refused before: the queue was full); memory "
            f"{self.before_bytes / 1e6:.0f} MB before, {self.peak_bytes / 1e6:.0f} MB with them "
            f"({self.bytes_per_stream / 1e3:.1f} kB each), {self.after_bytes / 1e6:.0f} MB after; ended: {ended}"
        )


class Flood:
    """Channels to a scheduler, and normal requests to it."""

    def __init__(self, service: FuzzedService, num_streams: int, stack: contextlib.AsyncExitStack) -> None:
        self.service = service
        self.figures = Figures(num_streams, before_bytes=service.resident_bytes)
        self._stack = stack
        self._began = time.monotonic()
        self.calls: list[Any] = []

    async def channels(self) -> AsyncIterator[grpc.aio.Channel]:
        """A channel for each stream, of which some share one."""
        for index in range(self.figures.num_streams):
            if index % _STREAMS_PER_CHANNEL == 0:
                channel = await self._stack.enter_async_context(
                    grpc.aio.insecure_channel(self.service.target, options=channel_options())
                )
            yield channel

    def opened(self) -> None:
        """All streams are open."""
        self.figures.open_s = time.monotonic() - self._began

    async def normal(self) -> None:
        """A normal request from a thread of its own, since the client's event loop is flooded as well.

        It is sent again while the queue is full, as clients do. Its time counts if it is the slowest.
        """
        seconds = await asyncio.to_thread(self._normal_s)
        self.figures.normal_s = max(self.figures.normal_s, seconds)

    def _normal_s(self) -> float:
        began = time.monotonic()
        with grpc.insecure_channel(self.service.target, options=channel_options()) as channel:
            tokens: list[int] = []
            while not tokens:
                try:
                    for response in pb_grpc.GenerationServiceStub(channel).Generate(NORMAL, timeout=_NORMAL_S):
                        tokens += [token_id for output in response.outputs for token_id in output.token_ids]
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:  # type: ignore[attr-defined]
                        raise
                    self.figures.num_refused += 1
                    time.sleep(0.1)
        assert len(tokens) == NORMAL.sampling_params.max_tokens
        return time.monotonic() - began

    async def num_tasks(self) -> int:
        """Client streams that the scheduler knows."""
        async with grpc.aio.insecure_channel(self.service.target, options=channel_options()) as channel:
            info = await pb_grpc.GenerationServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
        return int(info.load.num_client_tasks)

    async def end(self, *, cancel: bool = True) -> Figures:
        """End the streams, and wait until the scheduler is free of them."""
        self.figures.peak_bytes = self.service.resident_bytes
        for call in self.calls:
            if cancel:
                call.cancel()
        self.calls.clear()
        await self._stack.aclose()
        async with asyncio.timeout(60):
            while await self.num_tasks():
                pass
        await self.normal()
        self.figures.after_bytes = self.service.resident_bytes
        self.service.check()
        return self.figures


async def half_open(service: FuzzedService, num_streams: int) -> Figures:
    """Sessions that are opened, and on which nothing is sent."""
    async with contextlib.AsyncExitStack() as stack:
        flood = Flood(service, num_streams, stack)
        async for channel in flood.channels():
            flood.calls.append(pb_grpc.GenerationServiceStub(channel).Session())
        async with asyncio.timeout(120):
            while await flood.num_tasks() < num_streams:
                pass
        flood.opened()
        await flood.normal()
        return await flood.end()


async def never_read(service: FuzzedService, num_streams: int) -> Figures:
    """Sessions, Generate and WatchSteps streams with much output, of which the client reads nothing."""
    async with contextlib.AsyncExitStack() as stack:
        flood = Flood(service, num_streams, stack)
        index = 0
        async for channel in flood.channels():
            flood.calls.append(await _unread(channel, index))
            index += 1
        flood.opened()
        for _ in range(2):
            await flood.normal()
        return await flood.end()


async def _unread(channel: grpc.aio.Channel, index: int) -> Any:
    stub = pb_grpc.GenerationServiceStub(channel)
    if index % 2:
        return stub.Generate(LONG)
    if index % 20 == 0:
        return admin_pb2_grpc.AdminServiceStub(channel).WatchSteps(
            admin_pb2.WatchStepsRequest(include_block_tables=True)
        )
    session = stub.Session()
    for number in range(_REQUESTS_PER_SESSION):
        request = pb.GenerateRequest(request_id=f"{index}-{number}")
        request.MergeFrom(LONG)
        await session.write(pb.SessionRequest(generate=request))
    return session


async def at_once(service: FuzzedService, num_streams: int) -> Figures:
    """As many requests at once, each with a stream of its own, read to its end."""
    async with contextlib.AsyncExitStack() as stack:
        flood = Flood(service, num_streams, stack)
        async for channel in flood.channels():
            flood.calls.append(pb_grpc.GenerationServiceStub(channel).Generate(NORMAL))
        reading = asyncio.gather(*(_status(call) for call in flood.calls), flood.normal())
        while not reading.done():
            flood.figures.peak_bytes = max(flood.figures.peak_bytes, service.resident_bytes)
            await asyncio.wait([reading], timeout=0.05)
        flood.opened()
        flood.figures.statuses.update(status for status in await reading if status)
        peak = flood.figures.peak_bytes
        figures = await flood.end(cancel=False)
        figures.peak_bytes = peak
        return figures


async def _status(call: Any) -> str:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def half_open_plans(service: FuzzedService, num_streams: int) -> Figures:
    """Plan streams to an executor on which no session is opened, and one with a normal session."""
    figures, began = Figures(num_streams, before_bytes=service.resident_bytes), time.monotonic()
    async with grpc.aio.insecure_channel(service.target, options=channel_options()) as channel:
        stub = execution_pb2_grpc.ExecutionServiceStub(channel)
        calls = [stub.Execute() for _ in range(num_streams)]
        figures.open_s = time.monotonic() - began
        fuzz = asyncio.create_task(asyncio.to_thread(ExecutorFuzz, service))
        reading = asyncio.gather(*(_status(call) for call in calls))
        await fuzz
        figures.normal_s = time.monotonic() - began - figures.open_s
        while not reading.done():
            figures.peak_bytes = max(figures.peak_bytes, service.resident_bytes)
            await asyncio.wait([reading], timeout=0.05)
        figures.statuses.update(await reading)
    figures.after_bytes = service.resident_bytes
    service.check()
    return figures


FLOODS: dict[str, Callable[[FuzzedService, int], Awaitable[Figures]]] = {
    "half-open sessions": half_open,
    "streams that are never read": never_read,
    "requests at once": at_once,
}


@contextmanager
def flooded_scheduler() -> Iterator[FuzzedService]:
    """A scheduler that has warmed up."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_llama(Path(name) / "model", tokenizer=True, vocab_size=VOCAB)
        with scheduler(folder, Path(name), sizes=_SIZES) as service:
            asyncio.run(at_once(service, 50))
            yield service


@contextmanager
def flooded_executor() -> Iterator[FuzzedService]:
    """A simulated executor without a scheduler."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_llama(Path(name) / "model", tokenizer=True, vocab_size=VOCAB)
        with executor(folder, "--simulate", "instant", log=Path(name) / "log") as service:
            yield service


def main() -> None:
    """Print the figures of each flood."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.wire.floods", description="floods of streams")
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--only", default="", help="floods with this in their name")
    options = parser.parse_args()
    num_streams = options.streams
    for name, flood in FLOODS.items():
        if options.only not in name:
            continue
        with flooded_scheduler() as service:
            print(f"{name}: {asyncio.run(flood(service, num_streams))}", flush=True)
    if options.only in "half-open plan streams":
        with flooded_executor() as service:
            print(f"half-open plan streams: {asyncio.run(half_open_plans(service, num_streams))}", flush=True)


if __name__ == "__main__":
    main()
