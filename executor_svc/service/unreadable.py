"""Rejects messages that cannot be parsed with INVALID_ARGUMENT; gRPC would end the call with UNKNOWN and log a stack.

A plan stream reads its messages itself, and ends in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

_Handler = Any  # grpc.RpcMethodHandler, which has no useful type


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Replaces a message that could not be parsed."""

    reason: str


class UnreadableMessages(grpc.aio.ServerInterceptor):
    """Replaces the deserializers of all calls with one message."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        """The method's handler with a tolerant deserializer."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        changes = {
            "request_deserializer": functools.partial(_read, handler.request_deserializer),
            kind: functools.partial(_refuse_unreadable, getattr(handler, kind)),
        }
        return handler._replace(**changes)


def _read(deserializer: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return deserializer(raw)
    except DecodeError as exc:
        return _Unreadable(str(exc))


async def _refuse_unreadable(behaviour: Callable[[Any, Any], Awaitable[Any]], request: Any, context: Any) -> Any:
    if isinstance(request, _Unreadable):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message cannot be read: {request.reason}")
    return await behaviour(request, context)
