"""A gRPC listener of the gateway: one dialect at one address, with grpc.health and reflection beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cadenza.errors import OptionError
from cadenza_common.metrics.listener_counts import ListenerCounts
from cadenza_common.serving.call_limits import CallLimits
from cadenza_common.serving.connection_limits import start_peer_limit
from cadenza_common.serving.health_servicer import HealthServicer
from cadenza_common.wire.tls.files import PemFile, TlsError
from cadenza_common.wire.tls_server import ListenerFiles
from cadenza_common.wire.transport import bind, format_address, server_options
from gateway_svc.config import GatewayConfig

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Of a client: a prompt may have 1.5 MB at the scheduler, and what other dialects write it in is somewhat longer."""
_GRACE_S = 1.0


class RpcListener:
    """Listens until `stop`."""

    def __init__(self, service: str, add: Callable[[grpc.aio.Server], None]) -> None:
        """service: its full name; add: adds its servicer to a server."""
        self.health = HealthServicer([service])
        self._server = grpc.aio.server(
            interceptors=[CallLimits()], options=server_options(max_received_bytes=MAX_MESSAGE_BYTES)
        )
        self._peer_limit: asyncio.Task[None] | None = None
        add(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((service, health, reflection.SERVICE_NAME), self._server)

    async def start(
        self, place: tuple[str, int], credentials: grpc.ServerCredentials | None, max_connections_per_peer: int
    ) -> str:
        """Listen; returns the address. Raises OSError."""
        address = bind(self._server, format_address(*place), default_port=place[1], credentials=credentials)
        await self._server.start()
        self._peer_limit = start_peer_limit(address, max_connections_per_peer, ListenerCounts())
        return address

    async def stop(self) -> None:
        """End: calls that still run are cancelled after a moment."""
        self.health.stop()
        if self._peer_limit is not None:
            self._peer_limit.cancel()
        await self._server.stop(_GRACE_S)


def rpc_credentials(config: GatewayConfig) -> Any:
    """TLS of gRPC listeners, by the certificate of HTTPS; None: plain text. Raises OptionError."""
    if config.http_tls_cert is None or config.http_tls_key is None:
        return None
    try:
        pair = PemFile("--http-tls-cert", config.http_tls_cert), PemFile("--http-tls-key", config.http_tls_key)
        return ListenerFiles(*pair, None).credentials()
    except TlsError as error:
        raise OptionError(f"option {str(error).removeprefix('--')}") from None
