"""What went wrong, as google.rpc.Status: one table for every call and session."""

from __future__ import annotations

import logging

import grpc
from google.rpc import status_pb2

from cadenza.transport import field_violation, make_status, retry_info
from scheduler_svc.core.errors import (
    DrainingError,
    PreconditionError,
    QueueFullError,
    RequestExistsError,
    RequestRejectedError,
)

_LOG = logging.getLogger(__name__)
_MAX_BYTES = 1000
"""Of a message: it travels three times in the trailers, of which clients take 8 KiB."""


class NotServingError(Exception):
    """The service cannot take calls now: it starts, or stops; the message says which."""


class UnknownRequestError(Exception):
    """No request of this id is known."""


class AbortedEarlyError(Exception):
    """The request was aborted before it began."""


class UnreadableMessageError(Exception):
    """The bytes are no message of ours; the message is the parser's reason."""


def status_of(exc: Exception) -> status_pb2.Status:
    """The status that tells a client of this error; what is not expected is logged and becomes INTERNAL."""
    code, message = grpc.StatusCode, _cut(str(exc))
    match exc:
        case RequestRejectedError():
            status = make_status(
                code.INVALID_ARGUMENT, f"{exc.field}: {message}", [field_violation(exc.field, message)]
            )
        case PreconditionError():
            status = make_status(
                code.FAILED_PRECONDITION, f"{exc.field}: {message}", [field_violation(exc.field, message)]
            )
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


def _cut(message: str) -> str:
    """The beginning of the message that fits; it may quote what a client sent."""
    encoded = message.encode(errors="replace")
    return message if len(encoded) <= _MAX_BYTES else encoded[:_MAX_BYTES].decode(errors="ignore") + "…"
