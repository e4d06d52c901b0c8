"""Clients that receive output as fast as they can: lean readers over the stubs, and the product's own client.

A lean reader counts the tokens of each message and does nothing else with them: what a fast client can get.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.common.rows import BenchmarkError
from cadenza import AsyncClient, SamplingParams
from cadenza.calls.session import DrivenRequest, SessionDriver
from cadenza.credentials import authorized, call_metadata, chosen_token
from cadenza.errors import CadenzaError
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import generation_pb2_grpc, types_pb2
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.transport import aio_channel

VOCAB_SIZE = 2048
"""That of the demo model, whose tokenizer is used."""
PROMPT_TOKENS = 16
_EMPTY_STREAMS_S = 0.1
"""Time between two empty streams."""


@dataclass
class Load:
    """Requests that all begin at once, and what has come of them."""

    num_requests: int
    output_tokens: int
    text: bool
    num_tokens: int = 0
    num_messages: int = 0
    num_chars: int = 0
    server_ttft_s: list[float] = field(default_factory=list)
    """From arrival to first token, by the server's stamps, of each request that has ended."""
    error: str = ""
    """Of a request that failed."""
    on_tokens: Callable[[int], None] | None = None
    """Called with the number of tokens of each message."""

    def prompt(self, index: int) -> list[int]:
        """A prompt of its own."""
        return [300 + (index * 7 + place) % (VOCAB_SIZE - 300) for place in range(PROMPT_TOKENS)]

    def request(self, index: int) -> pb.GenerateRequest:
        """One request; its id is as long as the ids that `AsyncClient` draws."""
        return pb.GenerateRequest(
            request_id=f"{index:032d}",
            prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=self.prompt(index)))],
            sampling_params=types_pb2.SamplingParams(
                max_tokens=self.output_tokens, temperature=0.8, ignore_eos=True, detokenize=self.text
            ),
        )

    def take(self, response: pb.GenerateResponse) -> int:
        """Count a response's tokens."""
        count = 0
        for output in response.outputs:
            count += len(output.token_ids)
            self.num_chars += len(output.text)
        self.num_tokens += count
        if response.HasField("stats"):
            self.server_ttft_s.append(response.stats.first_token_ns / 1e9)
        return count

    def received(self, count: int) -> None:
        """A message with so many tokens has come."""
        self.num_messages += 1
        if self.on_tokens is not None:
            self.on_tokens(count)

    def check(self) -> None:
        """Raise BenchmarkError unless every token has come."""
        if self.error:
            raise BenchmarkError(self.error)
        if self.num_tokens != self.num_requests * self.output_tokens:
            raise BenchmarkError(f"{self.num_tokens} tokens came, which is not what was requested")
        if self.text and not self.num_chars:
            raise BenchmarkError("no text came")


async def over_sessions(target: str, load: Load, num_sessions: int) -> None:
    """Read all requests over Session streams, each with a connection of its own."""
    async with asyncio.TaskGroup() as group:
        for place in range(num_sessions):
            group.create_task(_session(target, load, range(place, load.num_requests, num_sessions)))


async def over_streams(target: str, load: Load) -> None:
    """Read each request over a Generate stream; all of them share a connection."""
    async with _stub(target) as stub, asyncio.TaskGroup() as group:
        for index in range(load.num_requests):
            group.create_task(_stream(stub, load, index))


async def by_client_streams(target: str, load: Load) -> None:
    """Read each request with `AsyncClient.stream`."""
    params = _params(load)

    async def read(client: AsyncClient, index: int) -> None:
        async for delta in client.stream(load.prompt(index), params):
            count = sum(len(sample.token_ids) for sample in delta.outputs)
            load.num_tokens += count
            load.num_chars += sum(len(sample.text) for sample in delta.outputs)
            load.received(count)

    async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
        for index in range(load.num_requests):
            group.create_task(read(client, index))


async def by_client_generate(target: str, load: Load) -> None:
    """Run all requests with `AsyncClient.generate`: one Session, which brings finished results only."""
    async with AsyncClient(target) as client:
        results = await client.generate([load.prompt(index) for index in range(load.num_requests)], _params(load))
    for result in results:
        load.num_tokens += len(result.outputs[0].token_ids)
        load.num_chars += len(result.outputs[0].text)
        load.received(len(result.outputs[0].token_ids))


