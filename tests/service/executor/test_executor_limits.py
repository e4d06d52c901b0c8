"""Messages to an executor that are too long do not reach the parser: each method says so, and the plan stream too."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from cadenza.v1 import admin_pb2
from cadenza.v1 import execution_pb2 as pb
from cadenza_common.wire.transport import MAX_PLAN_BYTES, MAX_SHORT_BYTES, STATUS_DETAILS_KEY
from tests.helpers.executor.executor_harness import Harness, fake_executor

_UNKNOWN = b"\x98\x06\x01"
_TOO_LONG = _UNKNOWN * (MAX_SHORT_BYTES // len(_UNKNOWN) + 1)
_EXECUTE = "/cadenza.v1.ExecutionService/Execute"
_METHODS = {
    "/cadenza.v1.ExecutionService/Describe": pb.DescribeRequest(),
    "/cadenza.v1.ExecutorAdminService/Profile": admin_pb2.ProfileRequest(),
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest(),
    "/grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest(),
}


async def refusal(harness: Harness, method: str, raw: bytes) -> grpc.aio.AioRpcError:
    """The error of a call with this message."""
    if method.endswith("/Watch"):
        answer = harness.channel.unary_stream(method)(raw, timeout=10).read()
    else:
        answer = harness.channel.unary_unary(method)(raw, timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return caught.value


@pytest.mark.parametrize("method", _METHODS)
async def test_a_long_message_is_refused(method: str) -> None:
    async with fake_executor() as harness:
        error = await refusal(harness, method, _TOO_LONG)
        reason = f"has {len(_TOO_LONG)} bytes; at most {MAX_SHORT_BYTES} are allowed"
        assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, f"message: {reason}")
        status = status_pb2.Status.FromString(error.trailing_metadata()[STATUS_DETAILS_KEY])
        detail = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(detail)
        assert [(each.field, each.description) for each in detail.field_violations] == [("message", reason)]


async def test_a_message_of_the_limit_is_read() -> None:
    async with fake_executor() as harness:
        describe = harness.channel.unary_unary("/cadenza.v1.ExecutionService/Describe")
        raw = _TOO_LONG[: -len(_UNKNOWN)]
        assert len(raw) > MAX_SHORT_BYTES - len(_UNKNOWN)
        assert pb.DescribeResponse.FromString(await describe(raw)).protocol_version == 1


@pytest.mark.parametrize("method", _METHODS)
async def test_grpc_refuses_what_is_longer_than_any_plan(method: str) -> None:
    async with fake_executor() as harness:
        error = await refusal(harness, method, b"\x00" * (MAX_PLAN_BYTES + 1))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(MAX_PLAN_BYTES) in str(error.details())


async def stream_end(harness: Harness, *messages: bytes) -> tuple[grpc.StatusCode, str]:
    """How a plan stream with these messages ends."""
    call = harness.channel.stream_stream(_EXECUTE)(iter(messages))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code(), str(caught.value.details())


def _opening(epoch: int) -> bytes:
    opening = pb.OpenSession(scheduler_id="A", epoch=epoch, protocol_version=1)
    return pb.ExecuteRequest(open=opening).SerializeToString()


async def test_a_session_takes_no_long_message_but_a_plan() -> None:
    """And the next session runs its plans."""
    reason = f"a message cannot be read: it has {len(_TOO_LONG)} bytes and is no plan; at most 65536 are allowed"
    beyond = b"\x00" * (MAX_PLAN_BYTES + 1)
    async with fake_executor() as harness:
        assert await stream_end(harness, _TOO_LONG) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        assert await stream_end(harness, _opening(1), _TOO_LONG) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        for messages in ([beyond], [_opening(2), beyond]):
            code, details = await stream_end(harness, *messages)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, details
            assert str(MAX_PLAN_BYTES) in details
        assert (await (await harness.open(3)).step(1)).status == pb.STEP_STATUS_OK


async def test_a_plan_of_almost_the_limit_is_run_and_answered() -> None:
    """It has numbers that no executor has slots for: the answer is the executor's own, to a plan that it has read."""
    async with fake_executor() as harness:
        stream = await harness.open(1)
        most = pb.ExecuteRequest(plan=pb.StepPlan(step_id=1, epoch=1, held_slots=[5] * (MAX_PLAN_BYTES - 40)))
        assert MAX_PLAN_BYTES - 40 < most.ByteSize() <= MAX_PLAN_BYTES
        result = await stream.step(1, held_slots=list(most.plan.held_slots))
        assert result.status == pb.STEP_STATUS_INVALID_PLAN
        assert "slot" in result.error_message
        assert (await (await harness.open(2)).step(2)).status == pb.STEP_STATUS_OK


async def test_reflection_ends_at_a_long_message() -> None:
    async with fake_executor() as harness:
        method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        call = harness.channel.stream_stream(method)(iter([_TOO_LONG]), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
