"""What docs/callers.md says of channel settings, as far as our own options rest on it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import grpc
import pytest

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import generation_pb2_grpc
from cadenza_common.wire.transport import bind, channel_options, server_options
from tests.helpers.machine.relay import relay


class Server(generation_pb2_grpc.GenerationServiceServicer):
    """Answers every request with one response, and ends the stream unless it is to stay open."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context):
        await context.write(pb.GenerateResponse(request_id=request.request_id))
        if request.request_id == "stay":
            try:
                await asyncio.Event().wait()
            finally:
                self.gone.set()


# A minute becomes 0.4 s, and pings may take longer than their share: the machine may be busy.
QUICKER = {
    "grpc.keepalive_time_ms": 400,
    "grpc.http2.ping_timeout_ms": 2000,
    "grpc.http2.min_ping_interval_without_data_ms": 200,
}


def quicker(options):
    """The same options with their times shortened; none is added."""
    return [(name, QUICKER.get(name, value)) for name, value in options]


@asynccontextmanager
async def serve(options) -> AsyncIterator[tuple[Server, str]]:
    servicer, server = Server(), grpc.aio.server(options=options)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    target = bind(server, "127.0.0.1:0", default_port=0)
    await server.start()
    yield servicer, target
    await server.stop(0)


@pytest.fixture
async def target() -> AsyncIterator[str]:
    async with serve(server_options()) as (_, target):
        yield target


async def call(target: str, request_id: str = "x") -> str:
    """The name of the status."""
    async with grpc.aio.insecure_channel(target, options=channel_options()) as channel:
        return await code_of(generation_pb2_grpc.GenerationServiceStub(channel), request_id)


async def code_of(stub, request_id: str) -> str:
    stream = stub.Generate(pb.GenerateRequest(request_id=request_id))
    try:
        async for response in stream:
            assert response.request_id == request_id
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


@pytest.mark.slow
async def test_a_silent_stream_stays_open_and_a_dead_connection_is_noticed_by_both_sides() -> None:
    async with (
        serve(quicker(server_options())) as (servicer, target),
        relay(target) as network,
        grpc.aio.insecure_channel(network.address, options=quicker(channel_options())) as channel,
    ):
        stream = generation_pb2_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(request_id="stay"))
        await stream.read()
        reading = asyncio.ensure_future(stream.read())
        # Five pings: more than a server takes that finds them too many, and than a client sends by default.
        await asyncio.wait([reading], timeout=2.3)
        assert not reading.done(), "a silent stream was closed"
        network.silent = True
        async with asyncio.timeout(20):
            with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):
                await reading
            await servicer.gone.wait()


async def test_a_slow_network_is_no_reason_to_give_up(target: str) -> None:
    async with relay(target, delay_s=0.15) as network:
        assert await call(network.address) == "OK"


async def test_a_web_proxy_in_the_environment_is_not_used(target: str, monkeypatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert await call(target) == "OK"


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("num_channels", [1, 8])
async def test_a_burst_of_new_streams_is_taken_whole(target: str, num_channels: int) -> None:
    channels = [grpc.aio.insecure_channel(target, options=channel_options()) for _ in range(num_channels)]
    stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
    codes = await asyncio.gather(*(code_of(stubs[index % num_channels], str(index)) for index in range(2000)))
    for channel in channels:
        await channel.close()
    assert Counter(codes) == {"OK": 2000}


async def test_calls_that_a_busy_server_has_not_begun_are_not_cancelled() -> None:
    """With a limit of a second instead of an hour they are, while the event loop is held for longer."""
    name = "grpc.server_max_unrequested_time_in_server"
    assert dict(server_options())[name] == 3600
    found = []
    shorter = [(each, 1 if each == name else value) for each, value in server_options()]
    for options in (server_options(), shorter):
        async with serve(options) as (_, target):
            with ThreadPoolExecutor(10) as clients:
                calls = [clients.submit(blocking_call, target) for _ in range(10)]
                threading.Event().wait(2.5)  # the event loop, while the calls arrive
                found.append({await asyncio.wrap_future(call) for call in calls})
    assert found[0] == {"OK"}
    assert "CANCELLED" in found[1]


def blocking_call(target: str) -> str:
    """The name of the status, from a thread of its own."""
    with grpc.insecure_channel(target, options=channel_options()) as channel:
        try:
            list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(request_id="x")))
        except grpc.RpcError as error:
            return error.code().name
        return "OK"
