"""Lets handlers of Cadenza's streams send responses that they have serialized themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

_PREFIX = "/cadenza.v1.GenerationService/"
_Handler = Any  # grpc.RpcMethodHandler, which has no useful type


class PreparedResponses(grpc.aio.ServerInterceptor):
    """Replaces the response serializers of streams by one that leaves bytes as they are."""

    def __init__(self) -> None:
        self._prepared: dict[str, _Handler] = {}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        """The method's handler, cached."""
        handler = self._prepared.get(details.method)
        if handler is None:
            handler = await continuation(details)
            if handler is None or not details.method.startswith(_PREFIX) or not handler.response_streaming:
                return handler
            handler = self._prepared[details.method] = handler._replace(response_serializer=_as_bytes)
        return handler


def _as_bytes(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
