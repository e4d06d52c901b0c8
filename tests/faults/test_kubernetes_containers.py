"""Rollouts of the manifests in deploy/, run as containers: no request fails, and none loses or repeats a token.

Minutes, so only with CADENZA_TEST_DOCKER=1; test_kubernetes_rollouts.py runs pods as processes, those of `gpu` too.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from cadenza import AsyncClient
from tests.checkpoints import make_llama
from tests.helpers.compose_cluster import EXECUTOR, SCHEDULER, ComposeCluster, Replica, compose_cluster, needs_root
from tests.helpers.docker_engine import needs_docker
from tests.helpers.kubelet import Kubelet
from tests.helpers.leader_worker_set import make_anew, roll_groups
from tests.helpers.manifests import environment_of, matches, named, needs_kubectl, of_kind
from tests.helpers.paths import ROOT
from tests.helpers.prometheus import needs_prometheus, prometheus
from tests.helpers.scheduler.rolling import ClientLoad, Rounds, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_docker, needs_kubectl, needs_root]
NUM_REQUESTS = 8
SIZES = {"CADENZA_NUM_THREADS": "1", "CADENZA_NUM_GPU_BLOCKS": "4000", "CADENZA_MAX_NUM_SEQS": "48"}
"""What this machine asks for in place of what the overlays say of executors; all else is as the manifests have it."""
UPDATE = {EXECUTOR: {"CADENZA_LOG_LEVEL": "debug"}, SCHEDULER: {"CADENZA_LOG_LEVEL": "debug"}}
"""An option that changes, and so updates all pods."""
GROUP = "cadenza-group"


class OwnOverlays:
    """Overlays over those of deploy/, as a user writes them, and the folders of their claims."""

    def __init__(self, folder: Path) -> None:
        self._folder = shutil.copytree(ROOT / "deploy", folder / "deploy") / "overlays"
        self._claims = folder / "claims"
        self._claims.mkdir()
        model = make_llama(
            self._claims / "cadenza-models" / "model", tokenizer=True, vocab_size=300, max_position_embeddings=4096
        )
        for file in model.iterdir():
            file.chmod(0o644)

    def over(
        self, base: str, name: str, options: dict[str, dict[str, str]], patches: Sequence[dict[str, Any]] = ()
    ) -> str:
        """Write one that changes options of the pods by map, and whatever patches change; returns its path."""
        overlay = self._folder / name
        overlay.mkdir()
        changed = [
            {"name": each, "behavior": "merge", "literals": [f"{key}={value}" for key, value in own.items()]}
            for each, own in options.items()
        ]
        content = {"namespace": "cadenza", "resources": [f"../{base}"], "configMapGenerator": changed}
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump({**content, "patches": list(patches)}))
        return str(overlay)

    def claims(self, overlay: str) -> dict[str, Path]:
        """A folder for each claim."""
        names = [each["metadata"]["name"] for each in of_kind(overlay, "PersistentVolumeClaim")]
        for name in names:
            (self._claims / name).mkdir(exist_ok=True)
        return {name: self._claims / name for name in names}


@pytest.fixture
def overlays(tmp_path: Path) -> OwnOverlays:
    return OwnOverlays(tmp_path)


def check_pods(cluster: ComposeCluster, frozen: Kubelet | None = None, **numbers: int) -> None:
    """So many replicas run, with the variables of now; all probes have passed, and none has ended a pod but one."""
    assert {name: len(replicas) for name, replicas in cluster.replicas.items()} == numbers
    for pod in (pod for replicas in cluster.replicas.values() for replica in replicas for pod in replica.pods):
        assert environment_of(cluster.overlay, pod.template).items() <= pod.environment.items()
        assert pod.restarts == (["livenessProbe"] if pod is frozen else []), pod.failures
        probes = {"startupProbe", "readinessProbe", "livenessProbe"} & pod.template.container.keys()
        assert {probe for probe, passed in pod.answers if passed} == probes


async def roll_executors(cluster: ComposeCluster, load: Rounds) -> None:
    """As a Deployment with maxSurge 1 and maxUnavailable 0: a new one serves before an old one gets SIGTERM."""
    strategy = cluster.templates[EXECUTOR].owner["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    async with AsyncClient(cluster.target()) as client:
        for old in list(cluster.replicas[EXECUTOR]):
            new = await cluster.start(EXECUTOR)
            await serving(client, new.address, within_s=60)
            await load.amid()
            await cluster.end(old)


async def test_executors_and_scheduler_are_replaced_without_a_lost_token(tmp_path: Path, overlays: OwnOverlays) -> None:
    """Two executors by DNS, a journal on its volume, a real model; an option is changed, and all pods with it."""
    before = overlays.over("cpu", "before", {EXECUTOR: SIZES})
    after = overlays.over("before", "after", UPDATE)
    size = 1500, NUM_REQUESTS
    async with compose_cluster(tmp_path, before, overlays.claims(before)) as cluster:
        expected = await ClientLoad(cluster.target(), *size).finished()
        async with Rounds(cluster.target(), *size, expected) as load:
            cluster.apply(after)
            await roll_executors(cluster, load)
            await load.amid()
            (log,) = await cluster.recreate(SCHEDULER)
            await load.amid()
        assert log.count("a signal stopped it; its requests go to the others") == 2
        assert f"{NUM_REQUESTS} unfinished requests go on in the next process with this --journal" in log
        check_pods(cluster, **{EXECUTOR: 2, SCHEDULER: 1})


# ---------------------------------------------------------------- groups of ranks, and TLS between all


def served_certificate(address: str, server_name: str, files: dict[str, str]) -> bytes:
    """The certificate that a service shows to one with these files now."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=files["CADENZA_TLS_CA"])
    context.load_cert_chain(files["CADENZA_TLS_CERT"], files["CADENZA_TLS_KEY"])
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), timeout=10) as connection,
        context.wrap_socket(connection, server_hostname=server_name) as end,
    ):
        shown = end.getpeercert(binary_form=True)
    assert shown
    return shown


