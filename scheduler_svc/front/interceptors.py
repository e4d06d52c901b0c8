"""What stands before the handlers of calls: the check of tokens, and responses that handlers have serialized.

Calls without a valid token are refused before their messages are read. Health and reflection need none. Of our services
every call needs one if there is a tenants file, and those of AdminService one of a tenant with admin, or with
may_load_adapters for calls about adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from cadenza_common.metrics.listener_counts import ListenerCounts
from scheduler_svc.front.front import abort_with
from scheduler_svc.tenants.errors import AdminNeededError, InvalidTokenError
from scheduler_svc.tenants.registry import Registry

_OURS = "/cadenza.v1."
_ADMIN = _OURS + "AdminService/"
_OF_LOADERS = tuple(f"{_ADMIN}{name}" for name in ("LoadAdapter", "UnloadAdapter", "ListAdapters"))
_Handler = Any  # grpc.RpcMethodHandler, which has no useful type
_OF_GENERATION = "/cadenza.v1.GenerationService/"


class TokenGate(grpc.aio.ServerInterceptor):
    """The first interceptor: a refused call is not parsed. Those after it keep handlers by method, for all callers."""

    def __init__(self, registry: Registry, counts: ListenerCounts) -> None:
        """counts: gets the calls that are refused."""
        self._registry = registry
        self._counts = counts

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        """The method's handler, or one that refuses the call."""
        if not self._registry.is_open and details.method.startswith(_OURS):
            try:
                caller = self._registry.caller(details.invocation_metadata)
                if details.method in _OF_LOADERS:
                    caller.check_loader()
                elif details.method.startswith(_ADMIN):
                    caller.check_admin()
            except (InvalidTokenError, AdminNeededError) as exc:
                # Serves methods of every kind: it reads no message and sends none.
                return grpc.stream_stream_rpc_method_handler(functools.partial(self._refuse, exc))
        return await continuation(details)

    async def _refuse(
        self, exc: InvalidTokenError | AdminNeededError, _requests: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        self._counts.refuse(exc.refusal, context)
        await abort_with(context, exc)


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
            if handler is None or not details.method.startswith(_OF_GENERATION) or not handler.response_streaming:
                return handler
            handler = self._prepared[details.method] = handler._replace(response_serializer=_as_bytes)
        return handler


def _as_bytes(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
