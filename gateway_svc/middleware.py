"""What holds for all paths: errors in the API's shape, keys, cross-origin calls, limits and counts."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from aiohttp import web

from cadenza.errors import CadenzaError
from gateway_svc.fields.tables import RENAMED
from gateway_svc.http.connections import Connection
from gateway_svc.http.errors import ApiError, anthropic_body, api_error, is_unknown_model, openai_body, too_large
from gateway_svc.http.reading import ANSWER_HEADERS
from gateway_svc.http.sending import SlowReaderError, send_whole
from gateway_svc.state import STATE, State

_LOG = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ANTHROPIC = "/v1/messages"
_MAX_ID = 128


@web.middleware
async def answers(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer every error in the shape of the request's API, and count the request."""
    state = request.app[STATE]
    began = time.perf_counter()
    state.counts.began()
    connection = request.protocol
    if isinstance(connection, Connection):
        connection.begins(request)
    given = request.headers.get("X-Request-ID", "")
    request_id = given if 0 < len(given) <= _MAX_ID and given.isprintable() and given.isascii() else uuid.uuid4().hex
    request[ANSWER_HEADERS] = {"X-Request-ID": request_id, **state.cors.headers(request)}
    if request.path.startswith(_ANTHROPIC):
        request[ANSWER_HEADERS]["request-id"] = request_id  # where Anthropic's clients look for it
    status = 499  # the client has gone
    try:
        response = await _answered(request, handler)
        if isinstance(response, web.Response):
            response = await send_whole(request, response, state.config.http_write_timeout_s)
        status = response.status
        return response
    except SlowReaderError:
        state.counts.num_slow_readers += 1
        raise
    finally:
        if isinstance(connection, Connection):
            connection.ends()
        path = _route_of(request)
        state.counts.ended(path, status, time.perf_counter() - began)
        # A probe asks every few seconds: the link to the scheduler says once that it is lost, and why.
        if status >= 500 and not (path == "/health" and status == 503):
            _LOG.warning("%s %s: %d", request.method, path, status, extra={"request_id": request_id})


async def _answered(request: web.Request, handler: _Handler) -> web.StreamResponse:
    state = request.app[STATE]
    try:
        await state.check_site(request)
        if request.method == "OPTIONS" and "Origin" in request.headers:  # else no browser's question
            response: web.StreamResponse = state.cors.preflight(request)
        else:
            response = await handler(request)
    except ApiError as error:
        response = error_response(request, error)
    except CadenzaError as error:
        params = {"adapter": "model", **RENAMED.get(request.path, {})}
        served = await _served_name(state, request) if is_unknown_model(error) else ""
        response = error_response(request, api_error(error, params, served))
    except web.HTTPRequestEntityTooLarge:
        response = error_response(request, too_large(state.config.max_body_bytes))
    except web.HTTPNotFound:
        response = _no_such_path(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = error_response(request, ApiError(405, f"{request.path[:200]} takes {allowed}"))
        response.headers["Allow"] = allowed
    except web.HTTPException as error:
        response = error_response(request, ApiError(error.status, error.reason))
    except (ConnectionError, SlowReaderError, asyncio.CancelledError):
        raise
    except Exception:
        _LOG.exception("%s %s failed", request.method, request.path)
        response = error_response(request, ApiError(500, "the gateway failed; its log has the reason"))
    if not response.prepared:
        response.headers.update(request[ANSWER_HEADERS])
    return response


async def _served_name(state: State, request: web.Request) -> str:
    """The served model's name; empty: it cannot be asked for now."""
    try:
        return state.names.of_model(await (await state.caller(request)).model())[0]
    except (ApiError, CadenzaError):
        return ""


def _no_such_path(request: web.Request) -> web.Response:
    """The error of an unknown path; one with slashes too many at its end is sent to the path without, as in vLLM."""
    given, known = request.path, {each.canonical for each in request.app.router.resources()}
    message = f"there is no {given[:200]}{_path_hint(given, known)}"
    response = error_response(request, ApiError(404, message, code="unknown_path"))
    if (meant := given.rstrip("/")) in known:
        query = request.rel_url.raw_query_string
        response.set_status(307)
        response.headers["Location"] = f"{meant}?{query}" if query else meant
    return response


def _path_hint(path: str, known: Collection[str]) -> str:
    """The end of a sentence about an unknown path: the one that it is with /v1 left out, or with more before it."""
    given = re.sub("/+", "/", path).rstrip("/").lower()
    near = [each for each in sorted(known) if given and (each.endswith(given) or given.endswith(each))]
    return f"; did you mean {' or '.join(near)}?" if near else "; /openapi.json has the paths that there are"


def error_response(request: web.Request, error: ApiError) -> web.Response:
    """An error as the API of the request's path has it."""
    body: dict[str, Any]
    if request.path.startswith(_ANTHROPIC):
        body = anthropic_body(error) | {"request_id": request[ANSWER_HEADERS]["X-Request-ID"]}
    else:
        body = openai_body(error)
    return web.json_response(body, status=error.status, headers=error.headers)


def _route_of(request: web.Request) -> str:
    """The path as it was added, so that no client can make counts of its own."""
    resource = request.match_info.route.resource
    return "other" if resource is None else resource.canonical
