"""Real schedulers that follow each other on one executor, or compete for it: killed, cut off, alive, or supervised."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from cadenza import AsyncClient, SamplingParams
from tests.faults.test_killed_processes import Up
from tests.helpers.machine.relay import relay
from tests.helpers.service_process import ServiceProcess, service_process
from tests.helpers.service_scripts import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

IDS_ONLY = ("--skip-tokenizer-init",)
PARAMS = SamplingParams(max_tokens=300, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of 5 ms: a stream of 300 tokens lasts for 1.5 s."""
    file = tmp_path_factory.mktemp("costs") / "costs.json"
    file.write_text(json.dumps({"step_us": 5000}))
    return file


def simulated(costs: Path) -> AbstractAsyncContextManager[ServiceProcess]:
    return service_process("executor_svc", "--simulate", str(costs))


def scheduler(target: str, environment: Mapping[str, str] | None = None) -> AbstractAsyncContextManager[ServiceProcess]:
    return service_process("scheduler_svc", "--executor", target, *IDS_ONLY, environment=environment)


@pytest.fixture
def one_id(tmp_path: Path) -> dict[str, str]:
    """The environment of schedulers that all draw the same id, as if they shared it in another way."""
    (tmp_path / "sitecustomize.py").write_text("import uuid\nuuid.uuid4 = lambda: uuid.UUID(int=7)\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


async def tokens_of(address: str) -> list[int]:
    async with AsyncClient(address) as client:
        (output,) = await client.generate([[7, 8, 9]], PARAMS)
        return list(output.outputs[0].token_ids)


async def ended(target: str) -> tuple[int, str]:
    """The exit code and the log of a scheduler that cannot serve."""
    options = ("--listen", "127.0.0.1:0", "--executor", target, *IDS_ONLY)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler_svc", *options), stdout=PIPE, stderr=PIPE
    )
    out, errors = await process.communicate()
    assert out == b"", "it never said that it was ready"
    assert process.returncode is not None
    return process.returncode, errors.decode()


async def test_a_killed_scheduler_and_one_with_another_id(costs: Path) -> None:
    """The kernel closes the connection of a killed process, so no lease has to end."""
    async with simulated(costs) as executor, scheduler(executor.address) as former:
        expected = await tokens_of(former.address)
        former.process.kill()
        async with scheduler(executor.address) as restarted:
            assert await tokens_of(restarted.address) == expected
            assert not any("is silent for" in line for line in executor.lines)


@pytest.mark.long
async def test_a_scheduler_that_was_cut_off_and_one_with_another_id(costs: Path) -> None:
    """The executor does not see that the connection's other end is gone: the lease ends 2 s after the last message."""
    async with simulated(costs) as executor, relay(executor.address) as path, scheduler(path.address) as former:
        expected = await tokens_of(former.address)
        path.silent = True
        former.process.kill()
        async with scheduler(executor.address) as restarted:
            assert "is silent for 2." in await executor.logged("is silent for")
            assert await tokens_of(restarted.address) == expected


@pytest.mark.long
async def test_a_scheduler_that_was_cut_off_and_one_with_its_id(costs: Path, one_id: dict[str, str]) -> None:
    async with simulated(costs) as executor, relay(executor.address) as path, scheduler(path.address, one_id) as former:
        expected = await tokens_of(former.address)
        path.silent = True
        former.process.kill()
        async with scheduler(executor.address, one_id) as restarted:
            assert not any("waiting for" in line for line in restarted.lines)
            await executor.logged("session of epoch 2 open")
            assert await tokens_of(restarted.address) == expected


async def test_a_live_scheduler_stops_when_another_process_has_its_id(costs: Path, one_id: dict[str, str]) -> None:
    async with simulated(costs) as executor, scheduler(executor.address, one_id) as older:
        expected = await tokens_of(older.address)
        async with scheduler(executor.address, one_id) as newer:
            line = await older.logged("error: ")
            assert f"another process of scheduler {7:032x}, at ipv4:127.0.0.1:" in line
            assert "has opened a newer session" in line
            assert await older.process.wait() == 3
            assert await tokens_of(newer.address) == expected
            assert sum("is open" in each for each in newer.lines) == 1, "the older one never took it back"


async def test_a_second_live_scheduler_stops_and_names_the_first(costs: Path) -> None:
    async with simulated(costs) as executor, scheduler(executor.address) as first:
        line = await first.logged("is open")
        found = re.search(r"session 1 of scheduler ([0-9a-f]{32}) is open", line)
        assert found is not None, line
        expected = await tokens_of(first.address)
        streaming = asyncio.create_task(tokens_of(first.address))
        code, errors = await ended(executor.address)
        assert code == 3
        (error,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert error.startswith(f"error: executor {executor.address}: ")
        assert f"scheduler {found[1]} at ipv4:127.0.0.1:" in error
        assert "holds this executor, in epoch 1; its last message came 0." in error
        assert error.endswith("another scheduler uses it, so this one stops")
        assert "Traceback" not in errors
        assert await streaming == expected
        assert first.process.returncode is None
        assert sum("is open" in each for each in first.lines) == 1, "its session never broke"


@pytest.mark.long
def test_cadenza_up_waits_while_another_scheduler_has_its_executor(costs: Path, tmp_path: Path) -> None:
    """Its own scheduler was stopped; a foreign one took the executor. Once that one is gone, it serves again."""
    up = Up(Path("simulated"), tmp_path / "log", "--simulate", str(costs), "--skip-tokenizer-init")
    try:
        asyncio.run(_take_from(up))
    finally:
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(60) == 0, up.log
        assert up.process.stdout is not None
        up.process.stdout.close()


async def _take_from(up: Up) -> None:
    expected = await tokens_of(up.target)
    arguments = up.service("executor_svc").cmdline()
    address = arguments[arguments.index("--listen") + 1]
    up.service("scheduler_svc").suspend()
    async with scheduler(address) as foreign:
        assert await tokens_of(foreign.address) == expected
        stopped = (
            r"the scheduler did not start \(exit code 3: executor .*: scheduler [0-9a-f]{32} at .* holds this executor"
        )
        await asyncio.to_thread(until, lambda: len(re.findall(stopped, up.log)) >= 2)
        assert await tokens_of(foreign.address) == expected
    await asyncio.to_thread(up.wait_for_log, f"the scheduler is back at {up.target}")
    assert await tokens_of(up.target) == expected