async def renew_certificates(cluster: ComposeCluster) -> None:
    """As cert-manager and the kubelets do: the secrets have new contents, then the mounted folders."""

    def shown() -> list[bytes]:
        files = cluster.secrets.client_environment
        leaders = [(replica.address, EXECUTOR) for replica in cluster.replicas[GROUP]]
        return [served_certificate(*each, files) for each in [(cluster.target(), SCHEDULER), *leaders]]

    def issued(secret: str) -> bytes:
        return ssl.PEM_cert_to_DER_cert(cluster.secrets.files(secret)["tls.crt"].decode())

    old = await asyncio.to_thread(shown)
    cluster.secrets.renew()
    cluster.mount_secrets()
    new = await asyncio.to_thread(shown)
    assert not set(old) & set(new)
    assert new == [issued("cadenza-scheduler-tls"), *[issued("cadenza-executor-tls")] * (len(new) - 1)]


def check_monitoring(cluster: ComposeCluster, folder: Path) -> None:
    """A Prometheus that scrapes what the ServiceMonitor says answers KEDA's query, and has nothing to warn of."""
    (monitor,), (scaler,) = (of_kind(cluster.overlay, kind) for kind in ("ServiceMonitor", "ScaledObject"))
    (endpoint,) = monitor["spec"]["endpoints"]
    pods = [pod for replicas in cluster.replicas.values() for replica in replicas for pod in replica.pods]
    jobs = {
        service["metadata"]["name"]: [
            f"{pod.address}:{pod.template.port(endpoint['port'])}"
            for pod in pods
            if matches({"matchLabels": service["spec"]["selector"]}, pod.template.labels)
        ]
        for service in of_kind(cluster.overlay, "Service")
        if matches(monitor["spec"]["selector"], service["metadata"]["labels"])
    }
    assert {job: len(addresses) for job, addresses in jobs.items()} == {SCHEDULER: 1, EXECUTOR: 2}
    (trigger,) = scaler["spec"]["triggers"]
    with prometheus(folder, jobs, namespace=monitor["metadata"]["namespace"]) as running:
        running.until("sum(up)", 3)
        running.until(f"({trigger['metadata']['query']}) > bool 0", 1)
        assert running.series("ALERTS") == []


