"""Sends one request, by itself or in a session, and says how it ended: for the rows of docs/errors.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import BytesValue
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from cadenza import errors
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from tests.helpers.errors.error_table import CALLS, HEALTHY

Metadata = tuple[tuple[str, str], ...]
_ENDLESS = ("WatchSteps", "SubscribeKvEvents")


@dataclass(frozen=True)
class Outcome:
    """How a request ended; OK has a message too, which says what came."""

    status: str
    field: str
    message: str
    retry_s: float | None = None
    error: errors.CadenzaError | None = None


async def perform(
    channel: grpc.aio.Channel,
    target: str,
    name: str,
    payload: bytes,
    timeout: float | None = None,
    metadata: Metadata = (),
) -> Outcome:
    """Send one request and wait for its end; of a stream without an end the first answer is enough."""
    call = CALLS[name]
    path = f"/cadenza.v1.{call.service}/{name}"
    try:
        if not call.streams:
            answer = await channel.unary_unary(path, None, call.answer.FromString)(
                payload, timeout=timeout, metadata=metadata
            )
            return Outcome("OK", "", _summary(answer))
        stream = channel.unary_stream(path, None, call.answer.FromString)(payload, timeout=timeout, metadata=metadata)
        answer = None
        while (following := await stream.read()) is not grpc.aio.EOF:
            answer = following
            if name in _ENDLESS:
                stream.cancel()
                break
        return Outcome("OK", "", _summary(answer))
    except grpc.aio.AioRpcError as exc:
        return _outcome_of_call(exc, target)


def outcome_of(status: status_pb2.Status, error: errors.CadenzaError) -> Outcome:
    """What a status says."""
    field, message, retry_s = "", status.message, None
    for detail in status.details:
        bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            violation = bad_request.field_violations[0]
            field, message = violation.field, violation.description
            assert status.message == f"{field}: {message}"
        elif detail.Unpack(retry):
            retry_s = retry.retry_delay.ToTimedelta().total_seconds()
    (name,) = [code.name for code in grpc.StatusCode if code.value[0] == status.code]
    return Outcome(name, field, message, retry_s, error)


def _outcome_of_call(exc: grpc.aio.AioRpcError, target: str) -> Outcome:
    """With details, or without: gRPC itself sends none."""
    bare = status_pb2.Status(code=exc.code().value[0], message=exc.details())
    return outcome_of(rpc_status.from_call(exc) or bare, errors.from_rpc_error(exc, target))


async def perform_in_session(
    channel: grpc.aio.Channel,
    target: str,
    payload: bytes,
    healthy: list[int] | None = None,
    on_outcome: Callable[[], None] = lambda: None,
    metadata: Metadata = (),
) -> Outcome:
    """Send one SessionRequest, after a healthy request if its tokens are given, which must come out right."""
    session = channel.stream_stream("/cadenza.v1.GenerationService/Session", None, pb.SessionResponse.FromString)
    call = session(metadata=metadata)
    tokens: list[int] = []
    outcomes: list[Outcome] = []
    try:
        if healthy is not None:
            await call.write(pb.SessionRequest(generate=HEALTHY).SerializeToString())
        await call.write(payload)
        await call.done_writing()
        async for message in call:
            for event in message.events:
                if event.HasField("error"):
                    outcomes.append(outcome_of(event.error, errors.from_status(event.error)))
                    assert event.done == (event.request_id != HEALTHY.request_id)
                    on_outcome()
                elif event.request_id == HEALTHY.request_id:
                    tokens += [token_id for output in event.response.outputs for token_id in output.token_ids]
                elif event.done:
                    outcomes.append(Outcome("OK", "", _summary(event.response)))
    except grpc.aio.AioRpcError as exc:
        if exc.code() is grpc.StatusCode.INTERNAL and not errors.has_server_details(exc):
            # The server had ended the call before the message was written: gRPC then loses the server's status.
            return await _outcome_without_messages(session(metadata=metadata), target)
        return _outcome_of_call(exc, target)
    assert tokens == (healthy or [])
    (outcome,) = outcomes or [Outcome("OK", "", "")]
    return outcome


async def _outcome_without_messages(call: grpc.aio.StreamStreamCall, target: str) -> Outcome:
    """The outcome of a call that the server ends by itself."""
    try:
        await call.read()
    except grpc.aio.AioRpcError as exc:
        return _outcome_of_call(exc, target)
    raise AssertionError("the server did not end the call")


def in_session(payload: bytes) -> bytes:
    """A GenerateRequest on the wire as a SessionRequest."""
    return BytesValue(value=payload).SerializeToString()  # its field 1 is ours


def _summary(answer: Message | None) -> str:
    match answer:
        case pb.GenerateResponse() if answer.outputs:
            detail = types_pb2.FinishDetail.Name(answer.outputs[0].finish.detail)
            return f"ends with {detail.removeprefix('FINISH_DETAIL_')}"
        case pb.AbortResponse():
            return f"aborted: {str(answer.aborted).lower()}"
        case pb.TokenizeResponse():
            return f"{len(answer.token_ids)} token ids"
        case pb.DetokenizeResponse():
            return f"the text {answer.text!r}"
        case _:
            return ""
