"""What the calls of all dialects have in common: the caller's key, the status of errors, counts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

import grpc

from cadenza.errors import CadenzaError
from gateway_svc.http.errors import ApiError, api_error
from gateway_svc.state import State

_LOG = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
_CODES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_OK, _LEFT = 200, 499


def key_of(context: Context) -> str | None:
    """The API key in a call's metadata, as `authorization: Bearer KEY`."""
    metadata: Any = context.invocation_metadata() or ()
    given = next((value for name, value in metadata if name == "authorization"), "")
    kind, _, key = str(given).partition(" ")
    return key.strip() or None if kind.lower() == "bearer" else None


def explained(error: Exception, about: str) -> ApiError:
    """Return a request's error as an error of the APIs; a bug is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CadenzaError):
        return api_error(error, {"adapter": "model"})
    _LOG.error("%s failed", about, exc_info=error)
    return ApiError(500, "the gateway failed; its log has the reason")


async def abort_with(context: Context, error: Exception, about: str) -> NoReturn:
    """End a call with the status of an error."""
    known = explained(error, about)
    await context.abort(_CODES.get(known.status, grpc.StatusCode.INTERNAL), known.message)
    raise AssertionError("abort returned")


async def write(state: State, context: Context, response: Any) -> None:
    """Write one message of a stream; raises ApiError for a client that takes nothing for --http-write-timeout-s."""
    timeout_s = state.config.http_write_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(response)
    except TimeoutError:
        state.counts.num_slow_readers += 1
        raise SlowClientError(429, f"the client took nothing for {timeout_s:g} s") from None
    state.counts.num_writes += 1


class SlowClientError(ApiError):
    """The client does not read: its call ends, with all that runs in it."""


@contextlib.asynccontextmanager
async def counted(state: State, path: str) -> AsyncIterator[None]:
    """Count what the body answers, with the status that HTTP would have: one number means the same in all dialects.

    The body raises ApiError or CadenzaError for a request that fails.
    """
    began = time.perf_counter()
    state.counts.began()
    status = _LEFT
    try:
        yield
        status = _OK
    except (ApiError, CadenzaError) as error:
        status = explained(error, path).status
        raise
    except Exception:
        status = 500
        raise
    finally:
        state.counts.ended(path, status, time.perf_counter() - began)
