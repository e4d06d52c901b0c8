"""The servers that rows of docs/errors.md need: one with a model for most, one in some state for those with @."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cadenza.v1 import admin_pb2, generation_pb2_grpc
from cadenza.v1 import generation_pb2 as pb
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from tests.helpers.errors.error_table import HEALTHY
from tests.helpers.scheduler.scheduler_world import World, world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor, serve
from tests.helpers.services import executor_service, scheduler_service
from tests.helpers.tenants import bearer, write_tenants

TAKEN = pb.GenerateRequest(
    request_id="taken", prompt=[{"tokens": {"ids": [5, 6, 7]}}], sampling_params={"max_tokens": 4, "seed": 1}
)


@dataclass
class Services:
    """The main server, which all rows without a name share."""

    target: str
    scheduler: grpc.aio.Channel
    executor: grpc.aio.Channel
    healthy: list[int]
    """The output of HEALTHY, alone."""


@asynccontextmanager
async def main_server(model: Path, **executor_options: Any) -> AsyncIterator[Services]:
    """Both services on a model; afterwards everything must be free, and the session with the executor the first one."""
    async with (
        executor_service(model, num_gpu_blocks=8, max_model_len=256, **executor_options) as address,
        scheduler_service(address) as running,
        grpc.aio.insecure_channel(address) as executor,
        # Without limits of its own: what is too large is for the server to refuse.
        grpc.aio.insecure_channel(running.target) as scheduler,
    ):
        responses = [response async for response in running.generation.Generate(HEALTHY)]
        healthy = [token_id for response in responses for output in response.outputs for token_id in output.token_ids]
        assert len(healthy) == HEALTHY.sampling_params.max_tokens
        yield Services(running.target, scheduler, executor, healthy)
        await running.wait_until_free()


@dataclass
class Server:
    """Where to send a row."""

    target: str
    timeout: float | None = None
    """Of each call, in seconds."""
    healthy: list[int] | None = None
    """What the request that runs beside a session's rows makes; None: it would not run here."""
    release: Callable[[], None] = lambda: None
    """Lets the executor get on."""
    metadata: tuple[tuple[str, str], ...] = ()
    """Of each call."""


@asynccontextmanager
async def server(name: str, folders: dict[str, str]) -> AsyncIterator[Server]:
    """A server of this name; `folders` has those of the tokenizers, with and without a chat template."""
    if name == "starting":
        async with _starting() as it:
            yield it
        return
    if name in ("no_token", "wrong_token", "tenant", "tenant_full"):
        async with _with_tenants(name, folders) as it:
            yield it
        return
    options = {
        "no_tokenizer": {"skip_tokenizer_init": True},
        "no_template": {"tokenizer": folders["no_template"]},
        "full": {"max_queued_requests": 1},
    }.get(name, {})
    executor = ScriptedExecutor(max_num_seqs=1 if name == "full" else 64)
    async with AsyncExitStack() as stack:
        w = await stack.enter_async_context(world(executor, **{"tokenizer": folders["tokenizer"], **options}))
        calls = await _prepare(w, name)
        if name == "halted":
            yield Server(w.target, timeout=0.2, healthy=[101] * 4, release=w.executor.going.set)
        else:
            yield Server(w.target)
        w.executor.going.set()
        for call in calls:
            call.cancel()


@asynccontextmanager
async def _with_tenants(name: str, folders: dict[str, str]) -> AsyncIterator[Server]:
    """A service with two tenants; `other` has a request that runs, and with "tenant_full" so has `gold`, the caller."""
    limits = {"max_requests": 1, "max_queued_tokens": 64, "max_priority": 0}
    with tempfile.TemporaryDirectory() as folder:
        file = write_tenants(Path(folder, "tenants.toml"), {"gold": limits, "other": {}, "ops": {"admin": True}})
        executor = ScriptedExecutor()
        async with world(executor, tokenizer=folders["tokenizer"], tenants=file) as w:
            executor.going.clear()
            calls = [await _hold(w, "taken", "other")]
            if name == "tenant_full":
                calls.append(await _hold(w, "own", "gold"))
            metadata = {"no_token": (), "wrong_token": bearer("gold", 1)}.get(name, bearer("gold"))
            yield Server(w.target, metadata=metadata, release=executor.going.set)
            executor.going.set()
            for call in calls:
                call.cancel()


@asynccontextmanager
async def _starting() -> AsyncIterator[Server]:
    """A service that waits for its executor."""
    executor_server, target = await serve(ScriptedExecutor())
    service = Service(SchedulerConfig(executor=[target], listen="127.0.0.1:0"))
    try:
        yield Server(await service.start())
    finally:
        await service.stop()
        await executor_server.stop(0)


async def _prepare(w: World, name: str) -> list[grpc.aio.Call | asyncio.Task[None]]:
    """Bring it into its state; returns the calls and tasks that keep it there."""
    match name:
        case "full":
            w.executor.going.clear()
            calls = [await _hold(w, "running")]
            await w.until(lambda: w.engine.load().num_running == 1)
            return [*calls, await _hold(w, "waiting")]
        case "busy":
            w.executor.going.clear()
            return [await _hold(w, "taken")]
        case "kept":
            await _lose(w, "kept")
        case "taken_over":
            return [_take_over(w)]
        case "halted":
            w.executor.going.clear()
        case "other_model":
            return [_change(w, name="other", vocab_size=600)]
        case "other_numerics":
            return [_change(w, digest=b"e" * 32)]
        case "smaller":
            return [_change(w, num_blocks=2)]
        case "draining":
            await w.admin.Drain(admin_pb2.DrainRequest())
        case "stopping":
            w.service._front.stop()
        case "fenced":
            w.executor.refuse = (grpc.StatusCode.PERMISSION_DENIED, "scheduler other holds this executor")
            await w.executor.break_up()
            await w.engine.fenced.wait()
    return []


def _change(w: World, **changes: Any) -> asyncio.Task[None]:
    """Replace the executor as soon as a request is accepted; no step runs before."""
    w.executor.going.clear()

    async def change() -> None:
        await w.until(lambda: w.engine._live)
        await w.executor.become(**changes)
        w.executor.going.set()

    return asyncio.create_task(change())


def _take_over(w: World) -> asyncio.Task[None]:
    """Attach another stream to a request as soon as it is accepted; no step runs before."""
    w.executor.going.clear()

    async def take_over() -> None:
        await w.until(lambda: w.engine._live)
        ((_, request_id),) = w.engine._live
        message = pb.GenerateRequest(request_id=request_id, resume=pb.ResumePoint())
        async for _ in generation_pb2_grpc.GenerationServiceStub(w.channel).Generate(message):
            w.executor.going.set()

    return asyncio.create_task(take_over())


async def _lose(w: World, request_id: str) -> None:
    """A request that has ended, and whose stream was lost before."""
    message = pb.GenerateRequest()
    message.CopyFrom(TAKEN)
    message.request_id, message.resume_grace_s = request_id, 60
    call = generation_pb2_grpc.GenerationServiceStub(w.channel).Generate(message)
    await w.until(lambda: (live := w.engine.find("", request_id)) is not None and live.ended)
    call.cancel()


async def _hold(w: World, request_id: str, tenant: str = "") -> grpc.aio.Call:
    """A request that the executor does not get to, once it is known."""
    message = pb.GenerateRequest()
    message.CopyFrom(TAKEN)
    message.request_id = request_id
    metadata = bearer(tenant) if tenant else None
    call = generation_pb2_grpc.GenerationServiceStub(w.channel).Generate(message, metadata=metadata)
    await w.until(lambda: w.engine.find(tenant, request_id) is not None)
    return call
