"""The executor's service over real gRPC, with a counting fake: what it says of itself, and sessions."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cadenza.v1 import admin_pb2, admin_pb2_grpc
from cadenza.v1 import execution_pb2 as pb
from cadenza_common.serving.slices import Work
from executor_svc.service import servicer
from executor_svc.service.lease import Lease
from executor_svc.simulated.executor import SimulatedStepExecutor
from executor_svc.worker.step import StepExecutor
from executor_svc.worker.worker import Worker
from tests.helpers.executor.executor_harness import (
    INCARNATION,
    Harness,
    Stream,
    admit,
    fake_description,
    fake_executor,
    scheduled,
    served,
)
from tests.helpers.scheduler.fake_executor import LIMITS


@pytest.fixture
async def fake() -> AsyncIterator[Harness]:
    async with fake_executor() as harness:
        yield harness


# ---------------------------------------------------------------- what stands beside plans


async def test_describe(fake: Harness) -> None:
    described = await fake.stub.Describe(pb.DescribeRequest())
    assert described.protocol_version == 1
    assert described.incarnation == INCARNATION
    assert (described.model.architecture, described.model.model_type) == ("Counting", "counts")
    assert described.eos_token_ids == [1, 2]
    assert described.HasField("bos_token_id")
    assert described.bos_token_id == 0
    assert described.limits.num_slots == LIMITS.num_slots
    assert described.kv.num_groups == 1
    assert pb.EXECUTOR_FEATURE_SWAP in described.features
    assert pb.EXECUTOR_FEATURE_PROMPT_LOGPROBS in described.features
    assert pb.EXECUTOR_FEATURE_LOGITS_PROCESSORS in described.features
    assert pb.EXECUTOR_FEATURE_SAMPLE_FORK in described.features
    assert pb.EXECUTOR_FEATURE_BEAMS in described.features
    assert pb.EXECUTOR_FEATURE_DRAFTS not in described.features


async def test_health_and_reflection(fake: Harness) -> None:
    health = health_pb2_grpc.HealthStub(fake.channel)
    for service in ("", "cadenza.v1.ExecutionService", "cadenza.v1.ExecutorAdminService"):
        response = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    call = reflection_pb2_grpc.ServerReflectionStub(fake.channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = (await call.read()).list_services_response.service
    assert {"cadenza.v1.ExecutionService", "grpc.health.v1.Health"} <= {service.name for service in listed}
    call.cancel()


async def test_a_trace_on_request(fake: Harness) -> None:
    """Steps go on until it has its number of them; meanwhile another is refused."""
    admin = admin_pb2_grpc.ExecutorAdminServiceStub(fake.channel)
    stream = await fake.open(1)
    traced = asyncio.ensure_future(admin.Profile(admin_pb2.ProfileRequest(num_steps=2)))
    step_id = 0
    while not traced.done():
        step_id += 1
        await stream.step(step_id, decode_ready=True)
    events = json.loads(gzip.decompress((await traced).trace))["traceEvents"]
    assert [event.get("name") for event in events].count("plan") == 2
    waiting = asyncio.ensure_future(admin.Profile(admin_pb2.ProfileRequest(num_steps=1000)))
    refused = None
    while refused is None:
        other = admin.Profile(admin_pb2.ProfileRequest(num_steps=1000), timeout=0.05)
        try:
            await other
        except grpc.aio.AioRpcError as error:
            refused = error if error.code() is grpc.StatusCode.FAILED_PRECONDITION else None
    assert "a trace is being recorded already" in str(refused.details())
    waiting.cancel()


async def test_a_simulated_executor_has_no_trace_even_while_it_is_idle() -> None:
    worker = Worker(lambda: SimulatedStepExecutor(LIMITS))
    worker.start()
    await asyncio.wrap_future(worker.ready)
    async with served(worker, fake_description()) as (channel, _):
        admin = admin_pb2_grpc.ExecutorAdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="a simulated executor has nothing to trace") as caught:
            await admin.Profile(admin_pb2.ProfileRequest(num_steps=1), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert await asyncio.to_thread(worker.stop, 20)


async def test_memory_is_reported_at_the_opening_and_by_heartbeats(
    fake: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter(range(1_000_000))
    monkeypatch.setattr(servicer, "resident_bytes", lambda: 10_000_000 + next(readings))
    stream = await fake.open(1)
    assert stream.opened.resident_bytes == 10_000_000
    beats = [(await stream.receive()).heartbeat.resident_bytes for _ in range(3)]
    assert beats == [10_000_001, 10_000_002, 10_000_003]


def test_the_memory_is_this_processes() -> None:
    held = psutil.Process().memory_info().rss
    assert servicer.resident_bytes() == pytest.approx(held, rel=0.1)


# ---------------------------------------------------------------- sessions


async def test_first_message_must_open(fake: Harness) -> None:
    stream = fake.stream()
    await stream.send(plan=pb.StepPlan(step_id=1))
    assert await stream.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_second_open_on_a_stream_is_refused(fake: Harness) -> None:
    stream = await fake.open(1)
    await stream.send(open=pb.OpenSession(scheduler_id="A", epoch=2, protocol_version=1))
    assert await stream.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_that_cannot_be_read_ends_the_stream(fake: Harness) -> None:
    """Left open, it would beat on while no plan is read any more."""
    raw = fake.channel.stream_stream(
        "/cadenza.v1.ExecutionService/Execute", response_deserializer=pb.ExecuteResponse.FromString
    )
    stream = Stream(raw())
    opening = pb.OpenSession(scheduler_id="A", epoch=1, protocol_version=1)
    await stream.call.write(pb.ExecuteRequest(open=opening).SerializeToString())
    await stream.receive()
    await stream.call.write(b"\xff")
    assert await stream.status() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await (await fake.open(2)).step(1)).status == pb.STEP_STATUS_OK


@pytest.mark.parametrize(
    ("opening", "code"),
    [
        ({"epoch": 6, "protocol_version": 2, "scheduler_id": "A"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"epoch": 5, "protocol_version": 1, "scheduler_id": "A"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"epoch": 6, "protocol_version": 1, "scheduler_id": "B"}, grpc.StatusCode.PERMISSION_DENIED),
        ({"epoch": 6, "protocol_version": 1, "scheduler_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_refused_openings_leave_the_holder_alone(fake: Harness, opening: dict, code: grpc.StatusCode) -> None:
    holder = await fake.open(5)
    other = fake.stream()
    await other.send(open=pb.OpenSession(**opening))
    assert await other.status() is code
    assert (await holder.step(1)).status == pb.STEP_STATUS_OK


async def test_newer_epoch_fences_the_old_stream(fake: Harness) -> None:
    old = await fake.open(1)
    new = await fake.open(2)
    assert await old.status() is grpc.StatusCode.ABORTED
    assert (await new.step(1)).status == pb.STEP_STATUS_OK


async def test_another_scheduler_takes_over_when_the_holder_is_gone(fake: Harness) -> None:
    holder = await fake.open(1)
    await holder.step(1)
    await holder.call.done_writing()
    assert await holder.status() is grpc.StatusCode.OK
    other = fake.stream()
    await other.send(open=pb.OpenSession(scheduler_id="B", epoch=1, protocol_version=1))
    assert await other.status() is grpc.StatusCode.FAILED_PRECONDITION
    taken = await fake.open(2, "B")
    assert taken.opened.last_completed_step_id == 1
    assert taken.opened.incarnation == INCARNATION


async def test_opening_waits_for_the_running_step_and_drops_queued_plans(fake: Harness) -> None:
    fake.runner.gate.clear()
    old = await fake.open(1)
    await old.plan(1, admitted=[admit(0, [5, 6], [0])], scheduled=scheduled((0, 2, True)))
    await old.plan(2, decode_ready=True)
    await asyncio.to_thread(fake.runner.entered.acquire)
    opening = asyncio.create_task(fake.open(2))
    assert await old.status() is grpc.StatusCode.ABORTED
    assert not opening.done()
    fake.runner.gate.set()
    new = await opening
    assert new.opened.last_completed_step_id == 1
    assert len(fake.runner.batches) == 1
    # The slots are clear: the slot can be admitted again.
    result = await new.step(2, admitted=[admit(0, [9], [0])], decode_ready=True)
    assert list(result.token_ids) == [10]


async def test_an_executor_that_stops_answers_its_running_step_first(
    fake: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it says so; plans that it has not begun get no answer, and no other session is opened."""
    monkeypatch.setattr(servicer, "_LAST_RESULTS_S", 0.05)
    fake.runner.gate.clear()
    stream = await fake.open(1)
    await stream.plan(1, admitted=[admit(0, [5, 6], [0])], scheduled=scheduled((0, 2, True)))
    await asyncio.to_thread(fake.runner.entered.acquire)
    stopping = asyncio.create_task(fake.services.finish(60, asyncio.Event()))
    watch = health_pb2_grpc.HealthStub(fake.channel).Watch(health_pb2.HealthCheckRequest())
    while (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING:
        pass
    await stream.plan(2, decode_ready=True)
    other = fake.stream()
    await other.send(open=pb.OpenSession(scheduler_id="A", epoch=2, protocol_version=1))
    assert await other.status() is grpc.StatusCode.UNAVAILABLE
    fake.runner.gate.set()
    assert list((await stream.result()).token_ids) == [7]
    while (last := (await stream.receive()).WhichOneof("message")) == "heartbeat":
        pass
    assert last == "stopping"
    # A scheduler that does not close the stream gets a status.
    assert await stream.status() is grpc.StatusCode.UNAVAILABLE
    await stopping
    assert len(fake.runner.batches) == 1
    watch.cancel()


async def test_a_second_signal_does_not_wait_for_the_running_step(fake: Harness) -> None:
    fake.runner.gate.clear()
    stream, at_once = await fake.open(1), asyncio.Event()
    await stream.plan(1, admitted=[admit(0, [5, 6], [0])], scheduled=scheduled((0, 2, True)))
    await asyncio.to_thread(fake.runner.entered.acquire)
    stopping = asyncio.create_task(fake.services.finish(60, at_once))
    at_once.set()
    while (last := (await stream.receive()).WhichOneof("message")) == "heartbeat":
        pass
    assert last == "stopping"
    stream.call.cancel()
    await stopping


async def test_cancelled_stream_drops_its_queued_plans(fake: Harness) -> None:
    fake.runner.gate.clear()
    stream = await fake.open(1)
    await stream.plan(1, admitted=[admit(0, [5, 6], [0])], scheduled=scheduled((0, 2, True)))
    await stream.plan(2, decode_ready=True)
    await stream.plan(3, decode_ready=True)
    await asyncio.to_thread(fake.runner.entered.acquire)
    stream.call.cancel()
    opening = asyncio.create_task(fake.open(2))
    await asyncio.wait([opening], timeout=0.1)
    fake.runner.gate.set()
    assert (await opening).opened.last_completed_step_id == 1
    assert len(fake.runner.batches) == 1


# ---------------------------------------------------------------- a scheduler that is silent


async def test_a_silent_scheduler_loses_the_executor() -> None:
    """UNAVAILABLE, at which it opens a new session if it is there after all; and another one is free to come."""
    async with fake_executor(silence_s=0.3) as fake:
        silent = await fake.open(1, "A")
        assert (await silent.step(1)).status == pb.STEP_STATUS_OK
        assert await silent.status() is grpc.StatusCode.UNAVAILABLE
        assert "no message from the scheduler for 0.3 s" in await silent.call.details()
        other = await fake.open(2, "B")
        assert (await other.step(2)).status == pb.STEP_STATUS_OK


async def test_a_silent_scheduler_that_reads_nothing_loses_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that waits for it, as in a stopped process, does not keep the session."""
    async with fake_executor(silence_s=0.3) as fake:
        leases, released = fake.services.execution.leases, asyncio.Event()
        release = leases.release

        def released_now(lease: Lease) -> None:
            release(lease)
            released.set()

        monkeypatch.setattr(leases, "release", released_now)
        silent = await fake.open(1, "A")
        text = "x" * 3_000_000

        def response(result: object, epoch: int, incarnation: int) -> Work[pb.ExecuteResponse]:
            yield
            return pb.ExecuteResponse(result=pb.StepResult(error_message=text))

        monkeypatch.setattr(servicer, "response_in_slices", response)
        for step_id in (1, 2, 3):
            await silent.plan(step_id)
        await asyncio.wait_for(released.wait(), 20)
        assert leases.current is None
        other = await fake.open(2, "B")
        assert other.opened.epoch == 2
        silent.call.cancel()
        other.call.cancel()


async def test_heartbeats_of_the_scheduler_keep_its_session() -> None:
    async with fake_executor(silence_s=0.3) as fake:
        stream = await fake.open(1)
        for _ in range(30):
            await stream.send(heartbeat=pb.Heartbeat())
            assert (await stream.receive()).WhichOneof("message") == "heartbeat"
            assert (await stream.receive()).WhichOneof("message") == "heartbeat"
        assert (await stream.step(1)).status == pb.STEP_STATUS_OK


# ---------------------------------------------------------------- while a session opens


async def test_heartbeats_come_while_the_opening_waits_for_a_step(fake: Harness) -> None:
    fake.runner.gate.clear()
    old = await fake.open(1)
    await old.plan(1, admitted=[admit(0, [5, 6], [0])], scheduled=scheduled((0, 2, True)))
    await asyncio.to_thread(fake.runner.entered.acquire)
    new = fake.stream()
    await new.send(open=pb.OpenSession(scheduler_id="A", epoch=2, protocol_version=1))
    for _ in range(3):
        response = await new.receive()
        assert response.WhichOneof("message") == "heartbeat"
        assert response.heartbeat.running_step_id == 0, "the running step is another session's"
        assert response.heartbeat.resident_bytes > 0
    fake.runner.gate.set()
    while (response := await new.receive()).WhichOneof("message") == "heartbeat":
        pass
    assert response.opened.last_completed_step_id == 1


async def test_a_scheduler_that_is_silent_while_its_session_opens_loses_the_executor() -> None:
    async with fake_executor(silence_s=0.3) as fake:
        fake.runner.gate.clear()
        old = await fake.open(1, "A")
        await old.plan(1, admitted=[admit(0, [5, 6], [0])], scheduled=scheduled((0, 2, True)))
        await asyncio.to_thread(fake.runner.entered.acquire)
        silent = fake.stream()
        await silent.send(open=pb.OpenSession(scheduler_id="A", epoch=2, protocol_version=1))
        assert await silent.status() is grpc.StatusCode.UNAVAILABLE
        other = asyncio.create_task(fake.open(3, "B"))
        await asyncio.wait([other], timeout=0.1)
        fake.runner.gate.set()
        assert (await other).opened.epoch == 3


async def test_slots_that_cannot_be_cleared_end_the_stream(fake: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    clear, errors = StepExecutor.clear, [RuntimeError("the device says no")]

    def clear_or_fail(executor: StepExecutor) -> None:
        if errors:
            raise errors.pop()
        clear(executor)

    monkeypatch.setattr(StepExecutor, "clear", clear_or_fail)
    stream = fake.stream()
    await stream.send(open=pb.OpenSession(scheduler_id="A", epoch=1, protocol_version=1))
    assert await stream.status() is grpc.StatusCode.INTERNAL
    assert "the device says no" in await stream.call.details()
    assert (await (await fake.open(2, "B")).step(1)).status == pb.STEP_STATUS_OK


async def test_an_opening_is_answered_after_a_half_close(fake: Harness) -> None:
    fake.runner.gate.clear()
    old = await fake.open(1)
    await old.plan(1, admitted=[admit(0, [5, 6], [0])], scheduled=scheduled((0, 2, True)))
    await asyncio.to_thread(fake.runner.entered.acquire)
    opening = asyncio.create_task(fake.open(2))
    assert await old.status() is grpc.StatusCode.ABORTED
    new = fake.stream()
    await new.send(open=pb.OpenSession(scheduler_id="A", epoch=3, protocol_version=1))
    await new.call.done_writing()
    await asyncio.wait([opening], timeout=0.1)
    fake.runner.gate.set()
    while (response := await new.receive()).WhichOneof("message") == "heartbeat":
        pass
    assert response.opened.epoch == 3
    assert await new.status() is grpc.StatusCode.OK
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
