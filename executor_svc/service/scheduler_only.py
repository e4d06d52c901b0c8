"""Lets the scheduler alone use an executor whose clients show certificates; others may check its health."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from cadenza_common.metrics.listener_counts import ListenerCounts, RefusalReason

_OURS = "/cadenza.v1."
_NAMES = ("x509_subject_alternative_name", "x509_common_name")
_Handler = Any  # grpc.RpcMethodHandler, which has no useful type
_Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerOnly(grpc.aio.ServerInterceptor):
    """Ends calls of Cadenza's services with PERMISSION_DENIED unless the certificate has the scheduler's name.

    TLS has checked already that a CA of --tls-client-ca has signed it.
    """

    def __init__(self, name: str, counts: ListenerCounts) -> None:
        """counts: gets the calls that are refused."""
        self._name = name
        self._counts = counts

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        """The method's handler, which checks the name first."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_OURS):
            return handler
        kind = f"{_number(handler.request_streaming)}_{_number(handler.response_streaming)}"
        return handler._replace(**{kind: functools.partial(self._call, getattr(handler, kind))})

    async def _call(self, behaviour: Callable[[Any, Any], Awaitable[Any]], request: Any, context: _Context) -> Any:
        names = names_of(context)
        if self._name not in names:
            self._counts.refuse(RefusalReason.WRONG_CERTIFICATE, context)
            shown = ", ".join(names) or "none"
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"only a certificate of {self._name} (--tls-scheduler-name) may use this executor, not that of {shown}",
            )
        return await behaviour(request, context)


def names_of(context: _Context) -> list[str]:
    """The names in the client's certificate: the subject's alternative names, and its common name."""
    properties = context.auth_context()
    names = [bytes(each).decode("utf-8", "replace") for name in _NAMES for each in properties.get(name, ())]
    return list(dict.fromkeys(names))


def _number(streaming: bool) -> str:
    return "stream" if streaming else "unary"
