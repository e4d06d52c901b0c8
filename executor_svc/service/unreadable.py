"""Rejects messages that are too long, or cannot be parsed, with INVALID_ARGUMENT.

gRPC would parse a message of any length in one call, which holds the event loop, and would end a call whose message
cannot be parsed with UNKNOWN and log a stack. A plan stream reads its messages itself, and ends in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from cadenza.v1 import execution_pb2
from cadenza_common.metrics.listener_counts import ListenerCounts
from cadenza_common.serving.call_limits import CallLimits
from cadenza_common.wire.transport import (
    MAX_CONNECTIONS,
    MAX_EXECUTOR_STREAMS,
    MAX_PLAN_BYTES,
    MAX_SHORT_BYTES,
    STATUS_DETAILS_KEY,
    field_violation,
    make_status,
    server_options,
)
from executor_svc.service.scheduler_only import SchedulerOnly

_PLAN_STREAM = f"/{execution_pb2.DESCRIPTOR.services_by_name['ExecutionService'].full_name}/Execute"
_Handler = Any  # grpc.RpcMethodHandler, which has no useful type


def limited_server(
    scheduler_name: str | None = None,
    max_connections: int = MAX_CONNECTIONS,
    counts: ListenerCounts | None = None,
) -> grpc.aio.Server:
    """A server that checks the length of each message before it is parsed, and all that `CallLimits` limits.

    `scheduler_name`: that in the certificate of the only client that may do more than check the health; None: any may.
    `counts`: gets the calls that are refused.
    """
    counts = counts or ListenerCounts()
    interceptors: list[grpc.aio.ServerInterceptor] = [CallLimits(counts=counts)]
    if scheduler_name is not None:
        interceptors.append(SchedulerOnly(scheduler_name, counts))
    options = server_options(
        max_received_bytes=MAX_PLAN_BYTES, max_streams=MAX_EXECUTOR_STREAMS, max_connections=max_connections
    )
    return grpc.aio.server(interceptors=[*interceptors, _UnreadableMessages()], options=options)


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Replaces a message that was not parsed."""

    reason: str
    field: str = ""
    """`message` if the message is too long."""


class _UnreadableMessages(grpc.aio.ServerInterceptor):
    """Replaces the deserializers of all calls. The plan stream gets its messages as bytes."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        """The method's handler with another deserializer."""
        handler = await continuation(details)
        if handler is None:
            return handler
        if details.method == _PLAN_STREAM:
            return handler._replace(request_deserializer=None)
        if handler.request_streaming:  # reflection
            return handler._replace(request_deserializer=functools.partial(_read_short, handler.request_deserializer))
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        changes = {
            "request_deserializer": functools.partial(_read, handler.request_deserializer),
            kind: functools.partial(_refuse_unreadable, getattr(handler, kind)),
        }
        return handler._replace(**changes)


def _read(deserializer: Callable[[bytes], Any], raw: bytes) -> Any:
    if len(raw) > MAX_SHORT_BYTES:
        return _Unreadable(f"has {len(raw)} bytes; at most {MAX_SHORT_BYTES} are allowed", "message")
    try:
        return deserializer(raw)
    except DecodeError as exc:
        return _Unreadable(str(exc))


def _read_short(deserializer: Callable[[bytes], Any], raw: bytes) -> Any:
    """Parse a message of a stream; gRPC ends the stream with UNKNOWN if it is too long or cannot be parsed."""
    if len(raw) > MAX_SHORT_BYTES:
        raise DecodeError(f"the message has {len(raw)} bytes; at most {MAX_SHORT_BYTES} are allowed")
    return deserializer(raw)


async def _refuse_unreadable(behaviour: Callable[[Any, Any], Awaitable[Any]], request: Any, context: Any) -> Any:
    if isinstance(request, _Unreadable):
        await _abort(request, context)
    return await behaviour(request, context)


async def _abort(request: _Unreadable, context: Any) -> NoReturn:
    """End the call with the reason, and with the field if the message is too long."""
    code, message, details = grpc.StatusCode.INVALID_ARGUMENT, f"the message cannot be read: {request.reason}", []
    if request.field:
        message = f"{request.field}: {request.reason}"
        details.append(field_violation(request.field, request.reason))
    status = make_status(code, message, details)
    await context.abort(code, message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returned")
