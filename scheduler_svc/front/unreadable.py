"""Rejects messages that cannot be parsed, or are too long to be, with INVALID_ARGUMENT, each one separately.

gRPC would end the call with UNKNOWN, including a whole Session. Here the handler gets an `Unreadable` in place of the
message: calls with one request end with its error; a session reports the error and continues.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from cadenza.v1 import generation_pb2 as pb
from scheduler_svc.convert.errors import UnreadableMessageError
from scheduler_svc.convert.limits import check_size
from scheduler_svc.convert.wire import path_of_bad_string, string_at
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.front.front import abort_with

_OURS = ("/cadenza.v1.", "/grpc.health.v1.")
_Handler = Any  # grpc.RpcMethodHandler, which has no useful type


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Replaces a message that could not be parsed."""

    error: RequestRejectedError | UnreadableMessageError
    request_id: str = ""
    """Request id of a SessionRequest that would start a request, if it can be read."""


class UnreadableMessages(grpc.aio.ServerInterceptor):
    """Replaces the request deserializers of Cadenza's services and of health; reflection is unchanged."""

    def __init__(self) -> None:
        self._tolerant: dict[str, _Handler] = {}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        """The method's handler with a tolerant deserializer, cached."""
        handler = self._tolerant.get(details.method)
        if handler is None:
            handler = await continuation(details)
            if handler is None or not details.method.startswith(_OURS):
                return handler
            handler = self._tolerant[details.method] = _tolerant(handler)
        return handler


def _tolerant(handler: _Handler) -> _Handler:
    deserializer = handler.request_deserializer  # the class method FromString
    changes: dict[str, Any] = {"request_deserializer": functools.partial(_read, deserializer.__self__, deserializer)}
    for kind in ("unary_unary", "unary_stream"):
        behaviour = getattr(handler, kind)
        if behaviour is not None:
            changes[kind] = functools.partial(_refuse_unreadable, behaviour)
    return handler._replace(**changes)


def _read(message: type[Message], deserializer: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        check_size(raw, message)
        return deserializer(raw)
    except RequestRejectedError as exc:
        return Unreadable(exc, _request_id(raw, message))
    except DecodeError as exc:
        return _unreadable(raw, message, str(exc))


def _unreadable(raw: bytes, message: type[Message], reason: str) -> Unreadable:
    path = path_of_bad_string(raw, message)
    if message is pb.SessionRequest:
        path = path.removeprefix("generate.").removeprefix("abort.")  # as everywhere in a session
    error = RequestRejectedError(path, "is not UTF-8") if path else UnreadableMessageError(reason)
    return Unreadable(error, _request_id(raw, message))


def _request_id(raw: bytes, message: type[Message]) -> str:
    """The id of the request that a message of a session would start; empty if it cannot be read."""
    if message is not pb.SessionRequest:
        return ""
    return string_at(raw, pb.SessionRequest.GENERATE_FIELD_NUMBER, pb.GenerateRequest.REQUEST_ID_FIELD_NUMBER)


async def _refuse_unreadable(behaviour: Callable[[Any, Any], Awaitable[Any]], request: Any, context: Any) -> Any:
    if isinstance(request, Unreadable):
        await abort_with(context, request.error)
    return await behaviour(request, context)
