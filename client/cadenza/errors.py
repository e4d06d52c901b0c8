"""The client's exceptions: one class per kind of gRPC status, with the google.rpc details unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from cadenza.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field that the server refused."""

    field: str  # path in the request, such as "sampling_params.top_p"
    description: str


class CadenzaError(Exception):
    """Base of all errors of the client.

    When a batch `generate` raises, `prompt_index` names the first failing prompt, `errors` holds every failing
    prompt's error, and `outputs` what the others produced (None where a prompt failed).
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.code: grpc.StatusCode | None = None
        self.prompt_index: int | None = None
        self.errors: dict[int, CadenzaError] = {}
        self.outputs: list[RequestOutput | None] = []

    def __str__(self) -> str:
        return self.message if self.prompt_index is None else f"prompt {self.prompt_index}: {self.message}"


class InvalidRequestError(CadenzaError, ValueError):
    """The request is invalid, with the fields in `field_violations`; or its message is too large to be sent."""

    def __init__(self, message: str, field_violations: Sequence[FieldViolation] = ()) -> None:
        super().__init__(message)
        self.field_violations = list(field_violations)


class QueueFullError(CadenzaError):
    """The server's queue is full, or a limit of the tenant is reached.

    Retry after `retry_after_s` seconds; None: the server gave no time.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotFoundError(CadenzaError):
    """No such request, or it has expired."""


class AlreadyExistsError(CadenzaError):
    """Another request has this id."""


class FailedPreconditionError(CadenzaError):
    """The server cannot do this in its present state or configuration."""


class UnauthenticatedError(CadenzaError):
    """The server has tenants and needs a token, or does not know the token of this client any more."""


class PermissionDeniedError(CadenzaError):
    """The token's tenant may not make this call."""


class DeadlineError(CadenzaError, TimeoutError):
    """The time limit passed."""


class UnavailableError(CadenzaError):
    """The server cannot be reached, went away, or is draining.

    `retry_after_s`: when another attempt may succeed, there or at another server; None: the server gave no time.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestLostError(CadenzaError):
    """The server does not have the rest of a request's output any more, of which a part was received.

    `code` is NOT_FOUND: it was restarted, or the connection was away for longer than the request's grace; or DATA_LOSS:
    it was restarted and cannot go on with the same tokens.
    """

    @classmethod
    def forgotten(cls, request_id: str, cause: CadenzaError) -> RequestLostError:
        """The error for a request that the server does not know any more."""
        error = cls(
            f"request {request_id} was lost: the server was restarted, or could not be reached for too long: {cause}"
        )
        error.code = cause.code
        return error


class UnsupportedError(CadenzaError):
    """The server does not implement this."""


class InternalError(CadenzaError):
    """The server has an internal error or sent an invalid response."""


class DamagedStreamError(InternalError):
    """A response does not continue the output so far, or cannot be read: something on the way lost or repeated it."""


class LocalServiceError(CadenzaError):
    """A service that this process runs did not start, or died again and again without progress."""


class OptionError(CadenzaError, ValueError):
    """An option of the services is unknown or has an invalid value."""


_BY_CODE: dict[grpc.StatusCode, type[CadenzaError]] = {
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.DATA_LOSS: RequestLostError,
}
_TOO_LARGE = "message larger than max"
"""Part of gRPC's error, on either side, for a message over its limit (`wire.transport`): do not retry."""
_CODE_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def has_server_details(error: grpc.aio.AioRpcError) -> bool:
    """Whether the server itself gave this status, not gRPC."""
    from cadenza_common.wire.transport import STATUS_DETAILS_KEY

    return any(key == STATUS_DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def from_rpc_error(error: grpc.aio.AioRpcError, target: str) -> CadenzaError:
    """The exception for a failed call to `target`, with the details of its google.rpc.Status if it has one."""
    from google.rpc import status_pb2

    from cadenza_common.wire.transport import STATUS_DETAILS_KEY

    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            return from_status(status_pb2.Status.FromString(value))
    message = error.details() or error.code().name
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        message = f"no service at {target}, or it went away (cadenza up MODEL starts one): {message}"
    elif error.code() is grpc.StatusCode.UNIMPLEMENTED:
        message = f"{target} does not have this call; is it a Cadenza scheduler? ({message})"
    return _make(error.code(), message, {}, [])


def from_status(status: object) -> CadenzaError:
    """The exception for a google.rpc.Status."""
    from google.rpc import error_details_pb2, status_pb2

    assert isinstance(status, status_pb2.Status)
    retry: dict[str, float] = {}
    violations: list[FieldViolation] = []
    for detail in status.details:
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry_info = error_details_pb2.RetryInfo()
            detail.Unpack(retry_info)
            retry["s"] = retry_info.retry_delay.seconds + retry_info.retry_delay.nanos / 1e9
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest()
            detail.Unpack(bad_request)
            violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
    code = _CODE_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    return _make(code, status.message or code.name, retry, violations)


def _make(
    code: grpc.StatusCode, message: str, retry: dict[str, float], violations: list[FieldViolation]
) -> CadenzaError:
    error: CadenzaError
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        missing = [v for v in violations if v.description not in message]
        message += "".join(f"; {v.field}: {v.description}" for v in missing)
        error = InvalidRequestError(message, violations)
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        too_large = not retry and _TOO_LARGE in message
        error = InvalidRequestError(message) if too_large else QueueFullError(message, retry.get("s"))
    elif code is grpc.StatusCode.UNAVAILABLE:
        error = UnavailableError(message, retry.get("s"))
    else:
        error = _BY_CODE.get(code, CadenzaError)(message)
    error.code = code
    return error
