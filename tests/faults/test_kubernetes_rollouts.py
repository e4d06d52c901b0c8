"""Rollouts of the manifests in deploy/, run as processes: no request fails, and none loses or repeats a token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cadenza import AsyncClient
from cadenza_common.wire.transport import format_address
from tests.checkpoints import make_llama
from tests.helpers.kubernetes_api import kubernetes_api
from tests.helpers.manifests import needs_kubectl
from tests.helpers.marks import short_and_long
from tests.helpers.pods import LocalCluster, Pod, local_cluster
from tests.helpers.scheduler.rolling import ClientLoad, Seen, rolling, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), needs_kubectl]
MAX_TOKENS, NUM_REQUESTS = 250, 8
SIZES = {"CADENZA_MAX_NUM_SEQS": "48", "CADENZA_NUM_GPU_BLOCKS": "3000"}
OPTIONS = ("--max-num-seqs", "48", "--num-gpu-blocks", "3000")


UNDISTURBED: list[dict[int, Seen]] = []


async def undisturbed() -> list[dict[int, Seen]]:
    """What the load's loops see on one executor whose steps take no time: computed by the first test that needs it."""
    if not UNDISTURBED:
        executor_options = ("--simulate", "instant", "--simulate-vocab-size", "500", *OPTIONS)
        async with (
            rolling("executor_svc", *executor_options) as executor,
            rolling("scheduler_svc", "--executor", executor.address, "--skip-tokenizer-init") as front,
        ):
            UNDISTURBED.extend(await ClientLoad(front.address, MAX_TOKENS, NUM_REQUESTS).finished())
    return UNDISTURBED


def simulated(models: Path) -> dict[str, dict[str, str]]:
    """Options by which executors simulate a model whose steps take 20 ms."""
    (models / "costs.json").write_text(json.dumps({"step_us": 20000}))
    executor = {
        "CADENZA_SIMULATE": "/models/costs.json",
        "CADENZA_MODEL": "",
        "CADENZA_SIMULATE_VOCAB_SIZE": "500",
        "CADENZA_DEVICE": "cpu",
        **SIZES,
    }
    return {"executor": executor, "scheduler": {"CADENZA_SKIP_TOKENIZER_INIT": "true"}}


async def roll_executors(cluster: LocalCluster, new: list[Pod]) -> None:
    """As a Deployment with maxSurge 1 and maxUnavailable 0: a new one serves before an old one gets SIGTERM."""
    old = [pod for pod in cluster.executors if pod not in new]
    async with AsyncClient(cluster.target) as client:
        for before, after in zip(old, new, strict=True):
            cluster.serve(after)
            await serving(client, format_address(after.address, after.port("grpc")))
            await cluster.remove_executor(before)


@pytest.mark.long
@pytest.mark.parametrize(("overlay", "num_executors"), short_and_long([("cpu", 2), ("gpu", 1)], short=[("gpu", 1)]))
async def test_executors_and_scheduler_are_replaced_without_a_lost_token(
    overlay: str,
    num_executors: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By DNS in plain text, and by EndpointSlices with mutual TLS."""
    expected = await undisturbed()
    async with local_cluster(overlay, tmp_path, tmp_path, num_executors, **simulated(tmp_path)) as cluster:
        for name, value in cluster.client_environment.items():
            monkeypatch.setenv(name, value)
        new = await asyncio.gather(*(cluster.start_executor() for _ in range(num_executors)))
        load = ClientLoad(cluster.target, MAX_TOKENS, NUM_REQUESTS)
        await load.more(100)
        await roll_executors(cluster, new)
        await load.more(100)
        await cluster.replace_scheduler()
        for pod in [cluster.scheduler, *cluster.executors]:
            assert [await pod.passes(probe) for probe in ("startupProbe", "livenessProbe")] == [True, True]
        assert await load.finished() == expected
        assert "on in the next process with this --journal" in cluster.scheduler.log()
        await cluster.scheduler.terminate()
        for pod in cluster.executors:
            await pod.terminate()


@pytest.mark.long
async def test_a_scheduler_without_executors_is_alive_and_not_ready(tmp_path: Path) -> None:
    """And ready as soon as one is there; SIGTERM ends it at any time."""
    with kubernetes_api(tmp_path) as api:
        cluster = LocalCluster("cpu", tmp_path, api, tmp_path, simulated(tmp_path))
        try:
            await cluster.scheduler.start()
            for _ in range(500):
                if await cluster.scheduler.passes("livenessProbe"):
                    break
                await asyncio.sleep(0.05)
            assert await cluster.scheduler.passes("startupProbe")
            assert not await cluster.scheduler.passes("readinessProbe")
            executor = await cluster.start_executor()
            cluster.serve(executor)
            await cluster.scheduler.ready()
            await cluster.scheduler.terminate()
            await executor.terminate()
        finally:
            await cluster.kill()


@pytest.mark.long
async def test_a_replica_of_two_ranks_is_replaced_without_a_lost_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overlay's groups, with a real model: its tokens on the next replica are those that one alone gives."""
    make_llama(tmp_path / "models" / "model", tokenizer=True, vocab_size=300, max_position_embeddings=1024)
    executor: dict[str, Any] = {"CADENZA_NUM_THREADS": "1", **SIZES}
    async with local_cluster("ranks", tmp_path, tmp_path / "models", 1, executor=executor) as cluster:
        for name, value in cluster.client_environment.items():
            monkeypatch.setenv(name, value)
        expected = await ClientLoad(cluster.target, 60, 8).finished()
        new = await cluster.start_executor()
        load = ClientLoad(cluster.target, 60, 8)
        await load.more(20)
        await roll_executors(cluster, [new])
        assert await load.finished() == expected
