"""Rolling restarts: services that are stopped with SIGTERM and started again at their addresses, under load."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cadenza.errors import UnavailableError, from_rpc_error
from cadenza.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from cadenza.v1 import generation_pb2 as pb
from cadenza_common.wire.transport import channel_options
from tests.checkpoints import make_llama
from tests.helpers.scheduler.killed_scheduler import Load, request
from tests.helpers.scheduler.rolling import ClientLoad, RollingService, Seen, rolling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
NUM_RESTARTS = 3
MAX_TOKENS = 100
SIZES = ("--max-num-seqs", "48", "--num-gpu-blocks", "1200")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options of an executor whose steps take 5 ms."""
    costs = tmp_path_factory.mktemp("costs") / "costs.json"
    costs.write_text(json.dumps({"step_us": 5000}))
    return ("--simulate", str(costs), "--simulate-vocab-size", "500", *SIZES)


@pytest.fixture
async def executor(simulated: tuple[str, ...]) -> AsyncIterator[RollingService]:
    async with rolling("executor_svc", *simulated) as running:
        yield running


UNDISTURBED: list[dict[int, Seen]] = []


async def undisturbed(target: str) -> list[dict[int, Seen]]:
    """What the load's loops see if nothing is restarted: computed by the first test that needs it."""
    if not UNDISTURBED:
        UNDISTURBED.extend(await ClientLoad(target, MAX_TOKENS).finished())
    return UNDISTURBED


def scheduler(executor: RollingService, *options: str) -> tuple[str, ...]:
    return ("--executor", executor.address, "--skip-tokenizer-init", *options)


@pytest.mark.long
async def test_an_executor_restarted_three_times_costs_no_token(executor: RollingService) -> None:
    """No request fails, none differs, and no restart makes a suspect."""
    async with rolling("scheduler_svc", *scheduler(executor)) as front:
        expected = await undisturbed(front.address)
        load = ClientLoad(front.address, MAX_TOKENS)
        for _ in range(NUM_RESTARTS):
            await load.more(300)
            await executor.roll()
        assert await load.finished() == expected
        front.send(signal.SIGTERM)
        await front.ended()
        stops = [line for line in front.running.lines if "requests wait for its successor" in line]
        assert len(stops) == NUM_RESTARTS
        assert not [line for line in front.running.lines if "lost" in line]


async def test_a_scheduler_restarted_three_times_costs_no_token(executor: RollingService, tmp_path: Path) -> None:
    """Each leaves its requests to the next one, in the journal."""
    options = scheduler(executor, "--journal", str(tmp_path / "journal"), "--drain-timeout-s", "0.2")
    async with rolling("scheduler_svc", *options) as front:
        expected = await undisturbed(front.address)
        load = ClientLoad(front.address, MAX_TOKENS)
        for _ in range(NUM_RESTARTS):
            await load.more(300)
            lines = await front.roll()
            assert any("on in the next process with this --journal" in line for line in lines), lines
        assert await load.finished() == expected


@pytest.mark.long
async def test_both_restarted_at_once_cost_no_token_on_a_real_executor(tmp_path: Path) -> None:
    """And texts: a text that goes on elsewhere begins where it ended."""
    model = make_llama(tmp_path / "model", tokenizer=True, vocab_size=300, max_position_embeddings=1024)
    async with rolling("executor_svc", "--model", str(model), "--device", "cpu", *SIZES) as executor:
        options = ("--executor", executor.address, "--journal", str(tmp_path / "journal"), "--drain-timeout-s", "0")
        async with rolling("scheduler_svc", *options) as front:
            expected = await ClientLoad(front.address, 40, 16).finished()
            load = ClientLoad(front.address, 40, 16)
            await load.more(100)
            await asyncio.gather(front.roll(), executor.roll())
            assert await load.finished() == expected


async def test_without_a_journal_what_fits_into_the_drain_timeout_completes(executor: RollingService) -> None:
    """Health is NOT_SERVING at once, new requests are refused with a hint, and only the endless request is cut."""
    async with (
        rolling("scheduler_svc", *scheduler(executor, "--drain-timeout-s", "1.5")) as front,
        grpc.aio.insecure_channel(front.address, options=channel_options()) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        short = [request(f"short {index}", [5, index], 50, temperature=0.0) for index in range(8)]
        load = Load(front.address, [*short, request("endless", [5, 6], 4000, temperature=0.0)])
        await load.until(lambda outputs: all(output.num_tokens for output in outputs.values()))
        front.send(signal.SIGTERM)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generation_pb2_grpc.GenerationServiceStub(channel).Generate(request("late", [5], 5)).read()
        refused = from_rpc_error(caught.value, front.address)
        assert isinstance(refused, UnavailableError)
        assert (refused.message, refused.retry_after_s) == ("the service is draining and takes no new requests", 1.0)
        with pytest.raises(grpc.aio.AioRpcError, match="the service is stopping"):
            await admin_pb2_grpc.AdminServiceStub(channel).Resume(admin_pb2.ResumeRequest())
        outputs = await load.finished()
        endless = outputs.pop("endless")
        assert [output.error for output in outputs.values()] == [None] * 8
        assert [output.num_tokens for output in outputs.values()] == [50] * 8
        assert endless.error is grpc.StatusCode.UNAVAILABLE
        assert endless.message == "the service is stopping: 1 unfinished request is lost, since there is no --journal"
        assert endless.num_tokens >= 50, "it went on beside the others"
        assert await watch.read() is grpc.aio.EOF
        await front.ended()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_drain(executor: RollingService, second: signal.Signals) -> None:
    async with rolling("scheduler_svc", *scheduler(executor, "--drain-timeout-s", "60")) as front:
        load = Load(front.address, [request("endless", [5, 6], 4000, temperature=0.0)])
        await load.until(lambda outputs: outputs["endless"].num_tokens)
        front.send(signal.SIGTERM)
        assert "1 unfinished request goes on, for 60 s at most" in await front.running.logged("draining: ")
        began = time.monotonic()
        front.send(second)
        await front.ended()
        assert time.monotonic() - began < 30, "the drain has ended by itself"
        assert (await load.finished())["endless"].error is grpc.StatusCode.UNAVAILABLE


async def test_cadenza_drain_and_resume(executor: RollingService) -> None:
    """Its exit codes: 1 while requests are left, 0 when none is; --resume takes it back."""
    async with rolling("scheduler_svc", *scheduler(executor)) as front:
        load = Load(front.address, [request("endless", [5, 6], 4000, temperature=0.0)])
        await load.until(lambda outputs: outputs["endless"].num_tokens)
        assert await drain(front, "--timeout-s", "0.1") == (
            1,
            f"{front.address} has 1 request left after 0.1 s, and takes no new ones\n",
        )
        refused = (await Load(front.address, [request("refused", [5], 5)]).finished())["refused"]
        assert refused.error is grpc.StatusCode.UNAVAILABLE
        assert await drain(front, "--resume") == (0, f"{front.address} takes new requests again\n")
        assert (await Load(front.address, [request("served", [5], 5)]).finished())["served"].num_tokens == 5
        drained = asyncio.create_task(drain(front))
        await load.stub.Abort(pb.AbortRequest(request_id="endless"))
        assert await drained == (0, f"{front.address} is empty and takes no new requests\n")
        await load.finished()


async def drain(front: RollingService, *options: str) -> tuple[int | None, str]:
    """Exit code and output of `cadenza drain`."""
    command = (sys.executable, "-m", "cadenza", "drain", "--target", front.address, *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return process.returncode, out.decode()
