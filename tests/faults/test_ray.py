"""Real Ray: two raylets of this machine, executors that come and go under load, ranks, killed actors and raylets."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from cadenza import AsyncClient, Client, SamplingParams
from tests.checkpoints import make_llama
from tests.helpers.ray_cluster import (
    RayMachines,
    cadenza_up,
    command_of,
    end_within,
    executors_below,
    ray_machines,
    raylet_of,
)
from tests.helpers.scheduler.rolling import ClientLoad, rolling
from tests.helpers.service_process import service_process
from tests.helpers.service_scripts import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra ray"),
]
MAX_TOKENS, NUM_REQUESTS = 150, 24


@pytest.fixture(scope="module")
def machines() -> Iterator[RayMachines]:
    with ray_machines(num_cpus=3) as running:
        yield running


def listening_below(node: Any) -> list[psutil.Process]:
    """The executors on a machine."""
    return [each for each in executors_below(raylet_of(node)) if "--listen" in command_of(each)]


async def two_serve(target: str) -> None:
    """Return once there are two executors, and both serve."""
    async with AsyncClient(target) as client, asyncio.timeout(20):
        while [each.state for each in (await client.server_info()).executors] != ["serving"] * 2:
            pass


async def test_an_executor_without_cadenza_up_ends_when_its_actor_does(machines: RayMachines) -> None:
    """Whoever has started it starts it again."""
    place = ("--distributed-executor-backend", "ray", "--ray-address", machines.address)
    async with service_process("executor_svc", "--simulate", "instant", "--num-gpu-blocks", "99", *place) as running:
        async with rolling("scheduler_svc", "--executor", running.address, "--skip-tokenizer-init") as front:
            async with AsyncClient(front.address) as client:
                (output,) = await client.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
            assert len(output.outputs[0].token_ids) == 4
        found = executors_below(psutil.Process())
        (executor,) = (each for each in found if each.pid != running.process.pid)
        actor = executor.parent()
        assert actor is not None
        actor.kill()
        end_within([executor], 2)
        async with asyncio.timeout(20):
            assert await running.process.wait() == 1
        await running.logged("its Ray actor is gone")


async def test_executors_come_and_go_and_actors_and_machines_are_lost(machines: RayMachines, tmp_path: Path) -> None:
    """Not a token is lost, repeated or different; and one more executor is there for as long as it is needed."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"step_us": 5000}))
    sizes = ("--num-gpu-blocks", "600", "--max-num-seqs", "8", "--skip-tokenizer-init")
    number = ("--executors", "2", "--max-executors", "3", "--scale-up-after-s", "0.5", "--scale-down-after-s", "1")
    with cadenza_up("simulated", "--simulate", str(costs), "--ray-address", machines.address, *sizes, *number) as up:
        expected = await ClientLoad(up.target, MAX_TOKENS, NUM_REQUESTS).finished()
        up.logged("executor 2 is added: ")
        up.logged("executor 2 has no requests left and is taken away")
        await two_serve(up.target)

        (node,) = machines.others()
        until(lambda: len(listening_below(node)) == 1, 10)  # the one that was taken away may be ending still
        (executor,) = listening_below(node)
        actor = executor.parent()
        assert actor is not None
        load = ClientLoad(up.target, MAX_TOKENS, NUM_REQUESTS)
        await load.more(300)
        actor.kill()
        end_within([executor], 2)
        up.logged("died (its Ray actor is gone")
        assert await load.finished() == expected
        up.logged(" is back at ")

        raylet = raylet_of(node)
        executors = executors_below(raylet)
        assert executors
        load = ClientLoad(up.target, MAX_TOKENS, NUM_REQUESTS)
        await load.more(300)
        machines.kill(node)
        end_within(executors, 2)
        assert await load.finished() == expected
        up.logged(" is back at ", 2)
        up.logged("has no requests left and is taken away", 2)
        await two_serve(up.target)
    machines.add()


@pytest.mark.long
def test_ranks_on_two_machines_are_lost_and_no_token_is(machines: RayMachines, tmp_path: Path) -> None:
    folder = make_llama(tmp_path, tokenizer=True, vocab_size=300, max_position_embeddings=4096)
    sizes = ("--num-gpu-blocks", "400", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--num-threads", "1")
    divided = ("--tensor-parallel-size", "2", "--ray-placement", "spread", "--dtype", "float32")
    prompts = [[5, 7, 9], [20, 21, 22, 23], [60] * 40]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=300, ignore_eos=True)
    with (
        cadenza_up(str(folder), "--ray-address", machines.address, *sizes, *divided) as up,
        Client(up.target, reconnect_timeout_s=120) as client,
        ThreadPoolExecutor(1) as pool,
    ):

        def generate() -> list[list[int]]:
            return [output.outputs[0].token_ids for output in client.generate(prompts, params)]

        expected = generate()
        for fault in ("actor", "machine"):
            (node,) = machines.others()
            ranks, there = executors_below(psutil.Process()), executors_below(raylet_of(node))
            assert (len(ranks), len(there)) == (2, 1)
            running = pool.submit(generate)
            used = sum(there[0].cpu_times()[:2])
            while sum(there[0].cpu_times()[:2]) < used + 0.2:
                assert not running.done(), "the load ended before the fault"
            if fault == "actor":
                actor = there[0].parent()
                assert actor is not None
                actor.kill()
            else:
                machines.kill(node)
            end_within(ranks, 2)
            assert running.result(100) == expected
    died = [line for line in up.lines if "the executor died" in line]
    assert len(died) == 2
    assert all("rank" in line and ("ended" in line or "is gone" in line) for line in died), died
    machines.add()