@needs_prometheus
async def test_groups_of_ranks_are_replaced_without_a_lost_token(
    tmp_path: Path, overlays: OwnOverlays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of two, by EndpointSlices, all over mutual TLS. The certificates are renewed, a worker is killed, its
    group is made anew, and then an option is changed, and all pods with it.
    """
    before = overlays.over("ranks", "before", {EXECUTOR: SIZES})
    after = overlays.over("before", "after", UPDATE)
    size = 400, NUM_REQUESTS
    async with compose_cluster(tmp_path, before, overlays.claims(before), {GROUP: 2}) as cluster:
        for name, value in cluster.secrets.client_environment.items():
            monkeypatch.setenv(name, value)
        expected = await ClientLoad(cluster.target(), *size).finished()
        async with Rounds(cluster.target(), *size, expected) as load, AsyncClient(cluster.target()) as client:
            await load.amid()
            await asyncio.to_thread(check_monitoring, cluster, tmp_path)
            await renew_certificates(cluster)
            await load.amid()
            broken = cluster.replicas[GROUP][0]
            await broken.pods[1].kill()
            (leader_code, leader_log), (worker_code, _) = await make_anew(cluster, broken)
            assert (leader_code, worker_code) == (5, 137)
            assert "rank 1 ended" in leader_log
            await serving(client, cluster.replicas[GROUP][-1].address)
            await load.amid()
            cluster.apply(after)
            assert all("stopping" in log for log in await roll_groups(cluster, GROUP))
            await load.amid()
            (log,) = await cluster.recreate(SCHEDULER)
            await load.amid()
        assert log.count("a signal stopped it; its requests go to the others") == 3
        assert "on in the next process with this --journal" in log
        check_pods(cluster, **{GROUP: 2, SCHEDULER: 1})


# ---------------------------------------------------------------- several schedulers


def metrics_of(replica: Replica, port: str) -> dict[str, float]:
    """Sums of the values of each metric, as it answers at its port of this name."""
    (pod,) = replica.pods
    with urllib.request.urlopen(f"http://{pod.address}:{pod.template.port(port)}/metrics", timeout=5) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    found: dict[str, float] = {}
    for line in lines:
        name, value = line.partition("{")[0].partition(" ")[0], float(line.rpartition(" ")[2])
        found[name] = found.get(name, 0) + value
    return found


PICKED_BY = {
    "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:lora_requests_info",
    "vllm:cache_config_info",
}  # fmt: skip
"""What an endpoint picker reads by default: the options of that of kubernetes-sigs/gateway-api-inference-extension."""
OFTEN_ALIVE = {
    "target": {"kind": "Deployment", "name": f"{EXECUTOR}-b"},
    "patch": yaml.safe_dump(
        [{"op": "replace", "path": "/spec/template/spec/containers/0/livenessProbe/periodSeconds", "value": 1}]
    ),
}
"""So that a frozen executor is noticed within half a minute, not two."""
LEAVING_S = 10
"""How long a load takes that begins with the hook: longer than its 5 s, and less than these and the drain's 25 s."""


async def test_a_scheduler_of_a_pool_leaves_it_in_order(tmp_path: Path, overlays: OwnOverlays) -> None:
    """Both are reached where a gateway connects, and have the metrics that an endpoint picker reads. One is replaced:
    what comes before the router has seen it ends there, and the other takes what comes later. Meanwhile an executor of
    that one is frozen, until its liveness probe has it started again.
    """
    overlay = overlays.over("pool", "own", {f"{EXECUTOR}-{cell}": SIZES for cell in "ab"}, [OFTEN_ALIVE])
    short = 300, NUM_REQUESTS
    async with compose_cluster(tmp_path, overlay, overlays.claims(overlay)) as cluster:
        pool = named(overlay, "InferencePool", "cadenza")["spec"]
        chosen = [name for name, pod in cluster.templates.items() if matches(pool["selector"], pod.labels)]
        first, second = (replica for name in sorted(chosen) for replica in cluster.replicas[name])
        frozen = cluster.replicas[f"{EXECUTOR}-b"][0].pods[0]
        await frozen.freeze()
        (port,) = (each["number"] for each in pool["targetPorts"])
        assert all(each.address.endswith(f":{port}") for each in (first, second))
        began, load = time.monotonic(), ClientLoad(first.address, *short)
        await load.more(100)
        busy, idle = await asyncio.to_thread(lambda: [metrics_of(each, "metrics") for each in (first, second)])
        assert busy.keys() & idle.keys() >= PICKED_BY
        assert (busy["vllm:num_requests_running"] > 0, idle["vllm:num_requests_running"]) == (True, 0)
        expected = await load.finished()
        long = min(3900, round(short[0] * LEAVING_S / (time.monotonic() - began))), NUM_REQUESTS
        expected_long = await ClientLoad(first.address, *long).finished()
        leaving = asyncio.create_task(cluster.recreate(first.owner))
        late = ClientLoad(first.address, *long)
        await late.more(1)
        assert await ClientLoad(second.address, *short).finished() == expected
        assert await late.finished() == expected_long
        (log,) = await leaving
        assert f"draining: {NUM_REQUESTS} unfinished requests go on" in log
        assert "in the next process with this --journal" not in log
        assert await ClientLoad(cluster.target(first.owner), *short).finished() == expected
        await frozen.until_restarted()
        async with AsyncClient(second.address) as client:
            await serving(client, cluster.replicas[f"{EXECUTOR}-b"][0].address, within_s=60)
        numbers = {f"{name}-{cell}": count for cell in "ab" for name, count in ((EXECUTOR, 2), (SCHEDULER, 1))}
        check_pods(cluster, frozen, **numbers)
