"""The scheduler from start to stop as its clients see it: health, lost executors, failures inside."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cadenza.v1 import admin_pb2, execution_pb2, generation_pb2_grpc
from cadenza.v1 import generation_pb2 as pb
from cadenza_common.wire.transport import channel_options
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from tests.helpers.scheduler.scheduler_world import Output, collect, error_of, request, session_events, world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor, serve

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_errors_are_logged")]


async def test_health_watch_follows_the_executor_for_every_watcher(w):
    name = "cadenza.v1.GenerationService"
    watches = [w.health.Watch(health_pb2.HealthCheckRequest(service=name)) for _ in range(2)]
    for watch in watches:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watches[0].cancel()
    await w.until(lambda: len(w.service._health._watchers) == 1)
    await w.executor.break_up()
    assert (await watches[1].read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await watches[1].read()).status == health_pb2.HealthCheckResponse.SERVING
    out = await collect(w.stub.Generate(request()))
    assert len(out.ids) == 8
    unknown = w.health.Watch(health_pb2.HealthCheckRequest(service="none"))
    assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    with pytest.raises(grpc.aio.AioRpcError):
        await w.health.Check(health_pb2.HealthCheckRequest(service="none"))


async def test_streams_survive_a_new_session_with_the_executor(w):
    call = w.stub.Generate(request(max_tokens=200, request_id="a"))
    out = Output().add(await call.read())
    await w.executor.break_up()
    while (response := await call.read()) is not grpc.aio.EOF:
        out.add(response)
    assert out.ids == [101] * 200
    await w.idle()


async def counters_of(w):
    """The counts since the start that two requests with a common prefix raise, from GetServerInfo."""
    for _ in range(2):
        await collect(w.stub.Generate(request(ids=[7] * 40)))
    info = await w.stub.GetServerInfo(pb.GetServerInfoRequest())
    names = ("num_steps", "num_output_tokens", "num_prefix_queries", "num_prefix_hits")
    return {name: getattr(info.load, name) for name in names} | {"last_step_id": info.executors[0].last_step_id}


async def test_counters_survive_a_new_session_with_another_executor():
    """The new incarnation has run no step, and has fewer blocks."""
    executor = ScriptedExecutor(features=(execution_pb2.EXECUTOR_FEATURE_SHARED_PREFIXES,))
    async with world(executor, skip_tokenizer_init=True) as w:
        before = await counters_of(w)
        assert all(before.values()), before
        executor.incarnation, executor.num_plans, executor.num_blocks = 8, 0, 128
        await executor.break_up()
        await w.until(lambda: w.engine.executor_infos()[0].incarnation == 8)
        after = await counters_of(w)
        assert all(after[name] > count for name, count in before.items()), (before, after)


async def test_what_goes_wrong_inside_is_internal(w, caplog, monkeypatch):
    monkeypatch.setattr(w.engine, "submit", lambda _: 1 / 0)
    status = await error_of(w.stub.Generate(request()))
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    call = w.stub.Session()
    await call.write(pb.SessionRequest(generate=request(request_id="a")))
    await call.done_writing()
    _, errors = await session_events(call, {})
    assert errors[0].error.code == grpc.StatusCode.INTERNAL.value[0]
    assert await call.code() is grpc.StatusCode.OK
    assert "a call failed" in caplog.text
    caplog.clear()


async def test_calls_before_it_is_ready_are_unavailable():
    executor = ScriptedExecutor()
    executor_server, target = await serve(executor)
    service = Service(SchedulerConfig(executor=[target], listen="127.0.0.1:0", skip_tokenizer_init=True))
    async with grpc.aio.insecure_channel(await service.start(), options=channel_options()) as channel:
        stub, health = generation_pb2_grpc.GenerationServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for call in (stub.Generate(request()), stub.Session(), stub.GetModelInfo(pb.GetModelInfoRequest())):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert target in await call.details()
        await service.open()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await stub.GetModelInfo(pb.GetModelInfoRequest())
    await service.stop()
    await executor_server.stop(0)


async def test_stop_ends_streams_with_unavailable(tokenizer_folder):
    async with world(tokenizer=tokenizer_folder) as w:
        w.executor.going.clear()
        generate, session = w.stub.Generate(request(request_id="a")), w.stub.Session()
        await session.write(pb.SessionRequest(generate=request(request_id="b")))
        watch = w.admin.WatchSteps(admin_pb2.WatchStepsRequest())
        health = w.health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await health.read()
        await w.until(lambda: len(w.engine._live) == 2)
        async with asyncio.timeout(15):
            await w.service.stop()
        for call in (generate, session, watch):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not w.engine._live
