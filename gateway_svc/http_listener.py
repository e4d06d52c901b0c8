"""The listener of HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from cadenza.errors import OptionError
from cadenza_common.wire.transport import format_address
from gateway_svc.app import make_app
from gateway_svc.config import GatewayConfig
from gateway_svc.http.connections import HEAD_S, Connection, Connections
from gateway_svc.state import State

_BACKLOG = 1024
_MAX_HEADER_BYTES = 16 * 1024
_KEEPALIVE_S = 75.0
_SEND_BUFFER_BYTES = 128 * 1024
"""What the system holds for a client that reads slowly; by itself it takes megabytes for each."""
_GRACE_S = 1.0
_OF_CLIENTS = (HttpProcessingError, RequestPayloadError, ConnectionError)


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether an error is not just a client's: it sent what is no HTTP, and gets 400, or has gone."""
    return record.exc_info is None or not isinstance(record.exc_info[1], _OF_CLIENTS)


_LOG = logging.getLogger(__name__)
_LOG.addFilter(_is_ours)
_OPTIONS: Mapping[str, Any] = {
    "access_log": None,
    "logger": _LOG,
    "keepalive_timeout": _KEEPALIVE_S,
    "max_line_size": _MAX_HEADER_BYTES,
    "max_field_size": _MAX_HEADER_BYTES,
    "auto_decompress": False,  # http/reading.py
}
"""Of each connection."""


class HttpListener:
    """Serves the paths of the application until `close`."""

    def __init__(self, state: State) -> None:
        """Raises OptionError for files of TLS."""
        self._tls = tls_of(state.config)
        self._runner = web.AppRunner(
            make_app(state),
            handler_cancellation=True,  # a client that goes away ends its request
            access_log=None,
            shutdown_timeout=_GRACE_S,
        )
        self.connections = Connections(state.config.max_connections_per_peer)
        self._server: asyncio.Server | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths, as they were added."""
        return tuple(sorted(each.canonical for each in self._runner.app.router.resources()))

    async def start(self, place: tuple[str, int]) -> str:
        """Listen; returns the address. Raises OSError."""
        await self._runner.setup()
        host, port = place
        try:
            listener = _listen(host, port)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OSError(f"cannot listen on {format_address(host, port)}: {reason}") from None
        self._server = await asyncio.get_running_loop().create_server(
            self._connection,
            sock=listener,
            backlog=_BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else HEAD_S,
        )
        return format_address(host, int(listener.getsockname()[1]))

    async def refuse(self) -> None:
        """Take no new connections."""
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """End what runs."""
        await self.refuse()
        await self._runner.cleanup()

    def _connection(self) -> Connection:
        assert self._runner.server is not None
        return Connection(self.connections, self._runner.server, **_OPTIONS)


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
