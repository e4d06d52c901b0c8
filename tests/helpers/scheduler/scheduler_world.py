"""A scheduler service over gRPC, with the real engine and an executor that follows a script."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status

from cadenza.v1 import admin_pb2_grpc, generation_pb2_grpc, types_pb2
from cadenza.v1 import generation_pb2 as pb
from cadenza_common.wire.transport import channel_options
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from tests.helpers.models.toy_tokenizers import byte_level
from tests.helpers.scheduler.scripted_executor import EOS, ScriptedExecutor, serve


class World:
    """One executor, one scheduler, one channel."""

    def __init__(self, executor, service, channel, target):
        self.executor, self.service, self.channel, self.target = executor, service, channel, target
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.engine = service._engine

    async def until(self, condition):
        """Wait for something that the other side brings about, without an event of its own."""
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def idle(self):
        await self.until(lambda: not self.engine._live and self.engine.load().num_used_slots == 0)
        assert self.engine.load().num_used_device_blocks == 0


@contextlib.asynccontextmanager
async def world(executor=None, **options):
    executor = executor or ScriptedExecutor()
    executor_server, target = await serve(executor)
    service = Service(SchedulerConfig(**{"executor": [target], "listen": "127.0.0.1:0"} | options))
    channel = None
    try:
        address = await service.start()
        await service.open()
        channel = grpc.aio.insecure_channel(address, options=channel_options())
        yield World(executor, service, channel, address)
    finally:
        if channel is not None:
            await channel.close()
        await service.stop()
        await executor_server.stop(0)


def request(text="Hello", *, seed=1, ids=None, **fields):
    part = types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=ids)) if ids else types_pb2.PromptPart(text=text)
    params = {
        name: fields.pop(name) for name in list(fields) if name in types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    }
    params.setdefault("max_tokens", 8)
    return pb.GenerateRequest(prompt=[part], sampling_params=types_pb2.SamplingParams(seed=seed, **params), **fields)


def script(w, text, seed=1, end=True):
    ids = byte_level().encode(text)
    w.executor.scripts[seed] = [*ids, EOS] if end else ids
    return ids


async def error_of(call):
    """The google.rpc.Status that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError):
        await call if not hasattr(call, "__aiter__") else [r async for r in call]
    return await rpc_status.aio.from_call(call)


def violation(status):
    detail = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(detail)
    return detail.field_violations[0].field


class Output:
    """What a client has put together."""

    def __init__(self):
        self.ids, self.text, self.finish, self.info, self.stats, self.logprobs, self.num = (
            [],
            "",
            None,
            None,
            None,
            [],
            0,
        )

    def add(self, response):
        assert self.finish is None, "something came after the end"
        if response.HasField("info"):
            assert self.info is None
            assert not self.ids
            self.info = response.info
        for output in response.outputs:
            assert output.first_token_index == len(self.ids)
            assert output.text_offset == len(self.text)
            self.ids += output.token_ids
            self.text += output.text
            self.logprobs += output.logprobs.chosen_logprobs
            if output.HasField("finish"):
                self.finish = output.finish
        if response.HasField("stats"):
            self.stats = response.stats
        self.num += 1
        return self


async def collect(call):
    out = Output()
    while (response := await call.read()) is not grpc.aio.EOF:
        out.add(response)
    return out


async def session_events(call, outs):
    """Read to the end; returns the number of messages and the errors."""
    num, errors = 0, []
    while (message := await call.read()) is not grpc.aio.EOF:
        num += 1
        for event in message.events:
            if event.HasField("error"):
                errors.append(event)
                continue
            assert event.request_id == event.response.request_id
            out = outs.setdefault(event.request_id, Output()).add(event.response)
            assert event.done == (out.finish is not None)
    return num, errors
