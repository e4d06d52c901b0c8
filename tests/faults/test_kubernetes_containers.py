"""Rollouts of the manifests in deploy/, run as containers: no request fails, and none loses or repeats a token.

Minutes, so only with CADENZA_TEST_DOCKER=1; test_kubernetes_rollouts.py runs the same as processes, and more overlays.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from cadenza import AsyncClient
from tests.checkpoints import make_llama
from tests.helpers.compose_cluster import EXECUTOR, SCHEDULER, ComposeCluster, compose_cluster
from tests.helpers.docker_engine import needs_docker
from tests.helpers.manifests import environment_of, needs_kubectl
from tests.helpers.paths import ROOT
from tests.helpers.scheduler.rolling import ClientLoad, Rounds, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_docker, needs_kubectl]
MAX_TOKENS, NUM_REQUESTS = 1500, 8
OPTIONS = {
    EXECUTOR: {"CADENZA_NUM_THREADS": "1", "CADENZA_NUM_GPU_BLOCKS": "4000", "CADENZA_MAX_NUM_SEQS": "48"},
}
"""What this machine asks for in place of what the overlay cpu says; all else is as the manifests have it."""
UPDATE = {EXECUTOR: {"CADENZA_LOG_LEVEL": "debug"}, SCHEDULER: {"CADENZA_LOG_LEVEL": "debug"}}
"""An option that changes, and so updates all pods."""


def write_overlay(folder: Path, name: str, base: str, options: dict[str, dict[str, str]]) -> str:
    """Write an overlay over another one, as a user does; return its path."""
    overlay = folder / name
    overlay.mkdir()
    changed = [
        {"name": each, "behavior": "merge", "literals": [f"{key}={value}" for key, value in own.items()]}
        for each, own in options.items()
    ]
    content = {"namespace": "cadenza", "resources": [f"../{base}"], "configMapGenerator": changed}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return str(overlay)


async def roll_executors(cluster: ComposeCluster, load: Rounds) -> None:
    """As a Deployment with maxSurge 1 and maxUnavailable 0: a new one serves before an old one gets SIGTERM."""
    strategy = cluster.pods[EXECUTOR].owner["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    async with AsyncClient(cluster.target) as client:
        for old in await cluster.containers(EXECUTOR):
            new = await cluster.add(EXECUTOR)
            port = cluster.pods[EXECUTOR].port("grpc")
            await serving(client, f"{cluster.address(new)}:{port}", within_s=60)
            await load.amid()
            await cluster.remove(old)


async def test_executors_and_scheduler_are_replaced_without_a_lost_token(tmp_path: Path) -> None:
    """Two executors by DNS, a journal on its volume, a real model; an option is changed, and all pods with it."""
    overlays = shutil.copytree(ROOT / "deploy", tmp_path / "deploy") / "overlays"
    before = write_overlay(overlays, "before", "cpu", OPTIONS)
    after = write_overlay(overlays, "after", "before", UPDATE)
    claims = {"cadenza-models": tmp_path / "models", "cadenza-journal": tmp_path / "journal"}
    model = make_llama(claims["cadenza-models"] / "model", tokenizer=True, vocab_size=300, max_position_embeddings=4096)
    for file in model.iterdir():
        file.chmod(0o644)
    claims["cadenza-journal"].mkdir()
    claims["cadenza-journal"].chmod(0o777)  # Kubernetes gives a volume to the pod's fsGroup.
    async with compose_cluster(tmp_path, before, claims) as cluster:
        expected = await ClientLoad(cluster.target, MAX_TOKENS, NUM_REQUESTS).finished()
        async with Rounds(cluster.target, MAX_TOKENS, NUM_REQUESTS, expected) as load:
            cluster.apply(after)
            await roll_executors(cluster, load)
            await load.amid()
            log = await cluster.recreate(SCHEDULER)
            await load.amid()
        assert log.count("a signal stopped it; its requests go to the others") == 2
        assert f"{NUM_REQUESTS} unfinished requests go on in the next process with this --journal" in log
        for name, count in ((EXECUTOR, 2), (SCHEDULER, 1)):
            running = await cluster.containers(name)
            assert len(running) == count
            for container in running:
                assert environment_of(after, cluster.pods[name]).items() <= cluster.environment(container).items()
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    assert cluster.passes(name, probe, container), (name, probe)
