"""What a forwarder passes on is what was sent: requests, answers, streams and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

pytest.importorskip("starlette", reason="Ray Serve is not installed: the extra ray-serve")

from starlette.requests import Request

from cadenza_launcher.ray_serve.forwarding import Forwarder

PIECES = 3


class Gateway:
    """Answers each path in its own way."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.has_ended = asyncio.Event()
        self.status = 200

    async def answer(self, request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/stream" | "/broken":
                return await self._stream(request)
            case "/small":
                return web.Response(status=413, text="too large")
            case "/health":
                return web.Response(status=self.status, text="" if self.status == 200 else "no executor")
        received = {
            "method": request.method,
            "path": request.raw_path,
            "headers": [[name.decode().lower(), value.decode("latin-1")] for name, value in request.raw_headers],
            "body": (await request.read()).decode(),
        }
        answer = web.json_response(received, status=418, headers={"Connection": "x-hop", "X-Hop": "1", "Via": "a"})
        answer.headers.add("Via", "b")
        return answer

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await answer.prepare(request)
            for index in range(PIECES):
                await answer.write(f"data: {index}\n\n".encode())
                if request.path == "/broken":
                    assert request.transport is not None
                    request.transport.abort()
                await self.go_on.wait()
                self.go_on.clear()
            return answer
        finally:
            self.has_ended.set()


@contextlib.asynccontextmanager
async def listening(gateway: Gateway) -> AsyncIterator[tuple[str, web.AppRunner]]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", gateway.answer)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"127.0.0.1:{runner.addresses[0][1]}", runner
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def proxy(forwarder: Forwarder) -> AsyncIterator[str]:
    """A server with the forwarder, as Serve's proxy and replica are together; yields its URL."""
    import uvicorn

    async def app(scope, receive, send) -> None:
        answer = await forwarder.answer(Request(scope, receive))
        await answer(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="critical", ws="none"))
    running = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(10):
            while not server.started:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
        await forwarder.close()


@contextlib.asynccontextmanager
async def forwarding() -> AsyncIterator[tuple[Gateway, str, aiohttp.ClientSession]]:
    gateway = Gateway()
    async with (
        listening(gateway) as (address, _),
        proxy(Forwarder(address)) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as client,
    ):
        yield gateway, url, client


async def test_a_request_and_its_answer_are_as_they_were_sent() -> None:
    async with forwarding() as (_, url, client):
        sent = [("X-Two", "1"), ("X-Two", "2"), ("Authorization", "Bearer k"), ("Host", "a.example"), ("TE", "gzip")]
        path = "/a%2Fb/%C3%A9?q=1&q=%20"
        target = aiohttp.client.URL(f"{url}{path}", encoded=True)
        async with client.put(target, data=b"body", headers=sent) as answer:
            received = await answer.json()
            assert answer.status == 418
            assert answer.headers.getall("Via") == ["a", "b"]
            assert "X-Hop" not in answer.headers
            assert len(answer.headers.getall("Date")) == len(answer.headers.getall("Server")) == 1
    assert (received["method"], received["path"], received["body"]) == ("PUT", path, "body")
    headers = received["headers"]
    assert [value for name, value in headers if name == "x-two"] == ["1", "2"]
    assert {"host": "a.example", "authorization": "Bearer k", "content-length": "4"}.items() <= dict(headers).items()
    assert not {"te", "transfer-encoding"} & dict(headers).keys()


async def test_nothing_is_added_to_a_bare_request() -> None:
    async with forwarding() as (_, url, _client):
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
    received = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert received["headers"] == [["host", "h"]]


async def test_a_body_of_unknown_length_is_passed_on() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    async with forwarding() as (_, url, client), client.post(f"{url}/any", data=body()) as answer:
        assert (await answer.json())["body"] == "one two"


async def test_an_answer_comes_before_the_body_is_read() -> None:
    async with forwarding() as (_, url, client), client.post(f"{url}/small", data=io.BytesIO(bytes(8 << 20))) as answer:
        assert (answer.status, await answer.text()) == (413, "too large")


async def test_a_stream_comes_piece_by_piece() -> None:
    async with forwarding() as (gateway, url, client), client.get(f"{url}/stream") as answer:
        for index in range(PIECES):
            assert await answer.content.readuntil(b"\n\n") == f"data: {index}\n\n".encode()
            gateway.go_on.set()
        assert await answer.content.read() == b""


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with forwarding() as (gateway, url, client):
        async with client.get(f"{url}/stream") as answer:
            await answer.content.readuntil(b"\n\n")
            assert not gateway.has_ended.is_set()
            answer.close()
        async with asyncio.timeout(10):
            await gateway.has_ended.wait()


async def test_a_body_that_breaks_off_does_not_look_whole() -> None:
    async with forwarding() as (_, url, client), client.get(f"{url}/broken") as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_a_gateway_that_is_away() -> None:
    gateway = Gateway()
    async with listening(gateway) as (address, runner), aiohttp.ClientSession() as client:
        forwarder = Forwarder(address)
        async with proxy(forwarder) as url:
            assert await forwarder.refusal() is None
            gateway.status = 503
            assert await forwarder.refusal() == "503: no executor"
            await runner.cleanup()
            with pytest.raises(aiohttp.ClientError):
                await forwarder.refusal()
            async with client.get(f"{url}/v1/models") as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert (await answer.json())["error"]["code"] == "unavailable"
