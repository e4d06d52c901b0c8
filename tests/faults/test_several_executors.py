"""Real processes: two executors behind one scheduler, of which one is killed, drained, removed or added under load."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from cadenza.v1 import admin_pb2 as pb
from cadenza.v1 import admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from cadenza_common.wire.transport import channel_options
from executor_svc.replay.__main__ import main as replay_executor
from scheduler_svc.replay.__main__ import main as replay_core
from tests.helpers.scheduler.rolling import ClientLoad, RollingService, Seen, rolling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
MAX_TOKENS = 100
NUM_REQUESTS = 16
EXPECTED: list[dict[int, Seen]] = []


@pytest.fixture
async def executors(tmp_path: Path) -> AsyncIterator[list[RollingService]]:
    """Two simulated executors of different sizes, whose steps take 5 ms. One of them has drafts."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"step_us": 5000}))
    options = ("--simulate", str(costs), "--simulate-vocab-size", "500")
    sizes = (
        ("--num-gpu-blocks", "600", "--max-num-seqs", "16"),
        ("--num-gpu-blocks", "900", "--max-num-seqs", "60", "--speculative", "suffix"),
    )
    async with AsyncExitStack() as stack:
        services = [rolling("executor_svc", *options, *size) for size in sizes]
        yield list(await asyncio.gather(*(stack.enter_async_context(service) for service in services)))


class Service:
    """Stubs of a scheduler."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)

    async def infos(self) -> list[generation_pb2.ExecutorInfo]:
        info = await self.generation.GetServerInfo(generation_pb2.GetServerInfoRequest())
        return list(info.executors)

    async def until(self, targets: list[str]) -> None:
        """Return once these executors are there and connected, and no others."""
        async with asyncio.timeout(20):
            while True:
                if sorted(info.target for info in await self.infos() if info.connected) == sorted(targets):
                    return
                await asyncio.sleep(0.01)


async def expected(target: str) -> list[dict[int, Seen]]:
    """What the load's loops see if nothing happens: computed by the first test that needs it, on one executor."""
    if not EXPECTED:
        EXPECTED.extend(await ClientLoad(target, MAX_TOKENS, NUM_REQUESTS).finished())
    return EXPECTED


async def test_a_killed_executor_costs_no_token(executors: list[RollingService], tmp_path: Path) -> None:
    """It is started again under load, and the log of it all replays, each executor's part by itself."""
    log, one, two = tmp_path / "log", executors[0].address, executors[1].address
    options = ("--executor", one, "--executor", two, "--skip-tokenizer-init", "--record", str(log))
    async with (
        rolling("scheduler_svc", *options) as front,
        grpc.aio.insecure_channel(front.address, options=channel_options()) as channel,
    ):
        service = Service(channel)
        await service.until([one, two])
        load = ClientLoad(front.address, MAX_TOKENS, NUM_REQUESTS)
        await load.more(200)
        assert all(info.num_running for info in await service.infos())
        await executors[0].kill()
        await load.more(200)
        await executors[0].start()
        seen = await load.finished()
        await service.until([one, two])
        assert await ClientLoad(front.address, MAX_TOKENS, NUM_REQUESTS).finished() == seen
        infos = await service.infos()
        assert [info.index for info in infos] == [0, 1]
        assert all(info.num_output_tokens for info in infos)
        front.send(signal.SIGTERM)
        await front.ended()
    assert replay_core([str(log)]) == 0
    for index in ("0", "1"):
        assert replay_executor(["--executor", index, str(log)]) == 0
    async with rolling("scheduler_svc", "--executor", two, "--skip-tokenizer-init") as front:
        assert seen == await expected(front.address)


