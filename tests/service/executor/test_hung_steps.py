"""A step that hangs while the executor's heartbeats go on, as clients see it: health, GetServerInfo, their streams."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cadenza.v1 import generation_pb2 as pb
from scheduler_svc.plan_loop.progress import MIN_ALLOWED_S
from tests.helpers.scheduler.scheduler_world import Output, collect, request, world

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_errors_are_logged")]

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_hung_step_is_not_serving_and_its_end_is(tokenizer_folder):
    async with world(tokenizer=tokenizer_folder) as w:
        await collect(w.stub.Generate(request()))
        watch = w.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        w.executor.going.clear()
        began = time.monotonic()
        running = asyncio.create_task(collect(w.stub.Generate(request(request_id="a"))))
        assert (await watch.read()).status == NOT_SERVING
        assert time.monotonic() - began >= MIN_ALLOWED_S
        late = asyncio.create_task(collect(w.stub.Generate(request(request_id="b"))))
        await w.until(lambda: len(w.engine._live) == 2)
        info = await w.stub.GetServerInfo(pb.GetServerInfoRequest())
        (executor,) = info.executors
        assert executor.connected
        assert executor.stalled_step_id == executor.last_step_id + 1
        assert MIN_ALLOWED_S <= executor.stalled_s <= time.monotonic() - began
        assert not running.done()
        w.executor.going.set()
        assert (await watch.read()).status == SERVING
        assert (await running).ids == (await late).ids == [101] * 8
        (after,) = (await w.stub.GetServerInfo(pb.GetServerInfoRequest())).executors
        assert (after.stalled_step_id, after.stalled_s, after.epoch) == (0, 0.0, executor.epoch)
        watch.cancel()


async def test_a_silent_executor_is_not_serving_and_its_return_is(tokenizer_folder):
    """Its connection stands, but neither heartbeats nor results come: as when its process is stopped."""
    async with world(tokenizer=tokenizer_folder) as w:
        watch = w.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        call = w.stub.Generate(request(max_tokens=200, request_id="a"))
        out = Output().add(await call.read())
        w.executor.silent = True
        began = time.monotonic()
        assert (await watch.read()).status == NOT_SERVING
        assert time.monotonic() - began > 1.5
        w.executor.silent = False
        assert (await watch.read()).status == SERVING
        while (response := await call.read()) is not grpc.aio.EOF:
            out.add(response)
        assert out.ids == [101] * 200
        watch.cancel()
