"""What the relay does to bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field

import pytest

from tests.helpers.machine.relay import Relay, relay


@dataclass
class Target:
    """A server that keeps what it gets, and the relay before it."""

    relay: Relay
    received: bytearray
    closed: asyncio.Event
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect through the relay; the connection stands on both sides when this returns."""
        host, _, port = self.relay.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self.writers.append(writer)
        async with asyncio.timeout(5):
            while not self.relay.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return reader, writer

    async def has(self, content: bytes) -> None:
        """Return once the server has exactly this; 5 s at most."""
        async with asyncio.timeout(5):
            while bytes(self.received) != content:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def ended(reader: asyncio.StreamReader) -> None:
    """Return once a client's connection has ended without a byte."""
    try:
        assert await reader.read(1) == b""
    except ConnectionError:
        return


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    received, closed, left = bytearray(), asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1000):
                received.extend(data)
        except ConnectionError:
            pass
        closed.set()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        left.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with relay(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as it:
        found = Target(it, received, closed)
        yield found
        for each in found.writers:
            each.close()
    async with asyncio.timeout(5):
        await left.wait()
    server.close()


async def test_half_of_a_chunk_arrives_and_its_connection_is_cut(target: Target) -> None:
    reader, writer = await target.connect()
    target.relay.num_to_halve = 1
    writer.write(b"abcdef")
    await ended(reader)
    assert b"abc".startswith(bytes(target.received))
    assert target.relay.num_to_halve == 0


async def test_a_chunk_arrives_twice(target: Target) -> None:
    _, writer = await target.connect()
    target.relay.num_to_repeat = 1
    writer.write(b"abc")
    await target.has(b"abcabc")
    writer.write(b"d")
    await target.has(b"abcabcd")


async def test_what_a_stall_holds_arrives_later(target: Target) -> None:
    _, writer = await target.connect()
    target.relay.flows.clear()
    writer.write(b"abc")
    await asyncio.sleep(0.05)
    assert not target.received
    target.relay.flows.set()
    await target.has(b"abc")


async def test_a_server_learns_nothing_of_a_client_that_is_cut_off(target: Target) -> None:
    reader, _ = await target.connect()
    (connection,) = target.relay.connections
    connection.cut_client()
    await ended(reader)
    await asyncio.sleep(0.05)
    assert not target.closed.is_set()


async def test_a_client_learns_late_that_the_server_has_closed(target: Target) -> None:
    reader, _ = await target.connect()
    target.relay.slow_close_s = 0.2
    began = asyncio.get_running_loop().time()
    learned: list[str] = []

    async def learn(who: str, what: Awaitable[object]) -> None:
        assert await what in (True, b"")
        learned.append(who)

    target.relay.cut_servers()
    await asyncio.gather(learn("server", target.closed.wait()), learn("client", reader.read(1)))
    assert learned == ["server", "client"]
    assert asyncio.get_running_loop().time() - began > 0.19


async def test_bytes_take_the_time_of_a_slow_network(target: Target) -> None:
    _, writer = await target.connect()
    target.relay.bytes_per_s = 5000.0
    began = asyncio.get_running_loop().time()
    writer.write(b"a" * 1000)
    await target.has(b"a" * 1000)
    assert asyncio.get_running_loop().time() - began > 0.19
