"""Sends answers, whole and as events, to clients that may read slowly, or not at all.

Server-sent events as text (https://html.spec.whatwg.org/multipage/server-sent-events.html).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from gateway_svc.http.reading import ANSWER_HEADERS

_PIECE_BYTES = 64 * 1024
"""A longer body is sent in pieces: each of them has the time limit to itself."""
_SHORT_BYTES = 16 * 1024
"""Less than what a transport takes before it lets writers wait."""
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events
}
_NO_TEXT = "replace"
"""What a client repeats, such as metadata, may hold halves of surrogate pairs."""
DONE = b"data: [DONE]\n\n"
_encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
"""Clients that read events line by line take them for the ends of lines, as JavaScript and Python's splitlines do."""


def dumps(value: Any) -> str:
    """JSON in its shortest form, in one line for every reader."""
    text = _encode(value)
    return text if text.isascii() else _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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


class EventStream:
    """The response of one request. Headers go out with the first events, so that an early error has its own status."""

    def __init__(self, request: web.Request, timeout_s: float) -> None:
        """timeout_s: how long a client may take nothing."""
        self._request = request
        self._timeout_s = timeout_s
        self._response: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the status has been sent."""
        return self._response is not None

    async def write(self, events: bytes) -> None:
        """Write events; raises SlowReaderError, and ConnectionError for a client that has gone."""
        if not events:
            return
        response = self._response
        if response is None:
            response = web.StreamResponse(headers=_HEADERS)
            response.headers.update(self._request.get(ANSWER_HEADERS, {}))
            await response.prepare(self._request)
            self._response = response
        if len(events) <= _SHORT_BYTES and has_taken_all(self._request):
            await response.write(events)  # it does not wait
        else:
            await taken(self._request, response.write(events), self._timeout_s)

    async def end(self) -> web.StreamResponse:
        """End the response, and return it; raises as `write`."""
        assert self._response is not None
        await taken(self._request, self._response.write_eof(), self._timeout_s)
        return self._response


def data_event(value: Any) -> bytes:
    """An event of OpenAI's older APIs, which has data alone."""
    return f"data: {dumps(value)}\n\n".encode(errors=_NO_TEXT)


def named_event(value: dict[str, Any]) -> bytes:
    """An event with the name that its data have as type."""
    return f"event: {value['type']}\ndata: {dumps(value)}\n\n".encode(errors=_NO_TEXT)
