"""grpc.health.v1 with a Watch that works for several watchers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cadenza_common.wire.transport import HEALTH_REASON_KEY


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1; all service names share one state.

    Replaces grpc_health's own servicer, in which the first watcher that leaves stops the notifications of all others.
    """

    def __init__(self, names: list[str], reason: Callable[[], str] = str) -> None:
        """names: the services; the empty name, for the whole server, is added. reason: why it does not serve, for
        everybody to read: Check says it in its metadata. Empty: it does not say."""
        self._reason = reason
        self._names = frozenset(["", *names])
        self._serving = False
        self._stopped = False
        self._watchers: set[asyncio.Event] = set()

    def set(self, serving: bool) -> None:
        """Set whether calls are served."""
        self._serving = serving and not self._stopped
        for wake in self._watchers:
            wake.set()

    def stop(self) -> None:
        """Set NOT_SERVING permanently; watches send it and end."""
        self._stopped = True
        self.set(False)

    async def Check(self, request: Any, context: Any) -> Any:
        """The current state; NOT_FOUND for unknown names."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        if not self._serving and (reason := self._reason()):
            context.set_trailing_metadata(((HEALTH_REASON_KEY, reason.encode()),))
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> None:
        """The current state and each change; SERVICE_UNKNOWN for unknown names."""
        wake = asyncio.Event()
        self._watchers.add(wake)
        last = None
        try:
            while True:
                status = self._status(request.service)
                if status != last:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    last = status
                elif self._stopped:
                    return
                else:
                    await wake.wait()
                wake.clear()
        finally:
            self._watchers.discard(wake)

    def _status(self, name: str) -> Any:
        if name not in self._names:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        return health_pb2.HealthCheckResponse.SERVING if self._serving else health_pb2.HealthCheckResponse.NOT_SERVING
