"""Errors of the APIs: one exception, which is answered in the shape of the API whose path was called."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cadenza.errors import (
    AlreadyExistsError,
    CadenzaError,
    DeadlineError,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)

ENCODINGS = ("gzip", "deflate")
"""Of bodies (http/reading.py)."""
_DEFAULT_RETRY_S = 1.0
_ADAPTER = "adapter: "
_TOO_LONG = re.compile(r"prompt: has (\d+) tokens; with one for the output that exceeds max_model_len = (\d+)")
"""Agents shorten their chats when they read what this becomes: LangChain the code, LiteLLM the words."""


class ApiError(Exception):
    """An answer with an error status. `param`: the field of the request that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 415:
            headers["Accept-Encoding"] = ", ".join(ENCODINGS)
        return headers


def bad_request(message: str, param: str | None = None) -> ApiError:
    """The error of a request that is wrong as it is."""
    return ApiError(400, message, param=param)


def too_large(limit_bytes: int) -> ApiError:
    """The error of a body over the limit."""
    return ApiError(413, f"the body has over {limit_bytes} bytes, which is the limit (--http-max-body-mb)")


@dataclass(frozen=True, slots=True)
class _Names:
    """What the APIs call the errors of one status."""

    openai: str
    anthropic: str


_NAMES: Mapping[int, _Names] = {
    400: _Names("invalid_request_error", "invalid_request_error"),
    401: _Names("authentication_error", "authentication_error"),
    403: _Names("permission_error", "permission_error"),
    404: _Names("not_found_error", "not_found_error"),
    405: _Names("invalid_request_error", "invalid_request_error"),
    408: _Names("timeout_error", "timeout_error"),
    409: _Names("conflict_error", "invalid_request_error"),
    413: _Names("invalid_request_error", "request_too_large"),
    415: _Names("invalid_request_error", "invalid_request_error"),
    429: _Names("rate_limit_error", "rate_limit_error"),
    500: _Names("server_error", "api_error"),
    501: _Names("invalid_request_error", "invalid_request_error"),
    503: _Names("service_unavailable_error", "overloaded_error"),
    504: _Names("timeout_error", "timeout_error"),
}


def openai_body(error: ApiError) -> dict[str, Any]:
    """The error as OpenAI's APIs have it."""
    names = _NAMES.get(error.status, _NAMES[500])
    return {
        "error": {"message": error.message, "type": names.openai, "param": error.param, "code": error.code},
    }


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The error as Anthropic's API has it, which has no place for the field: the message names it."""
    names = _NAMES.get(error.status, _NAMES[500])
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return {"type": "error", "error": {"type": names.anthropic, "message": message}}


def is_unknown_model(error: CadenzaError) -> bool:
    """Whether a request's model is neither the served one nor an adapter that the scheduler knows."""
    return isinstance(error, NotFoundError | FailedPreconditionError) and error.message.startswith(_ADAPTER)


def api_error(error: CadenzaError, params: Mapping[str, str] | None = None, served: str = "") -> ApiError:
    """The answer to a request that the scheduler refused or lost.

    `params`: the name in the API of fields that have another one on the wire. `served`: the model's name, if known.
    """
    match error:
        case _ if is_unknown_model(error):
            # A name that is not the model's was taken for an adapter's.
            detail, name = error.message.removeprefix(_ADAPTER), f"is {served!a}" if served else "has another name"
            message = f"there is no such model: the served one {name}, and {detail}"
            return ApiError(404, message, param="model", code="model_not_found")
        case InvalidRequestError() if (found := _TOO_LONG.fullmatch(error.message)) is not None:
            message = f"the prompt is too long: this model's maximum context length is {found[2]} tokens, and it has "
            param = _param("prompt", params or {})
            return ApiError(400, message + found[1], param=param, code="context_length_exceeded")
        case InvalidRequestError():
            param = error.field_violations[0].field if error.field_violations else None
            status = 413 if "bytes" in error.message and param in (None, "message") else 400
            return ApiError(status, _own_words(error.message), param=_param(param, params or {}))
        case FailedPreconditionError():
            named = _FIELD.match(error.message)
            param = _param(named[1] if named else None, params or {})
            return ApiError(400, _own_words(error.message), param=param)
        case QueueFullError():
            retry_s = _DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s
            return ApiError(429, error.message, code="rate_limit_exceeded", retry_after_s=retry_s)
        case UnavailableError():
            retry_s = _DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s
            return ApiError(503, error.message, code="unavailable", retry_after_s=retry_s)
        case UnauthenticatedError():
            return ApiError(401, "the API key is missing or unknown", code="invalid_api_key")
        case NotFoundError():
            return ApiError(404, error.message, code="not_found")
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    return ApiError(status, error.message)


_STATUS: tuple[tuple[type[CadenzaError], int], ...] = (
    (PermissionDeniedError, 403),
    (AlreadyExistsError, 409),
    (DeadlineError, 504),
    (UnsupportedError, 501),
)


_CHAT = "prompt[0].chat."
_FIELD = re.compile(r"([a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*): ")
"""The field that a message begins with."""


def _own_words(message: str) -> str:
    """A message of the scheduler without the wire's words."""
    return message.replace("sampling_params.", "").replace(f"{_CHAT}template", "chat_template").replace(_CHAT, "")


def _param(field: str | None, params: Mapping[str, str]) -> str | None:
    if field is None:
        return None
    if field.startswith(f"{_CHAT}template"):
        return f"chat_{field.removeprefix(_CHAT)}"
    name = field.removeprefix("sampling_params.").removeprefix(_CHAT).partition("[")[0].partition(".")[0]
    return params.get(name, name)
