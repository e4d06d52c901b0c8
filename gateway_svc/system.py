"""GET /health, /version and /metrics, and the path that is refused by name."""

from __future__ import annotations

import asyncio

from aiohttp import web

from cadenza import __version__
from cadenza.errors import CadenzaError
from gateway_svc.http.errors import ApiError
from gateway_svc.http.reading import api_key
from gateway_svc.metrics import metrics_text
from gateway_svc.state import STATE

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_RETRY_S = 1.0
_METRICS_TIMEOUT_S = 2.0


async def health(request: web.Request) -> web.Response:
    """200 while requests are served; 503 with the reason while the scheduler does not serve, or the gateway stops."""
    state = request.app[STATE]
    if state.is_stopping:
        raise ApiError(503, "the gateway is stopping", code="unavailable", retry_after_s=_RETRY_S)
    if not state.link.is_serving:
        raise ApiError(503, await state.link.why_unserved(), code="unavailable", retry_after_s=_RETRY_S)
    return web.Response()


async def version(request: web.Request) -> web.Response:
    """Cadenza's version."""
    return web.json_response({"version": __version__})


async def metrics(request: web.Request) -> web.Response:
    """The gateway's metrics, and the scheduler's below them if the gateway may read those.

    A gateway with a token of its own shows the scheduler's metrics, which name the model's path, only to callers with
    a key of the gateway: its own, which name neither models nor tenants, are for all.
    """
    state, key = request.app[STATE], api_key(request)
    if state.keys is not None:
        state.keys.check(key)
    is_known = state.keys is not None or (state.admin_keys is not None and state.admin_keys.holds(key))
    own = await asyncio.to_thread(metrics_text, state.counts.copy(), state.link.num_requests, state.link.is_serving)
    if state.config.http_token_file is not None and not is_known:
        return web.Response(body=own, headers={"Content-Type": _TEXT})
    try:
        async with asyncio.timeout(_METRICS_TIMEOUT_S):
            theirs = await state.link.own.metrics()
    except (CadenzaError, TimeoutError):
        theirs = b""
    return web.Response(body=own + theirs, headers={"Content-Type": _TEXT})


async def embeddings(request: web.Request) -> web.Response:
    """Refused: the served models generate."""
    await request.app[STATE].caller(request)
    raise ApiError(400, "there are no embeddings: the served model generates text", param="model", code="unsupported")
