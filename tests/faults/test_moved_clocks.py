"""Real services whose wall clocks are wrong, or jump: nothing depends on them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import grpc
import pytest

from cadenza import AsyncClient, SamplingParams
from cadenza.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from tests.helpers.forks import client as forks
from tests.helpers.machine.shifted_clock import ShiftedClock
from tests.helpers.service_process import service_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

IDS_ONLY = ("--skip-tokenizer-init",)
HOUR_S = 3600.0
PROMPT = [7, 8, 9]
PARAMS = SamplingParams(max_tokens=300, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of 5 ms: a stream of 300 tokens lasts for 1.5 s."""
    file = tmp_path_factory.mktemp("costs") / "costs.json"
    file.write_text(json.dumps({"step_us": 5000}))
    return file


@pytest.mark.long
async def test_a_scheduler_on_a_host_an_hour_behind_connects_at_once(costs: Path, tmp_path: Path) -> None:
    clock = ShiftedClock(tmp_path)
    clock.shift(-HOUR_S)
    async with service_process("executor_svc", "--simulate", str(costs)) as executor:
        options = ("--executor", executor.address, *IDS_ONLY)
        async with service_process("scheduler_svc", *options) as right, AsyncClient(right.address) as client:
            expected = (await client.generate([PROMPT], PARAMS))[0].outputs[0].token_ids
            right.process.terminate()
            await right.process.wait()
        async with service_process("scheduler_svc", *options, environment=clock.environment) as behind:
            line = await behind.logged("is open")
            assert abs(_logged_at(line) - (time.time() - HOUR_S)) < 60, "its clock is an hour behind"
            assert sum("lost" in each for each in behind.lines) == 0
            async with AsyncClient(behind.address) as client:
                assert (await client.generate([PROMPT], PARAMS))[0].outputs[0].token_ids == expected


def _logged_at(line: str) -> float:
    """The time of a line of a log, in seconds since 1970."""
    return time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S"))


def test_a_process_with_a_clock_of_its_own_is_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library is preloaded as an interpreter starts; tests.chaos sets its variable for all processes from then on."""
    command = [sys.executable, "-m", "scheduler_svc"]
    monkeypatch.setattr(forks, "_channel", object())
    monkeypatch.setattr(forks, "_at_start", forks._read_at_start(os.environ))
    assert forks._is_forked(command, dict(os.environ))
    monkeypatch.setenv("LD_PRELOAD", "clock.so")
    assert not forks._is_forked(command, dict(os.environ))


@pytest.mark.long
async def test_jumps_of_the_clock_change_nothing(costs: Path, tmp_path: Path) -> None:
    """An hour on and two hours back, in both services: the session, streams and deadlines stay as they are."""
    clock = ShiftedClock(tmp_path)
    async with (
        service_process("executor_svc", "--simulate", str(costs), environment=clock.environment) as executor,
        service_process(
            "scheduler_svc", "--executor", executor.address, *IDS_ONLY, environment=clock.environment
        ) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        expected = (await client.generate([PROMPT], PARAMS))[0].outputs[0].token_ids
        for shift_s in (HOUR_S, -HOUR_S):
            clock.shift(0)
            limited = asyncio.create_task(_ends_by_its_deadline(scheduler.address, 1.0))
            tokens: list[int] = []
            async for delta in client.stream(PROMPT, PARAMS):
                tokens += delta.outputs[0].token_ids
                if len(tokens) > 20:
                    clock.shift(shift_s)
            assert tokens == expected
            assert 0.9 < await limited < 3.0
            # The deadline of a call that arrives after the jump, and of one that the jump finds running.
            assert 0.9 < await _ends_by_its_deadline(scheduler.address, 1.0) < 3.0
        info = await client.server_info()
        assert (info.executors[0].connected, info.executors[0].epoch) == (True, 1)
        assert sum("is open" in line for line in scheduler.lines) == 1, "the session never broke"


async def _ends_by_its_deadline(address: str, timeout_s: float) -> float:
    """Seconds that a request takes whose `timeout_s` is far below its length; its call's deadline is far above."""
    request = generation_pb2.GenerateRequest(timeout_s=timeout_s)
    request.sampling_params.ignore_eos, request.sampling_params.max_tokens = True, 4000
    request.prompt.add().tokens.ids[:] = PROMPT
    began = time.monotonic()
    async with grpc.aio.insecure_channel(address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60)
        responses = [response async for response in call]
    assert responses[-1].outputs[0].finish.detail == types_pb2.FINISH_DETAIL_DEADLINE
    return time.monotonic() - began
