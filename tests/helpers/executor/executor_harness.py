"""An executor's service over real gRPC, and the scheduler's side of it by hand. For tests only."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import execution_pb2_grpc, types_pb2
from cadenza_common.wire.transport import bind, channel_options
from executor_svc.app import build_executor
from executor_svc.config import ExecutorConfig
from executor_svc.plan.description import Description
from executor_svc.service.servicer import ExecutorServices, add_services
from executor_svc.service.unreadable import limited_server
from executor_svc.worker.step import StepExecutor
from executor_svc.worker.worker import Worker
from tests.helpers.scheduler.fake_executor import LIMITS, CountingRunner, RecordingPools

INCARNATION = 2**63 + 7
GREEDY = types_pb2.SequenceSampling(top_p=1, repetition_penalty=1)


def fake_description() -> Description:
    geometry = SimpleNamespace(
        name="fake", architecture="Counting", vocab_size=LIMITS.vocab_size, hidden_size=4, num_layers=1, num_heads=1,
        num_kv_heads=1, head_size=4, max_model_len=LIMITS.max_model_len, dtype="float32", num_parameters=0,
        weight_bytes=0, model_type="counts", weights="",
    )  # fmt: skip
    loaded = SimpleNamespace(geometry=geometry, tokenizer="", eos_token_ids=(1, 2), bos_token_id=0, media_token_ids=())
    fingerprint = SimpleNamespace(
        mode="exact", weights_digest=b"w" * 32, dtype="float32", kv_dtype="float32", kernels="none", isa="none",
        num_threads=1, versions=("fake 1",), digest=b"d" * 32,
    )  # fmt: skip
    return Description(1, INCARNATION, loaded, LIMITS, 128, fingerprint, "fake", "0")


class Harness:
    """A served executor and a channel to it."""

    def __init__(self, channel: grpc.aio.Channel, services: ExecutorServices, runner: Any, pools: Any) -> None:
        self.channel = channel
        self.services = services
        self.stub = execution_pb2_grpc.ExecutionServiceStub(channel)
        self.runner = runner
        self.pools = pools

    async def open(self, epoch: int, scheduler_id: str = "A", **fields: Any) -> Stream:
        """A stream whose session stands."""
        stream = self.stream()
        await stream.send(
            open=pb.OpenSession(**{"protocol_version": 1} | fields, scheduler_id=scheduler_id, epoch=epoch)
        )
        while (response := await stream.receive()).WhichOneof("message") == "heartbeat":
            pass
        assert response.WhichOneof("message") == "opened", response
        stream.opened, stream.epoch = response.opened, epoch
        return stream

    def stream(self) -> Stream:
        return Stream(self.stub.Execute())


class Stream:
    """One plan stream; `heartbeats` collects those that arrive between results."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.epoch = 0
        self.opened = pb.SessionOpened()
        self.heartbeats: list[pb.Heartbeat] = []

    async def send(self, **message: Any) -> None:
        await self.call.write(pb.ExecuteRequest(**message))

    async def receive(self) -> pb.ExecuteResponse:
        response = await asyncio.wait_for(self.call.read(), 20)
        assert response is not grpc.aio.EOF
        return response

    async def plan(self, step_id: int, **fields: Any) -> None:
        await self.send(plan=pb.StepPlan(**{"epoch": self.epoch} | fields, step_id=step_id))

    async def result(self) -> pb.StepResult:
        while (response := await self.receive()).WhichOneof("message") == "heartbeat":
            self.heartbeats.append(response.heartbeat)
        return response.result

    async def step(self, step_id: int, **fields: Any) -> pb.StepResult:
        await self.plan(step_id, **fields)
        return await self.result()

    async def status(self) -> grpc.StatusCode:
        """How the stream ended."""
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            while await asyncio.wait_for(self.call.read(), 20) is not grpc.aio.EOF:
                pass
        return await self.call.code()


def admit(
    slot: int, tokens: list[int], blocks: list[int], sampling: types_pb2.SequenceSampling = GREEDY, **fields: Any
) -> Any:
    return pb.AdmittedSequence(
        **{"num_prompt_tokens": len(tokens)} | fields,
        slot=slot,
        token_ids=tokens,
        block_tables=[pb.BlockTable(block_ids=blocks)],
        sampling=sampling,
    )


def scheduled(*rows: tuple[int, int, bool]) -> pb.ScheduledTokens:
    slots, counts, samples = zip(*rows, strict=True)
    return pb.ScheduledTokens(slots=slots, num_tokens=counts, samples=samples)


@contextlib.asynccontextmanager
async def served(
    worker: Worker, description: Description, silence_s: float = 60.0, heartbeat_s: float = 0.02
) -> AsyncIterator[tuple[grpc.aio.Channel, ExecutorServices]]:
    """silence_s: the streams of these tests send no heartbeats."""
    server = limited_server()
    address = bind(server, "127.0.0.1:0", default_port=0)
    services = await add_services(server, worker, description, heartbeat_s=heartbeat_s, silence_s=silence_s)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            yield channel, services
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def fake_executor(silence_s: float = 60.0, heartbeat_s: float = 0.02) -> AsyncIterator[Harness]:
    """A served counting fake."""
    runner, pools = CountingRunner(), RecordingPools()
    worker = Worker(lambda: StepExecutor(runner, pools, LIMITS))
    worker.start()
    await asyncio.wrap_future(worker.ready)
    try:
        async with served(worker, fake_description(), silence_s, heartbeat_s) as (channel, services):
            yield Harness(channel, services, runner, pools)
    finally:
        runner.gate.set()
        assert await asyncio.to_thread(worker.stop, 20)


@contextlib.contextmanager
def model_worker(checkpoint: Path) -> Iterator[tuple[Worker, Description]]:
    """A worker that runs a checkpoint."""
    described: Future[Description] = Future()
    config = ExecutorConfig(
        model=str(checkpoint), block_size=8, num_gpu_blocks=64, num_cpu_blocks=8, max_num_seqs=8, num_threads=1
    )
    worker = Worker(lambda: build_executor(config, described))
    worker.start()
    worker.ready.result(60)
    yield worker, described.result()
    assert worker.stop(20)


@contextlib.asynccontextmanager
async def model_executor(worker: Worker, description: Description) -> AsyncIterator[Harness]:
    """It, served: one servicer for each use, all over the same worker."""
    async with served(worker, dataclasses.replace(description)) as (channel, services):
        yield Harness(channel, services, None, None)


EPOCHS = iter(range(1, 100_000))


async def first_step_id(real: Harness) -> tuple[Stream, int]:
    """A stream and its first step id: a worker that several tests share goes on counting."""
    stream = await real.open(next(EPOCHS))
    return stream, stream.opened.last_completed_step_id + 1
