"""Reads a request: its API key, and its body as a JSON object."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from gateway_svc.http.decoding import decoded
from gateway_svc.http.errors import ApiError, bad_request
from gateway_svc.off_loop import off_loop as of_size

P = ParamSpec("P")
T = TypeVar("T")

ANSWER_HEADERS = web.RequestKey("answer_headers", dict[str, str])
"""Of a request: what every answer to it has in its head."""
_NUM_BYTES = web.RequestKey("num_bytes", int)
"""Of a request whose body has been read: its length, decoded."""
_BODY_TIMEOUT_S = 60.0


def api_key(request: web.Request) -> str | None:
    """The key of a request: of Authorization, as OpenAI's clients send it, or x-api-key, as Anthropic's do."""
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key", "").strip() or None


async def read_object(request: web.Request) -> dict[str, Any]:
    """The body; raises ApiError for one that is no JSON object, and HTTPRequestEntityTooLarge."""
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
    request[_NUM_BYTES] = len(raw)
    value = await off_loop(request, _parse, raw)
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return value


async def off_loop(request: web.Request, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return what `work` makes of a request whose body has been read: in a thread for a long one."""
    return await of_size(request[_NUM_BYTES], work, *arguments, **named)


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
