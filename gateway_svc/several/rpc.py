"""Cadenza's own gRPC of several models: each call goes on, byte by byte, to the scheduler that its metadata name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from cadenza_common.metrics.listener_counts import ListenerCounts
from cadenza_common.serving.call_limits import CallLimits
from cadenza_common.serving.connection_limits import start_peer_limit
from cadenza_common.serving.health_servicer import HealthServicer
from cadenza_common.wire.limits import MODEL_METADATA
from cadenza_common.wire.transport import aio_channel, bind, format_address, server_options
from gateway_svc.http.errors import ApiError
from gateway_svc.rpc.listener import MAX_MESSAGE_BYTES
from gateway_svc.several.door import DoorState
from gateway_svc.several.plan import ListedModel

_GRACE_S = 1.0
_SESSION = "/Session"
_KEPT_BACK = (MODEL_METADATA, "authorization", "user-agent")
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


class ModelDoor(grpc.GenericRpcHandler):
    """Listens until `stop`. A call holds its model; a session does while requests run in it."""

    def __init__(self, state: DoorState) -> None:
        self._state = state
        self._health = HealthServicer([""])
        self._peer_limit: asyncio.Task[None] | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._server = grpc.aio.server(
            interceptors=[CallLimits()], options=server_options(max_received_bytes=MAX_MESSAGE_BYTES)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers((self,))

    async def start(self, place: tuple[str, int], credentials: grpc.ServerCredentials | None) -> str:
        """Listen; returns the address. Raises OSError."""
        address = bind(self._server, format_address(*place), default_port=place[1], credentials=credentials)
        await self._server.start()
        most = self._state.config.max_connections_per_peer
        self._peer_limit = start_peer_limit(address, most, ListenerCounts())
        self._health.set(True)
        return address

    async def stop(self) -> None:
        """End: calls that still run are cancelled after a moment."""
        self._health.stop()
        if self._peer_limit is not None:
            self._peer_limit.cancel()
        await self._server.stop(_GRACE_S)
        await asyncio.gather(*(each.close() for each in self._channels.values()))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """What serves a call; every one is a stream of messages each way to who does not look into it."""
        return grpc.stream_stream_rpc_method_handler(partial(self._call, handler_call_details.method))

    async def _call(self, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        roster = self._state.roster
        try:
            self._check_key(str(metadata.get("authorization", "")))
            model = roster.find(str(metadata.get(MODEL_METADATA, "")))
            await roster.take(model)
        except ApiError as error:
            message = error.message
            if error.status == 400:
                message = f"{message} (Client(target, model=NAME), --model-name NAME)"
            await context.abort(_CODES.get(error.status, grpc.StatusCode.UNKNOWN), message)
        try:
            if not method.endswith(_SESSION):
                await self._forward(model, method, requests, context)
                return
            model.num_sessions += 1
        finally:
            roster.give_back(model)
        try:
            await self._forward(model, method, requests, context)
        finally:
            model.num_sessions -= 1

    async def _forward(self, model: ListedModel, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        """Run a call at the scheduler of a model, with the caller's deadline."""
        own = [(key, value) for key, value in context.invocation_metadata() or () if key not in _KEPT_BACK]
        call: Any = self._channel(model).stream_stream(method)(metadata=own, timeout=context.time_remaining())
        sending = asyncio.create_task(_send(model, requests, call.write, call.done_writing), name="door-requests")
        try:
            async for message in call:
                await context.write(message)
            context.set_trailing_metadata(tuple(await call.trailing_metadata() or ()))
            code, details = await call.code(), await call.details() or ""
        except grpc.aio.AioRpcError as error:
            context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
            code, details = error.code(), error.details() or ""
        finally:
            sending.cancel()
            call.cancel()
        if code is not grpc.StatusCode.OK:
            await context.abort(code, details, tuple(context.trailing_metadata() or ()))

    def _check_key(self, authorization: str) -> None:
        if self._state.keys is not None:
            self._state.keys.check(authorization.partition(" ")[2].strip() or None)

    def _channel(self, model: ListedModel) -> grpc.aio.Channel:
        """The channel of a model's scheduler; that of a target that has gone is closed."""
        target = model.status.target
        for old in self._channels.keys() - {each.status.target for each in self._state.roster.models}:
            closing = asyncio.create_task(self._channels.pop(old).close(), name="door-channel-end")
            closing.add_done_callback(lambda _: None)
        if target not in self._channels:
            self._channels[target] = aio_channel(target)
        return self._channels[target]


async def _send(
    model: ListedModel, requests: AsyncIterator[bytes], write: Callable[[bytes], Any], done: Callable[[], Any]
) -> None:
    try:
        async for message in requests:
            model.used_at = time.monotonic()
            await write(message)
        await done()
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.UsageError):
        pass  # the call has ended, which its reader sees
