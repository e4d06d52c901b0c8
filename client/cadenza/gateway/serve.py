"""The gateway process: listen, serve, finish what runs, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from cadenza.connection_limits import allow_connections
from cadenza.errors import OptionError
from cadenza.gateway.access import PageRights
from cadenza.gateway.app import make_app, make_state
from cadenza.gateway.config import HTTP_PORT, GatewayConfig
from cadenza.gateway.state import State
from cadenza.stop_signals import StopSignals
from cadenza.transport import format_address, parse_address

_LOG = logging.getLogger(__name__)
EXIT_OK, EXIT_FAILED, EXIT_OPTIONS = 0, 1, 2
_BACKLOG = 1024
_MAX_HEADER_BYTES = 16 * 1024
_KEEPALIVE_S = 75.0
_SEND_BUFFER_BYTES = 128 * 1024
"""What the system holds for a client that reads slowly; by itself it takes megabytes for each."""
_GRACE_S = 1.0


async def serve(config: GatewayConfig, fail: Callable[[str], None], page_rights: PageRights | None = None) -> int:
    """Serve until a signal; returns the exit code. page_rights: as whoever started this process gives them."""
    signals = StopSignals()
    signals.install()
    allow_connections(2 * config.http_max_requests, "twice --http-max-requests")  # as many again may be idle
    try:
        state = make_state(config, page_rights)
        tls = tls_of(config)
    except OptionError as error:
        fail(str(error))
        return EXIT_OPTIONS
    running = await start(state, tls, fail)
    if running is None:
        await state.link.close()
        return EXIT_FAILED
    runner, address = running
    sys.stdout.write(f"ready {address}\n")
    sys.stdout.flush()
    url = f"http{'s' if tls else ''}://{address}"
    _LOG.info("serving %s at %s", config.target, url)
    if config.page:
        shown = "#token=…" if config.page_token_file else f"#token={state.page_rights.token}"
        _LOG.info("the live page is %s/%s", url, shown)
    await signals.stop.wait()
    await _stop(runner, state, signals.at_once, config.drain_timeout_s)
    return EXIT_OK


async def start(
    state: State, tls: ssl.SSLContext | None, fail: Callable[[str], None]
) -> tuple[web.AppRunner, str] | None:
    """Listen; returns what runs and its address, or None after an error."""
    runner = web.AppRunner(
        make_app(state),
        handler_cancellation=True,  # a client that goes away ends its request
        access_log=None,
        keepalive_timeout=_KEEPALIVE_S,
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
        shutdown_timeout=_GRACE_S,
    )
    await runner.setup()
    host, port = parse_address(state.config.http, default_port=HTTP_PORT)
    try:
        listener = _listen(host, port)
    except OSError as error:
        fail(f"cannot listen on {format_address(host, port)}: {(error.strerror or str(error)).lower()}")
        await runner.cleanup()
        return None
    await web.SockSite(runner, listener, backlog=_BACKLOG, ssl_context=tls).start()
    return runner, format_address(host, int(listener.getsockname()[1]))


async def _stop(runner: web.AppRunner, state: State, at_once: asyncio.Event, drain_timeout_s: float) -> None:
    """Take no new requests, and go on with the others for so long, or until `at_once` is set."""
    state.is_stopping = True
    num_running = state.counts.num_running
    if num_running and not at_once.is_set():
        _LOG.info("draining: %d requests go on, for %g s at most", num_running, drain_timeout_s)
    for site in list(runner.sites):
        await site.stop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_timeout_s):
            await _first(at_once.wait(), _idle(state))
    _LOG.info("stopping")
    await runner.cleanup()


async def _idle(state: State) -> None:
    while state.counts.num_running:  # noqa: ASYNC110  # looked at once, at the end
        await asyncio.sleep(0.05)


async def _first(*waits: Awaitable[Any]) -> None:
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket; raises OSError. Two processes must not share a port unnoticed: no SO_REUSEPORT."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # accepted sockets have it too
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def tls_of(config: GatewayConfig) -> ssl.SSLContext | None:
    """HTTPS; None: plain text. Raises OptionError for files that cannot be used."""
    if (config.http_tls_cert is None) != (config.http_tls_key is None):
        raise OptionError("options http-tls-cert and http-tls-key need each other")
    if config.http_tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.http_tls_cert, config.http_tls_key)
    except (OSError, ssl.SSLError) as error:
        raise OptionError(f"option http-tls-cert: {config.http_tls_cert}: {error.strerror or error}") from None
    return context
