"""Errors as google.rpc.Status: one table for all calls and sessions."""

from __future__ import annotations

import logging

import grpc
from google.rpc import status_pb2

from cadenza.transport import field_violation, make_status, retry_info
from scheduler_svc.core.errors import (
    DrainingError,
    ModelChangedError,
    PreconditionError,
    QueueFullError,
    RequestExistsError,
    RequestRejectedError,
)

_LOG = logging.getLogger(__name__)
_MAX_BYTES = 1000
"""Maximum size of a message: the trailers contain it three times, and clients accept 8 KiB of trailers."""


class NotServingError(Exception):
    """The service cannot serve calls while it starts or stops; the message has the reason."""


class UnknownRequestError(Exception):
    """There is no request with this id."""


class AbortedEarlyError(Exception):
    """The request was aborted before it was submitted."""


class UnreadableMessageError(Exception):
    """The bytes cannot be parsed; the message is the parser's reason."""


def status_of(exc: Exception) -> status_pb2.Status:
    """The status of an error for the client; unexpected errors are logged and become INTERNAL."""
    code, message = grpc.StatusCode, _truncate(str(exc))
    match exc:
        case RequestRejectedError():
            status = make_status(
                code.INVALID_ARGUMENT, f"{exc.field}: {message}", [field_violation(exc.field, message)]
            )
        case PreconditionError():
            status = make_status(
                code.FAILED_PRECONDITION, f"{exc.field}: {message}", [field_violation(exc.field, message)]
            )
        case ModelChangedError():
            status = make_status(code.FAILED_PRECONDITION, message)
        case UnreadableMessageError():
            status = make_status(code.INVALID_ARGUMENT, f"the message cannot be read: {message}")
        case QueueFullError():
            status = make_status(code.RESOURCE_EXHAUSTED, message, [retry_info(exc.retry_after_s)])
        case RequestExistsError():
            status = make_status(code.ALREADY_EXISTS, message)
        case DrainingError() | NotServingError():
            status = make_status(code.UNAVAILABLE, message)
        case UnknownRequestError():
            status = make_status(code.NOT_FOUND, message)
        case AbortedEarlyError():
            status = make_status(code.CANCELLED, message)
        case _:
            _LOG.error("a call failed: %s", exc, exc_info=exc)
            status = make_status(code.INTERNAL, f"{type(exc).__name__}: {message}")
    return status


def _truncate(message: str) -> str:
    """Truncate a message, which may quote client input, to _MAX_BYTES."""
    encoded = message.encode(errors="replace")
    return message if len(encoded) <= _MAX_BYTES else encoded[:_MAX_BYTES].decode(errors="ignore") + "…"
