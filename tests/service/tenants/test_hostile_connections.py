"""Limits that hold before memory is taken: raw connections misbehave while others are served (docs/security.md)."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import psutil
import pytest

from benchmarks.common.plane_services import service_process
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import generation_pb2_grpc
from cadenza_common.metrics.listener_counts import ListenerCounts
from cadenza_common.serving.call_limits import CallLimits, UnfinishedMessages
from cadenza_common.serving.connection_limits import PeerLimit
from cadenza_common.wire.tls_server import credentials_of
from cadenza_common.wire.transport import MAX_METADATA_BYTES, aio_channel, bind, server_options
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.links import front_files
from tests.helpers.certificates import certificates
from tests.helpers.machine.hostile import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    MAX_FRAME,
    PREFACE,
    RST_STREAM,
    Hostile,
    call_headers,
    frame,
)

GENERATE, SESSION, INFO = (f"/cadenza.v1.GenerationService/{name}" for name in ("Generate", "Session", "GetModelInfo"))
QUICKER = {
    "grpc.server_handshake_timeout_ms": 1500,
    "grpc.http2.settings_timeout": 1500,
    "grpc.max_connection_idle_ms": 1500,
}
"""For tests of these times alone: on a busy machine a connection that does all it should may take most of a second."""
MB = 1024 * 1024


class Server(generation_pb2_grpc.GenerationServiceServicer):
    """Answers GetModelInfo, counts the others."""

    def __init__(self) -> None:
        self.num_generate = 0

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context):
        return pb.GetModelInfoResponse(model="m")

    async def Generate(self, request: pb.GenerateRequest, context):
        self.num_generate += 1
        await context.write(pb.GenerateResponse(request_id=request.request_id))
        await asyncio.Event().wait()

    async def Session(self, requests, context):
        async for _ in requests:
            pass


@asynccontextmanager
async def serve(limits: CallLimits | None = None, credentials=None, **options) -> AsyncIterator[tuple[Server, str]]:
    times = options.pop("times", {})
    made = [(name, times.get(name, value)) for name, value in server_options(max_received_bytes=2 * MB, **options)]
    server, servicer = grpc.aio.server(options=made, interceptors=[limits or CallLimits()]), Server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    address = bind(server, "127.0.0.1:0", default_port=0, credentials=credentials)
    await server.start()
    try:
        yield servicer, address
    finally:
        await server.stop(0)


async def is_served(address: str) -> bool:
    async with aio_channel(address) as channel, asyncio.timeout(10):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return (await stub.GetModelInfo(pb.GetModelInfoRequest())).model == "m"


async def some_closed(connections: list[Hostile], count: int) -> None:
    """Wait until the server has closed so many of the connections."""
    waiting = {asyncio.create_task(each.closed.wait()) for each in connections}
    try:
        while len(waiting) > len(connections) - count:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


def resident() -> int:
    return psutil.Process().memory_info().rss


async def test_connections_beyond_the_limit_are_closed_and_those_within_are_served() -> None:
    async with serve(max_connections=8) as (_, address):
        async with aio_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            await stub.GetModelInfo(pb.GetModelInfoRequest())
            hostile = [await Hostile.connect(address) for _ in range(20)]
            async with asyncio.timeout(10):
                await some_closed(hostile, 13)
            assert (await stub.GetModelInfo(pb.GetModelInfoRequest())).model == "m"
            for each in hostile:
                await each.close()
        async with asyncio.timeout(10):
            while True:  # the server needs a moment to see that they have left
                try:
                    assert await is_served(address)
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_connections_of_one_peer_beyond_its_limit_are_closed_the_newest_first() -> None:
    async with serve(times={"grpc.server_handshake_timeout_ms": 60_000}) as (_, address):
        counts = ListenerCounts()
        limit = PeerLimit(int(address.rpartition(":")[2]), 4, counts)
        greedy = [await Hostile.connect(address, local="127.0.0.2") for _ in range(3)]
        modest = [await Hostile.connect(address, local="127.0.0.3") for _ in range(2)]
        await asyncio.gather(*(each.settings.wait() for each in greedy + modest))
        assert limit.look() == 0
        assert (counts.num_connections, counts.num_closed) == (5, 0)
        greedy += [await Hostile.connect(address, local="127.0.0.2", preface=index % 2 == 0) for index in range(6)]
        await asyncio.gather(*(each.settings.wait() for each in greedy + modest))
        assert limit.look() == 5
        assert (counts.num_connections, counts.num_closed) == (6, 5)
        async with asyncio.timeout(10):
            await some_closed(greedy[3:], 5)
        limit.look()
        assert counts.num_closed == 5, "each is counted once"
        assert not any(each.closed.is_set() for each in greedy[:3] + modest)
        assert await is_served(address)
        for each in greedy + modest:
            await each.close()


async def test_connections_that_never_begin_or_have_no_calls_are_closed() -> None:
    async with serve(times=QUICKER) as (_, address):
        silent = await Hostile.connect(address, preface=False)
        half = await Hostile.connect(address, preface=False)
        half.send(PREFACE[:10])
        unsettled = await Hostile.connect(address, preface=False)
        unsettled.send(PREFACE)
        unconfirmed = await Hostile.connect(address, answers=False)
        unconfirmed.begin(1, GENERATE)
        idle, busy = await Hostile.connect(address), await Hostile.connect(address)
        busy.begin(1, GENERATE)
        ended = (silent, half, unsettled, unconfirmed, idle)
        async with asyncio.timeout(10):
            await asyncio.gather(*(each.closed.wait() for each in ended))
        assert idle.of_kind(GOAWAY)
        assert not busy.closed.is_set()
        assert await is_served(address)
        for each in (*ended, busy):
            await each.close()


async def test_tls_handshakes_that_do_not_end_are_closed(tmp_path) -> None:
    """Before a client has shown its certificate it can hold a connection for the time of a handshake, and no more."""
    certs = certificates(tmp_path / "certs")
    config = SchedulerConfig(executor=["127.0.0.1:1"], **certs.listener("scheduler"))
    async with serve(credentials=credentials_of(front_files(config)), times=QUICKER) as (_, address):
        silent, half = [await Hostile.connect(address, preface=False) for _ in range(2)]
        half.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")  # the beginning of a ClientHello
        async with asyncio.timeout(10):
            await asyncio.gather(silent.closed.wait(), half.closed.wait())
        async with aio_channel(address, certs.of("client")) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            assert (await stub.GetModelInfo(pb.GetModelInfoRequest())).model == "m"
        await silent.close()
        await half.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("service", ["scheduler", "executor"])
async def test_services_hold_their_peers_to_the_limit(service: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if service == "scheduler":
            config = SchedulerConfig(executor=["127.0.0.1:1"], listen="127.0.0.1:0", max_connections_per_peer=4)
            running = Service(config)
            address = await running.start()
            stack.push_async_callback(running.stop)
        else:
            options = ("--simulate", "instant", "--max-connections-per-peer", "4")
            _, address = await stack.enter_async_context(service_process("executor_svc", *options))
        greedy = [await Hostile.connect(address, local="127.0.0.2") for _ in range(6)]
        async with asyncio.timeout(20):
            await some_closed(greedy, 2)
        for each in greedy:
            await each.close()


async def test_calls_begun_and_cancelled_at_once_are_bounded() -> None:
    """CVE-2023-44487: without a limit of concurrent streams each one becomes a task, and the service serves no one."""
    async with serve(max_streams=100) as (_, address):
        before, hostile = resident(), await Hostile.connect(address)
        for index in range(10_000):
            hostile.begin(2 * index + 1, GENERATE)
            hostile.send(frame(RST_STREAM, b"\0\0\0\x08", stream=2 * index + 1))
            if index % 100 == 0:
                await hostile.writer.drain()
                await asyncio.sleep(0)
        assert await is_served(address)
        assert resident() - before < 50 * MB
        await hostile.close()


async def test_calls_of_a_connection_beyond_the_limit_are_refused() -> None:
    async with serve(max_streams=100) as (servicer, address):
        hostile = await Hostile.connect(address, answers=False)  # it never confirms the limit
        for index in range(500):
            hostile.begin(2 * index + 1, GENERATE)
            hostile.send(frame(DATA, b"\0\0\0\0\0", flags=1, stream=2 * index + 1))
        await hostile.until(lambda: len(hostile.of_kind(RST_STREAM)) >= 400)
        assert await is_served(address)
        assert servicer.num_generate <= 100
        await hostile.close()


@pytest.mark.parametrize("confirms", [True, False])
@pytest.mark.parametrize(("count", "size"), [(1, 1_000_000), (2000, 10)])
async def test_metadata_beyond_the_limit_end_the_call(confirms: bool, count: int, size: int) -> None:
    """gRPC's own limit holds for peers that have confirmed the settings; ours for the others too."""
    counts = ListenerCounts()
    async with serve(CallLimits(counts=counts), times={"grpc.http2.settings_timeout": 60_000}) as (servicer, address):
        hostile, before = await Hostile.connect(address, answers=confirms), resident()
        await hostile.settings.wait()
        head = call_headers(GENERATE, *[(f"x-{index}", "v" * size) for index in range(count)])
        for stream in range(1, 60, 2):
            send_headers(hostile, stream, head)
            hostile.send(frame(DATA, b"\0\0\0\0\0", stream=stream))
            await hostile.writer.drain()
        await hostile.until(lambda: len(answered(hostile)) >= 30 or hostile.closed.is_set())
        assert await is_served(address)
        assert servicer.num_generate == 0
        assert resident() - before < 100 * MB
        if not confirms and count > 1:  # else gRPC has refused them
            assert counts.refused["metadata_size"] == 30
        await hostile.close()


