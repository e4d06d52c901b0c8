"""What went wrong, as google.rpc.Status: one table for every call and session."""

from __future__ import annotations

import logging

import grpc
from google.rpc import status_pb2

from cadenza.transport import field_violation, make_status, retry_info
from scheduler_svc.core.errors import DrainingError, QueueFullError, RequestExistsError, RequestRejectedError
from scheduler_svc.requests import PreconditionError

_LOG = logging.getLogger(__name__)
_MAX_CHARS = 1500


class NotServingError(Exception):
    """The service cannot take calls now: it starts, or stops; the message says which."""


class UnknownRequestError(Exception):
    """No request of this id is known."""


class AbortedEarlyError(Exception):
    """The request was aborted before it began."""


def status_of(exc: Exception) -> status_pb2.Status:
    """The status that tells a client of this error; what is not expected is logged and becomes INTERNAL."""
    # Details travel in a header, which is bounded.
    code, message = grpc.StatusCode, str(exc)[:_MAX_CHARS]
    match exc:
        case RequestRejectedError():
            status = make_status(
                code.INVALID_ARGUMENT, f"{exc.field}: {message}", [field_violation(exc.field, message)]
            )
        case PreconditionError():
            status = make_status(
                code.FAILED_PRECONDITION, f"{exc.field}: {message}", [field_violation(exc.field, message)]
            )
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
