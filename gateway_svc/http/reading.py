"""Reads a request: its API key, and its body as a JSON object.

Bodies that come compressed (https://www.rfc-editor.org/rfc/rfc9110#section-8.4.1).

They are decoded here and not by aiohttp, whose parser ends the connection over an encoding that it does not know: no
handler could answer in the shape of its API.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from gateway_svc.http.bodies.apart import SHORT_BYTES, LongBodies, is_cheap
from gateway_svc.http.bodies.parsing import read_object
from gateway_svc.http.errors import ENCODINGS, ApiError, bad_request, too_large

T = TypeVar("T")

ANSWER_HEADERS = web.RequestKey("answer_headers", dict[str, str])
"""Of a request: what every answer to it has in its head."""
PAYER = web.RequestKey("payer", str)
"""Of a request: whose share its body takes."""
LONG_BODIES = web.AppKey("long_bodies", LongBodies)
_BODY_TIMEOUT_S = 60.0
_SILENCE_S = 10.0
_GZIP = 16 + zlib.MAX_WBITS
_MAX_SHOWN_CODING = 40
_UNCODED = ("", "identity")


def api_key(request: web.Request) -> str | None:
    """The key of a request: of Authorization, as OpenAI's clients send it, or x-api-key, as Anthropic's do."""
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key", "").strip() or None


async def read_body(request: web.Request, read: Callable[[Mapping[str, Any]], T]) -> T:
    """What `read` makes of the body, for a long one in another process: a function of a module, by its name.

    Raises ApiError, also for a body that is no JSON object.
    """
    bodies, limit_bytes = request.app[LONG_BODIES], request.client_max_size
    who = request.get(PAYER, request.remote or "")
    encoding, length = request.headers.get("Content-Encoding", ""), request.content_length
    if length is not None and length > limit_bytes:
        raise too_large(limit_bytes)
    most = limit_bytes if length is None or encoding else length
    async with contextlib.nullcontext() if most <= SHORT_BYTES else bodies.room.taken(who, most):
        raw: bytes | bytearray = await _received(request, limit_bytes)
        if encoding:
            raw = await asyncio.to_thread(decoded, raw, encoding, limit_bytes)
        if is_cheap(raw):
            return read_object(read, raw)
        return await bodies.read(who, partial(read_object, read), raw)


async def _received(request: web.Request, limit_bytes: int) -> bytearray:
    """The body as it comes, kept by nobody else; raises ApiError for one that is too large, or too slow."""
    body, loop = bytearray(), asyncio.get_running_loop()
    end = loop.time() + _BODY_TIMEOUT_S
    try:
        async with asyncio.timeout_at(min(end, loop.time() + _SILENCE_S)) as timer:
            while part := await request.content.readany():
                body += part
                if len(body) > limit_bytes:
                    raise too_large(limit_bytes)
                timer.reschedule(min(end, loop.time() + _SILENCE_S))
    except TimeoutError:
        limits = f"{_SILENCE_S:g} s without a byte of it, or {_BODY_TIMEOUT_S:g} s in all"
        raise ApiError(408, f"the body did not arrive in time: {limits}") from None
    except RequestPayloadError:
        raise bad_request("the body is cut, or its chunks are wrong") from None
    return body


def decoded(body: bytes | bytearray, encoding: str, limit_bytes: int) -> bytes | bytearray:
    """Undo a body's Content-Encoding; raises ApiError, also if the decoded body is over the limit."""
    encoding = encoding.strip().lower()
    if encoding in _UNCODED:
        return body
    if encoding.removeprefix("x-") not in ENCODINGS:
        message = f"Content-Encoding {encoding[:_MAX_SHOWN_CODING]!a} is not supported: {' and '.join(ENCODINGS)} are"
        raise ApiError(415, message)
    decoder = zlib.decompressobj(_GZIP if encoding.endswith("gzip") else _bits_of_deflate(body))
    try:
        found = decoder.decompress(body, limit_bytes + 1)
    except zlib.error:
        found = b""
    if len(found) > limit_bytes:
        raise too_large(limit_bytes)
    if not decoder.eof or decoder.unused_data:
        raise bad_request(f"the body cannot be decoded: its Content-Encoding is said to be {encoding!a}")
    return found


def _bits_of_deflate(body: bytes | bytearray) -> int:
    """zlib's format, as the standard has it, or the bare stream that some clients send; their first bytes differ."""
    return zlib.MAX_WBITS if body[:1] and body[0] & 0x0F == 8 else -zlib.MAX_WBITS