def answered(hostile: Hostile) -> set[int]:
    """The streams that have got headers, which are the status here."""
    return {stream for stream, _ in hostile.of_kind(HEADERS)}


def send_headers(hostile: Hostile, stream: int, head: bytes) -> None:
    parts = [head[start : start + MAX_FRAME] for start in range(0, len(head), MAX_FRAME)]
    for index, part in enumerate(parts):
        flags = END_HEADERS if index == len(parts) - 1 else 0
        hostile.send(frame(HEADERS if index == 0 else CONTINUATION, part, flags=flags, stream=stream))


async def test_metadata_of_a_usual_size_are_taken() -> None:
    async with serve() as (_, address), aio_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        usual = (("authorization", "Bearer " + "x" * 200), ("traceparent", "0" * 55), ("x-large", "v" * 12_000))
        assert (await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=usual)).model == "m"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=(("x-large", "v" * MAX_METADATA_BYTES),))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_headers_without_an_end_take_no_memory() -> None:
    async with serve() as (_, address):
        hostile, before = await Hostile.connect(address), resident()
        await hostile.settings.wait()
        hostile.send(frame(HEADERS, call_headers(GENERATE), stream=1))
        for _ in range(4000):  # 64 MB
            hostile.send(frame(CONTINUATION, b"\x00\x01a\x7f\xf9\x7e" + b"v" * 16_248, stream=1))
            if hostile.closed.is_set():
                break
            await hostile.drain()
        assert await is_served(address)
        assert resident() - before < 30 * MB
        await hostile.close()


