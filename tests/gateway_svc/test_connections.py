"""What one address may take of the HTTP listener: connections, and time for half a request."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gateway_svc.app import make_state
from gateway_svc.config import GatewayConfig
from gateway_svc.http_listener import HttpListener

REQUEST = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
async def listener():
    state = make_state(GatewayConfig(target="127.0.0.1:1", http="127.0.0.1:0", max_connections_per_peer=2))
    it = HttpListener(state)
    it.address = await it.start(("127.0.0.1", 0))
    yield it
    await it.close()
    await state.link.close()


async def opened(listener):
    host, port = listener.address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


async def answered(reader, writer):
    writer.write(REQUEST)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 ")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    await reader.readexactly(int(length.split(b":")[1]))


async def until_open(listener, count):
    async with asyncio.timeout(20):
        while listener.connections.num_open != count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_connections_of_one_address_beyond_the_limit_are_closed(listener):
    first, second = await opened(listener), await opened(listener)
    await answered(*first)
    await answered(*second)
    reader, writer = await opened(listener)
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == b""
    writer.close()
    assert listener.connections.num_open == 2
    first[1].close()
    await until_open(listener, 1)
    third = await opened(listener)
    await answered(*third)
    for _, each in (second, third):
        each.close()
    await until_open(listener, 0)


@pytest.mark.parametrize("sent", [b"", REQUEST[:20]])
async def test_half_a_request_is_closed_in_time(listener, sent):
    listener.connections.head_s = 0.1
    reader, writer = await opened(listener)
    writer.write(sent)
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


async def test_half_a_later_request_too_and_a_whole_one_is_answered(listener):
    listener.connections.head_s = 0.1
    reader, writer = await opened(listener)
    await answered(reader, writer)
    await asyncio.sleep(0.3)  # an idle connection is not half a request
    await answered(reader, writer)
    writer.write(REQUEST[:20])
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()