async def arriving(target: str, load: Load, rate: float, *, streams: bool) -> tuple[list[float], list[float]]:
    """Send requests at a steady rate while others run.

    Returns the seconds from sending to the first token of each, and those of the streams of `_open_empty_streams`.
    """
    empty_s: list[float] = []
    async with _stub(target) as stub, _channel(target) as channel:
        opening = asyncio.create_task(_open_empty_streams(channel, empty_s))
        try:
            return await (_arriving_streams if streams else _arriving_session)(stub, load, rate), empty_s
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)


async def _open_empty_streams(channel: grpc.aio.Channel, times: list[float]) -> None:
    """Open new streams whose first message needs no work; appends the seconds to that message of each.

    They are health.Watch, with requests as long as those of a load, and answers at once. A connection of their own and
    10 a second: they measure gRPC, the event loops and the cores as the load leaves them, and hardly add to it.
    """
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="x" * Load(1, 1, text=False).request(0).ByteSize())

    async def open_one() -> None:
        sent_s = time.perf_counter()
        call = stub.Watch(request)
        await call.read()
        times.append(time.perf_counter() - sent_s)
        call.cancel()

    await open_one()
    times.clear()  # The first one connects.
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(open_one())
            await asyncio.sleep(_EMPTY_STREAMS_S)


async def _arriving_streams(stub: Any, load: Load, rate: float) -> list[float]:
    times: list[float] = []

    async def read(index: int) -> None:
        sent_s = time.perf_counter()
        call, is_first = stub.Generate(load.request(index)), True
        while (response := await call.read()) is not grpc.aio.EOF:
            if load.take(response) and is_first:
                times.append(time.perf_counter() - sent_s)
                is_first = False

    async with asyncio.TaskGroup() as group:
        async for index in _paced(load.num_requests, rate):
            group.create_task(read(index))
    return times


async def _arriving_session(stub: Any, load: Load, rate: float) -> list[float]:
    session, times = SessionDriver(stub, "the scheduler"), list[float]()
    async for index in _paced(load.num_requests, rate):
        session.send(_Timed(load, index, times))
    await session.finish()
    return times


async def _paced(count: int, rate: float) -> AsyncIterator[int]:
    start = time.perf_counter()
    for index in range(count):
        await asyncio.sleep(start + index / rate - time.perf_counter())
        yield index


async def _session(target: str, load: Load, indexes: range) -> None:
    async with _stub(target) as stub:
        session = _LeanSession(stub, load)
        for index in indexes:
            session.send(_Sent(load, index))
        await session.finish()


class _Sent(DrivenRequest):
    """A request that is tried once."""

    def __init__(self, load: Load, index: int) -> None:
        super().__init__(load.request(index))
        self.load = load

    def take(self, response: pb.GenerateResponse, now_s: float) -> bool:
        return True

    def end(self, error: CadenzaError | None) -> None:
        if error is not None:
            self.load.error = f"request {self.request_id}: {error.message}"


class _Timed(_Sent):
    """One whose first token is timed."""

    def __init__(self, load: Load, index: int, times: list[float]) -> None:
        super().__init__(load, index)
        self._times = times
        self._sent_s: float | None = None

    def sending(self, now_s: float) -> None:
        self._sent_s = now_s

    def take(self, response: pb.GenerateResponse, now_s: float) -> bool:
        if self.load.take(response) and self._sent_s is not None:
            self._times.append(now_s - self._sent_s)
            self._sent_s = None
        return True


class _LeanSession(SessionDriver):
    """Counts the tokens of a message in one go; requests hear of their ends only."""

    def __init__(self, stub: Any, load: Load) -> None:
        super().__init__(stub, "the scheduler")
        self._load = load

    async def take_all(self, events: Sequence[pb.SessionEvent], now_s: float) -> None:
        load, count = self._load, 0
        for event in events:
            response = event.response
            for output in response.outputs:
                count += len(output.token_ids)
                load.num_chars += len(output.text)
            if event.done:
                self.take(event, now_s)
        load.num_tokens += count
        load.received(count)


async def _stream(stub: Any, load: Load, index: int) -> None:
    call = stub.Generate(load.request(index))
    while (response := await call.read()) is not grpc.aio.EOF:
        load.received(load.take(response))


def _channel(target: str) -> grpc.aio.Channel:
    return aio_channel(target, TLS.from_environment())


@asynccontextmanager
async def _stub(target: str) -> AsyncIterator[Any]:
    async with _channel(target) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        yield authorized(stub, call_metadata(chosen_token(None)))


def _params(load: Load) -> SamplingParams:
    return SamplingParams(max_tokens=load.output_tokens, temperature=0.8, ignore_eos=True, detokenize=load.text)