async def test_a_killed_scheduler_goes_on_with_both_from_its_journal(
    executors: list[RollingService], tmp_path: Path
) -> None:
    both = ("--executor", f"{executors[0].address},{executors[1].address}", "--skip-tokenizer-init")
    async with rolling("scheduler_svc", *both, "--journal", str(tmp_path / "journal")) as front:
        wanted = await expected(front.address)
        load = ClientLoad(front.address, MAX_TOKENS, NUM_REQUESTS)
        await load.more(200)
        await front.kill()
        await front.start()
        assert await load.finished() == wanted


async def test_executors_are_added_drained_and_removed_by_calls(executors: list[RollingService]) -> None:
    one, two = executors[0].address, executors[1].address
    async with (
        rolling("scheduler_svc", "--executor", one, "--skip-tokenizer-init") as front,
        grpc.aio.insecure_channel(front.address, options=channel_options()) as channel,
    ):
        service = Service(channel)
        admin = service.admin
        wanted = await expected(front.address)
        load = ClientLoad(front.address, MAX_TOKENS, NUM_REQUESTS)
        await load.more(100)
        await admin.AddExecutor(pb.AddExecutorRequest(target=two))
        await service.until([one, two])
        drained = await admin.DrainExecutor(pb.DrainExecutorRequest(target=one, timeout_s=20))
        assert drained.num_remaining == 0
        infos = await service.infos()
        assert (infos[0].draining, infos[0].num_running) == (True, 0)
        await admin.ResumeExecutor(pb.ResumeExecutorRequest(target=one))
        await admin.RemoveExecutor(pb.RemoveExecutorRequest(target=two))
        assert [info.target for info in await service.infos()] == [one]
        assert await load.finished() == wanted
        codes = grpc.StatusCode
        for call, request, code in (
            (admin.AddExecutor, pb.AddExecutorRequest(target=one), codes.ALREADY_EXISTS),
            (admin.AddExecutor, pb.AddExecutorRequest(target="a:b"), codes.INVALID_ARGUMENT),
            (admin.AddExecutor, pb.AddExecutorRequest(), codes.INVALID_ARGUMENT),
            (admin.AddExecutor, pb.AddExecutorRequest(target=front.address), codes.INVALID_ARGUMENT),
            (admin.DrainExecutor, pb.DrainExecutorRequest(target=two), codes.NOT_FOUND),
            (admin.DrainExecutor, pb.DrainExecutorRequest(target=one, timeout_s=-1), codes.INVALID_ARGUMENT),
            (admin.ResumeExecutor, pb.ResumeExecutorRequest(target=two), codes.NOT_FOUND),
            (admin.RemoveExecutor, pb.RemoveExecutorRequest(target=two), codes.NOT_FOUND),
            (admin.RemoveExecutor, pb.RemoveExecutorRequest(target=one), codes.FAILED_PRECONDITION),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(request)
            assert error.value.code() is code, request


async def test_sighup_reads_the_list_again(executors: list[RollingService], tmp_path: Path) -> None:
    """First a file of addresses changes, then the option in the TOML file."""
    one, two = executors[0].address, executors[1].address
    addresses, options = tmp_path / "addresses", tmp_path / "cadenza.toml"
    addresses.write_text(f"{one}  # the first\n")
    options.write_text(f"executor = ['file:{addresses}']\nskip_tokenizer_init = true\n")
    async with (
        rolling("scheduler_svc", "--config", str(options)) as front,
        grpc.aio.insecure_channel(front.address, options=channel_options()) as channel,
    ):
        service = Service(channel)
        wanted = await expected(front.address)
        load = ClientLoad(front.address, MAX_TOKENS, NUM_REQUESTS)
        await load.more(100)
        addresses.write_text(f"{one}\n{two}\n")
        front.send(signal.SIGHUP)
        await service.until([one, two])
        await load.more(100)
        options.write_text(f"executor = '{two}'\n")
        front.send(signal.SIGHUP)
        await service.until([two])
        options.write_text("executor = 'a:b'\n")
        front.send(signal.SIGHUP)
        assert await load.finished() == wanted
        await front.running.logged("error: ")
        assert [info.target for info in await service.infos()] == [two]