async def test_half_messages_end_their_calls() -> None:
    """The message of a call must arrive in time; beyond 64 unfinished ones the oldest have a second."""
    counts = ListenerCounts()
    limits = CallLimits(message_timeout_s=1.0, max_streams_per_peer=4, counts=counts)
    async with serve(limits) as (servicer, address):
        hostile = await Hostile.connect(address)
        for index in range(100):
            begin_message(hostile, 2 * index + 1, GENERATE)
        for _ in range(30):
            for stream in range(1, 200, 2):
                await hostile.send_data(stream, b"x" * MAX_FRAME)
        await hostile.until(lambda: len(answered(hostile)) >= 100)
        assert not limits._unfinished._waiting
        assert counts.refused["late_message"] > 90, "gRPC may end one by itself"
        assert b"the request did not arrive in time" in b"".join(each for _, each in hostile.of_kind(HEADERS))
        assert await is_served(address)
        assert servicer.num_generate == 0
        await hostile.close()


async def test_streams_of_messages_of_one_peer_are_limited() -> None:
    counts = ListenerCounts()
    limits = CallLimits(max_streams_per_peer=4, counts=counts)
    async with serve(limits) as (_, address), aio_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        sessions = [stub.Session() for _ in range(4)]
        for session in sessions:
            await session.write(pb.SessionRequest())
        refused = stub.Session()
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert counts.refused == {"streams_of_peer": 1}
        await sessions[0].done_writing()
        assert await sessions[0].read() is grpc.aio.EOF
        another = stub.Session()
        await another.done_writing()
        assert await another.code() is grpc.StatusCode.OK
        for session in sessions[1:]:
            session.cancel()


async def test_calls_of_one_peer_are_limited() -> None:
    counts = ListenerCounts()
    async with (
        serve(CallLimits(max_calls_per_peer=4, counts=counts)) as (_, address),
        aio_channel(address) as channel,
        aio_channel(address) as another,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        calls = [stub.Generate(pb.GenerateRequest(request_id=str(index))) for index in range(4)]
        for call in calls:
            await call.read()
        refused = generation_pb2_grpc.GenerationServiceStub(another).Generate(pb.GenerateRequest())
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "has 4 calls, which is the limit" in await refused.details()
        assert counts.refused == {"calls_of_peer": 1}
        for call in calls:
            call.cancel()
        async with asyncio.timeout(10):
            while not await is_counted_out(address):
                pass


async def is_counted_out(address: str) -> bool:
    """Whether a call is taken again."""
    try:
        return await is_served(address)
    except grpc.aio.AioRpcError:
        return False


async def test_the_oldest_unfinished_messages_end_first() -> None:
    class Context:
        def peer(self):
            return "ipv4:127.0.0.1:1"

        async def abort(self, code, message):
            raise ConnectionAbortedError(code)

    async def never():
        await asyncio.Event().wait()
        yield b""

    unfinished = UnfinishedMessages(60.0, 3)
    calls = [asyncio.ensure_future(unfinished.first(never(), Context())) for _ in range(5)]
    done, _ = await asyncio.wait(calls[:2], timeout=10)
    assert {each.exception().args for each in done} == {(grpc.StatusCode.DEADLINE_EXCEEDED,)}
    assert len(done) == 2
    assert not any(each.done() for each in calls[2:])
    for each in calls[2:]:
        each.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def begin_message(hostile: Hostile, stream: int, method: str) -> None:
    """Begin a call, and promise a message of 2 MiB."""
    hostile.begin(stream, method)
    hostile.send(frame(DATA, b"\0" + struct.pack(">I", 2 * MB), stream=stream))
