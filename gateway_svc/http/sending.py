"""Sends answers to clients that may read slowly, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from aiohttp import web

_PIECE_BYTES = 64 * 1024
"""A longer body is sent in pieces: each of them has the time limit to itself."""


class SlowReaderError(ConnectionError):
    """The client takes nothing of its answer."""


def has_taken_all(request: web.Request) -> bool:
    """Whether nothing of what was written waits for the client."""
    transport = request.transport
    return transport is not None and transport.get_write_buffer_size() == 0


async def taken(request: web.Request, writing: Awaitable[None], timeout_s: float) -> None:
    """Wait until the client has taken what is written; raises SlowReaderError, after which it is disconnected."""
    try:
        async with asyncio.timeout(timeout_s):
            await writing
    except TimeoutError:
        if (transport := request.transport) is not None:
            transport.abort()
        raise SlowReaderError(f"the client took nothing for {timeout_s:g} s") from None


async def send_whole(request: web.Request, response: web.Response, timeout_s: float) -> web.StreamResponse:
    """Send an answer that is known as a whole, and return what was sent; raises as `taken`."""
    body = response.body
    if not isinstance(body, bytes) or len(body) <= _PIECE_BYTES or request.method == "HEAD":
        await response.prepare(request)
        await taken(request, response.write_eof(), timeout_s)
        return response
    stream = web.StreamResponse(status=response.status, reason=response.reason, headers=response.headers)
    stream.content_length = len(body)
    await stream.prepare(request)
    view = memoryview(body)
    for start in range(0, len(body), _PIECE_BYTES):
        await taken(request, stream.write(view[start : start + _PIECE_BYTES]), timeout_s)
    await taken(request, stream.write_eof(), timeout_s)
    return stream
