"""Both services in one process, over real gRPC on port 0: what the whole-service tests run against."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cadenza.v1 import admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.tls_server import credentials_of, listener_files
from cadenza_common.wire.transport import aio_channel, bind
from executor_svc.app import build_executor, open_traces
from executor_svc.config import ExecutorConfig
from executor_svc.plan.description import Description
from executor_svc.service.servicer import add_services
from executor_svc.service.unreadable import limited_server
from executor_svc.worker.worker import Worker
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from tests.helpers.scheduler.gate import Gate


@asynccontextmanager
async def executor_service(
    model: Path | str, listen: str = "127.0.0.1:0", gate: Gate | None = None, **options: Any
) -> AsyncIterator[str]:
    """An executor, behind the gate if there is one; yields its address.

    num_threads is 1 by default: the threads of several processes would wait for each other on a machine with two cores.
    """
    gate = gate or Gate()
    if "simulate" not in options:
        options = {"num_threads": 1, **options}
    config = ExecutorConfig(model=str(model), listen=listen, **options)
    described: Future[Description] = Future()
    worker = Worker(lambda: gate.before(build_executor(config, described)))
    worker.start()
    await asyncio.wrap_future(worker.ready)
    server = limited_server(None if config.tls_client_ca is None else config.tls_scheduler_name)
    address = bind(
        server, config.listen, default_port=0, credentials=credentials_of(listener_files(config, default_port=0))
    )
    traces = open_traces(config, address)
    await add_services(server, worker, described.result(), spans=traces)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)
        assert await asyncio.to_thread(worker.stop, 10.0)
        if traces is not None:
            await asyncio.to_thread(traces.close)


@dataclass
class Running:
    """A scheduler that serves, and stubs for it."""

    target: str
    channel: grpc.aio.Channel

    @property
    def generation(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        return admin_pb2_grpc.AdminServiceStub(self.channel)

    async def load(self) -> generation_pb2.SchedulerLoad:
        return (await self.generation.GetServerInfo(generation_pb2.GetServerInfoRequest())).load

    async def epoch(self) -> int:
        info = await self.generation.GetServerInfo(generation_pb2.GetServerInfoRequest())
        return int(info.executors[0].epoch)

    async def wait_until_free(self) -> None:
        """Return once nothing is held: blocks, slots, tasks; each look costs a call, so this does not spin.

        A WatchSteps stream would be a task of its own, so the load is fetched again and again; 10 s at most.
        """
        async with asyncio.timeout(10):
            while True:
                load = await self.load()
                busy = {
                    "running": load.num_running,
                    "waiting": load.num_waiting,
                    "blocks": load.num_used_device_blocks,
                    "slots": load.num_used_slots,
                    "tasks": load.num_client_tasks,
                }
                if not any(busy.values()):
                    return


@asynccontextmanager
async def scheduler_service(
    executor: str, *, one_session: bool = True, tls: TLS | None = None, **options: Any
) -> AsyncIterator[Running]:
    """A scheduler on an executor; `tls`: how it is connected to.

    A session that breaks heals by itself, so it is checked that none did.
    """
    config = SchedulerConfig(executor=[executor], listen="127.0.0.1:0", **options)
    service = Service(config)
    target = await service.start()
    try:
        await service.open()
        async with connection(target, one_session=one_session, tls=tls) as running:
            yield running
    finally:
        await service.stop()


@asynccontextmanager
async def connection(target: str, *, one_session: bool = True, tls: TLS | None = None) -> AsyncIterator[Running]:
    """A channel to a scheduler that runs already."""
    async with aio_channel(target, tls) as channel:
        running = Running(target, channel)
        epoch = await running.epoch()
        yield running
        assert not one_session or await running.epoch() == epoch, "the session with the executor broke"


@asynccontextmanager
async def cadenza_services(
    model: Path | str, *, scheduler: dict[str, Any] | None = None, **executor: Any
) -> AsyncIterator[Running]:
    """Both services."""
    async with (
        executor_service(model, **executor) as address,
        scheduler_service(address, **(scheduler or {})) as running,
    ):
        yield running
