"""Errors of the scheduler as google.rpc.Status."""

from __future__ import annotations

import base64
import urllib.parse

import grpc
import pytest
from google.rpc import error_details_pb2

from scheduler_svc.convert.errors import (
    AbortedEarlyError,
    NotServingError,
    StreamReplacedError,
    UnreadableMessageError,
    status_of,
)
from scheduler_svc.core import errors
from scheduler_svc.engine.journal import JournalUnavailableError

CLIENTS_TAKE = 8192
"""Bytes of trailers that a gRPC client accepts by default."""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (errors.RequestRejectedError("a.b", "is wrong"), "INVALID_ARGUMENT", "a.b: is wrong"),
        (errors.PreconditionError("a.b", "is missing"), "FAILED_PRECONDITION", "a.b: is missing"),
        (errors.WaitingQueueFullError("full", 2.5), "RESOURCE_EXHAUSTED", "full"),
        (errors.RequestExistsError("taken"), "ALREADY_EXISTS", "taken"),
        (errors.DrainingError("draining"), "UNAVAILABLE", "draining"),
        (NotServingError("starting"), "UNAVAILABLE", "starting"),
        (errors.UnknownRequestError("unknown"), "NOT_FOUND", "unknown"),
        (errors.DataLossError("lost"), "DATA_LOSS", "lost"),
        (JournalUnavailableError("full"), "UNAVAILABLE", "full"),
        (StreamReplacedError("replaced"), "ABORTED", "replaced"),
        (AbortedEarlyError("early"), "CANCELLED", "early"),
        (UnreadableMessageError("no message"), "INVALID_ARGUMENT", "the message cannot be read: no message"),
        (ZeroDivisionError("by zero"), "INTERNAL", "ZeroDivisionError: by zero"),
    ],
)
def test_codes(error, code, message):
    status = status_of(error)
    assert (status.code, status.message) == (grpc.StatusCode[code].value[0], message)


def test_details():
    bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    assert status_of(errors.RequestRejectedError("a.b", "is wrong")).details[0].Unpack(bad_request)
    (violation,) = bad_request.field_violations
    assert (violation.field, violation.description) == ("a.b", "is wrong")
    assert status_of(errors.WaitingQueueFullError("full", 2.5)).details[0].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5


@pytest.mark.parametrize("character", ["x", "%", "é", "你", "😀"])
def test_a_long_message_fits_the_trailers(character):
    """A chat template can put into its refusal what it likes; too large trailers would hide the whole error."""
    status = status_of(errors.RequestRejectedError("prompt[0].chat", character * 100_000))
    assert status.message.endswith(character + "…")
    text = urllib.parse.quote(status.message, safe=" ")
    details = base64.b64encode(status.SerializeToString())
    assert len(text) + len(details) + 500 < CLIENTS_TAKE
