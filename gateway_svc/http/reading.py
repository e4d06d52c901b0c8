"""Reads a request: its API key, and its body as a JSON object.

Bodies that come compressed (https://www.rfc-editor.org/rfc/rfc9110#section-8.4.1).

They are decoded here and not by aiohttp, whose parser ends the connection over an encoding that it does not know: no
handler could answer in the shape of its API.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from gateway_svc.http.errors import ENCODINGS, ApiError, bad_request, too_large
from gateway_svc.off_loop import off_loop

T = TypeVar("T")

ANSWER_HEADERS = web.RequestKey("answer_headers", dict[str, str])
"""Of a request: what every answer to it has in its head."""
_BODY_TIMEOUT_S = 60.0
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
    """What `read` makes of the body, for a long one in a thread: nothing else sees the object itself.

    Raises ApiError, also for a body that is no JSON object, and HTTPRequestEntityTooLarge.
    """
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            raw = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from None
    except RequestPayloadError:
        raise bad_request("the body is cut, or its chunks are wrong") from None
    encoding, limit_bytes = request.headers.get("Content-Encoding", ""), request.client_max_size
    if encoding:
        raw = await asyncio.to_thread(decoded, raw, encoding, limit_bytes)
    return await off_loop(len(raw), lambda: read(_object(raw)))


def _object(raw: bytes) -> dict[str, Any]:
    value = _parse(raw)
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return value


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise bad_request("the body is no UTF-8") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except ValueError as error:  # as JSONDecodeError, and an integer of over 4,300 digits
        raise bad_request(f"the body is no JSON: {error}"[:300]) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def decoded(body: bytes, encoding: str, limit_bytes: int) -> bytes:
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


def _bits_of_deflate(body: bytes) -> int:
    """zlib's format, as the standard has it, or the bare stream that some clients send; their first bytes differ."""
    return zlib.MAX_WBITS if body[:1] and body[0] & 0x0F == 8 else -zlib.MAX_WBITS
