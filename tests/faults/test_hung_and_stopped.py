"""Real processes that hang in a step or are stopped (SIGSTOP): health says so in time, and no token is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cadenza import AsyncClient, SamplingParams
from tests.checkpoints import make_llama
from tests.helpers.service_process import service_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PROMPT = [7, 8, 9]
PARAMS = SamplingParams(max_tokens=600, temperature=0.8, seed=5, ignore_eos=True)
IDS_ONLY = ("--skip-tokenizer-init",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), vocab_size=300, max_position_embeddings=4096)


@asynccontextmanager
async def health_of(target: str) -> AsyncIterator[grpc.aio.UnaryStreamCall]:
    """A watch of a scheduler's health that has said SERVING."""
    async with grpc.aio.insecure_channel(target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert (await watch.read()).status == SERVING
        yield watch
        watch.cancel()


async def expected_tokens(client: AsyncClient) -> list[int]:
    (output,) = await client.generate([PROMPT], PARAMS)
    return list(output.outputs[0].token_ids)


async def test_a_stopped_executor_is_noticed_and_costs_no_token(model: Path) -> None:
    async with (
        service_process("executor_svc", "--model", str(model), "--num-gpu-blocks", "500") as executor,
        service_process("scheduler_svc", "--executor", executor.address, *IDS_ONLY) as scheduler,
        health_of(scheduler.address) as health,
        AsyncClient(scheduler.address) as client,
    ):
        expected = await expected_tokens(client)
        stream = client.stream(PROMPT, PARAMS)
        tokens = list((await anext(stream)).outputs[0].token_ids)
        executor.process.send_signal(signal.SIGSTOP)
        assert (await health.read()).status == NOT_SERVING
        (state,) = (await client.server_info()).executors
        assert state.stalled_step_id or not state.connected
        executor.process.send_signal(signal.SIGCONT)
        assert (await health.read()).status == SERVING
        async for delta in stream:
            tokens += delta.outputs[0].token_ids
        assert tokens == expected


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of 4 ms: a stream of 600 tokens lasts for 2.4 s."""
    file = tmp_path_factory.mktemp("costs") / "costs.json"
    file.write_text(json.dumps({"step_us": 4000}))
    return file


async def test_a_stopped_scheduler_loses_its_session_and_no_token(costs: Path) -> None:
    async with (
        service_process("executor_svc", "--simulate", str(costs)) as executor,
        service_process("scheduler_svc", "--executor", executor.address, *IDS_ONLY) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        expected = await expected_tokens(client)
        stream = client.stream(PROMPT, PARAMS)
        tokens = list((await anext(stream)).outputs[0].token_ids)
        scheduler.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        await executor.logged("is silent for 2.")
        assert time.monotonic() - began > 1.5
        scheduler.process.send_signal(signal.SIGCONT)
        async for delta in stream:
            tokens += delta.outputs[0].token_ids
        assert tokens == expected


@pytest.mark.long
async def test_another_scheduler_takes_the_executor_of_a_stopped_one() -> None:
    async with (
        service_process("executor_svc", "--simulate", "instant") as executor,
        service_process("scheduler_svc", "--executor", executor.address, *IDS_ONLY) as stopped,
    ):
        stopped.process.send_signal(signal.SIGSTOP)
        await executor.logged("is silent for 2.")
        async with service_process("scheduler_svc", "--executor", executor.address, *IDS_ONLY) as other:
            stopped.process.send_signal(signal.SIGCONT)
            await stopped.logged("holds this executor")
            assert await stopped.process.wait() == 3
            async with AsyncClient(other.address) as client:
                assert len(await expected_tokens(client)) == 600


async def test_a_process_whose_step_hangs_ends_and_its_successor_goes_on() -> None:
    simulated = ("--simulate", "instant", "--step-timeout-s", "1")
    async with service_process("executor_svc", *simulated, "--inject", "hang@50") as executor:
        async with (
            service_process("scheduler_svc", "--executor", executor.address, *IDS_ONLY) as scheduler,
            AsyncClient(scheduler.address) as client,
        ):
            stream = client.stream(PROMPT, PARAMS)
            tokens = list((await anext(stream)).outputs[0].token_ids)
            line = await executor.logged("longer than --step-timeout-s")
            assert " ERROR " in line
            assert "step 50 has run for 1." in line
            assert await executor.process.wait() == 4
            async with service_process("executor_svc", *simulated, listen=executor.address):
                async for delta in stream:
                    tokens += delta.outputs[0].token_ids
                assert tokens == await expected_tokens(client)
        assert sum(" ERROR " in line for line in executor.lines) == 1


async def test_a_long_step_does_not_end_the_process() -> None:
    simulated = ("--simulate", "instant", "--step-timeout-s", "30", "--inject", "hang@50:3")
    async with (
        service_process("executor_svc", *simulated) as executor,
        service_process("scheduler_svc", "--executor", executor.address, *IDS_ONLY) as scheduler,
        health_of(scheduler.address) as health,
        AsyncClient(scheduler.address) as client,
    ):
        found = asyncio.create_task(expected_tokens(client))
        assert (await health.read()).status == NOT_SERVING
        (state,) = (await client.server_info()).executors
        assert (state.connected, state.stalled_step_id, state.last_step_id) == (True, 50, 49)
        assert state.stalled_s >= 2.0
        assert (await health.read()).status == SERVING
        assert len(await found) == 600
        assert executor.process.returncode is None
