"""Errors as google.rpc.Status: one table for all calls and sessions."""

from __future__ import annotations

import logging

import grpc
from google.rpc import status_pb2

from cadenza_common.telemetry.logs import without_messages
from cadenza_common.wire.transport import field_violation, make_status, retry_info
from scheduler_svc.core.errors import (
    DataLossError,
    DrainingError,
    ModelChangedError,
    PreconditionError,
    RequestExistsError,
    RequestRejectedError,
    UnknownAdapterError,
    UnknownRequestError,
    WaitingQueueFullError,
)
from scheduler_svc.engine.adapters.names import AdapterExistsError
from scheduler_svc.engine.fleet.executor_member import ExecutorExistsError, LastExecutorError, UnknownExecutorError
from scheduler_svc.engine.journal import JournalUnavailableError
from scheduler_svc.tenants.errors import (
    AdapterForbiddenError,
    AdminNeededError,
    InvalidTokenError,
    NamingForbiddenError,
)

_LOG = logging.getLogger(__name__)
_MAX_BYTES = 1000
"""Maximum size of a message: the trailers contain it three times, and clients accept 8 KiB of trailers."""
_RETRY_AFTER_S = 1.0
"""The hint while the service starts, drains or stops: another one, or its successor, may serve by then."""


class NotServingError(Exception):
    """The service cannot serve calls while it starts or stops; the message has the reason."""


class StreamReplacedError(Exception):
    """Another stream has been attached to the request."""


class AbortedEarlyError(Exception):
    """The request was aborted before it was submitted."""


class ForbiddenPathError(Exception):
    """A path is not below an allowed folder."""


class UnreadableMessageError(Exception):
    """The bytes cannot be parsed; the message is the parser's reason."""


_CODES: dict[type[Exception], grpc.StatusCode] = {
    RequestRejectedError: grpc.StatusCode.INVALID_ARGUMENT,
    PreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    UnreadableMessageError: grpc.StatusCode.INVALID_ARGUMENT,
    WaitingQueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RequestExistsError: grpc.StatusCode.ALREADY_EXISTS,
    DrainingError: grpc.StatusCode.UNAVAILABLE,
    NotServingError: grpc.StatusCode.UNAVAILABLE,
    UnknownRequestError: grpc.StatusCode.NOT_FOUND,
    DataLossError: grpc.StatusCode.DATA_LOSS,
    StreamReplacedError: grpc.StatusCode.ABORTED,
    AbortedEarlyError: grpc.StatusCode.CANCELLED,
    ModelChangedError: grpc.StatusCode.FAILED_PRECONDITION,
    JournalUnavailableError: grpc.StatusCode.UNAVAILABLE,
    UnknownAdapterError: grpc.StatusCode.NOT_FOUND,
    ForbiddenPathError: grpc.StatusCode.PERMISSION_DENIED,
    AdapterExistsError: grpc.StatusCode.ALREADY_EXISTS,
    UnknownExecutorError: grpc.StatusCode.NOT_FOUND,
    ExecutorExistsError: grpc.StatusCode.ALREADY_EXISTS,
    InvalidTokenError: grpc.StatusCode.UNAUTHENTICATED,
    AdminNeededError: grpc.StatusCode.PERMISSION_DENIED,
    AdapterForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    NamingForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    LastExecutorError: grpc.StatusCode.FAILED_PRECONDITION,
}


def code_of(exc: Exception) -> grpc.StatusCode:
    """The status code of an error; INTERNAL for unexpected ones."""
    return next((code for kind, code in _CODES.items() if isinstance(exc, kind)), grpc.StatusCode.INTERNAL)


def status_of(exc: Exception) -> status_pb2.Status:
    """The status of an error for the client; unexpected errors are logged and become INTERNAL."""
    code, message = code_of(exc), _truncate(str(exc))
    match exc:
        case RequestRejectedError() | PreconditionError() | UnknownAdapterError() | AdapterForbiddenError():
            return make_status(code, f"{exc.field}: {message}", [field_violation(exc.field, message)])
        case UnreadableMessageError():
            return make_status(code, f"the message cannot be read: {message}")
        case WaitingQueueFullError():
            return make_status(code, message, [retry_info(exc.retry_after_s)])
        case DrainingError() | NotServingError():
            return make_status(code, message, [retry_info(_RETRY_AFTER_S)])
    if code is grpc.StatusCode.INTERNAL:
        _LOG.error("a call failed; its client has the message, which may quote the request\n%s", without_messages(exc))
        message = f"{type(exc).__name__}: {message}"
    return make_status(code, message)


def _truncate(message: str) -> str:
    """Truncate a message, which may quote client input, to _MAX_BYTES."""
    encoded = message.encode(errors="replace")
    return message if len(encoded) <= _MAX_BYTES else encoded[:_MAX_BYTES].decode(errors="ignore") + "…"
