"""The manifests of deploy/overlays with Ray: a cluster with the scheduler on its head and executors on its workers."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from cadenza_launcher.services.options import ignored_variables, read_places, route_options
from tests.helpers.compose import last_instruction, read_dockerfile
from tests.helpers.manifests import (
    RAY,
    RAY_SERVICE,
    admits,
    container_of,
    named,
    needs_kubectl,
    ray_cluster,
    ray_groups,
)
from tests.helpers.paths import ROOT

pytestmark = needs_kubectl


BOTH = pytest.mark.parametrize("overlay", [RAY, RAY_SERVICE])


def head_script() -> str:
    (script,) = container_of(ray_groups(RAY)["head"])["args"]
    return script


def variables() -> dict[str, str]:
    (source,) = container_of(ray_groups(RAY)["head"])["envFrom"]
    return named(RAY, "ConfigMap", source["configMapRef"]["name"])["data"]


def test_options_are_those_of_cadenza_up() -> None:
    """And the workers have room for as many executors as there may be, of which each has a worker's processors."""
    environment = variables()
    assert not list(ignored_variables(environment))
    arguments = route_options("model", {"metrics_port": 9464}, environment=environment)
    assert arguments.uses_ray
    assert not any("ray" in each or "metrics" in each for each in arguments.executor)
    assert "--metrics-port=9464" in arguments.scheduler
    workers = ray_groups(RAY)["executors"]
    assert arguments.values["max_executors"] == workers["replicas"] == workers["maxReplicas"]
    assert arguments.values["num_threads"] == int(container_of(workers)["resources"]["limits"]["cpu"])
    assert read_places({}, environment=environment)["model"].value.startswith("/models/")


@BOTH
def test_the_version_of_ray_is_that_of_the_image(overlay: str) -> None:
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={ray_cluster(overlay)['rayVersion']}" in pinned
    target = {RAY: "ray", RAY_SERVICE: "ray-serve"}[overlay]
    user, group = last_instruction(read_dockerfile(), target, "USER").split(":")
    for each in ray_groups(overlay).values():
        context = each["template"]["spec"]["securityContext"]
        assert (context["runAsUser"], context["fsGroup"], context["runAsNonRoot"]) == (int(user), int(group), True)
        assert container_of(each)["image"].startswith(f"cadenza-{target}:")


@BOTH
def test_pods_are_confined_and_have_what_they_mount(overlay: str) -> None:
    for group in ray_groups(overlay).values():
        container, spec = container_of(group), group["template"]["spec"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
        named(overlay, "ServiceAccount", spec["serviceAccountName"])
        for volume in spec["volumes"]:
            if "persistentVolumeClaim" in volume:
                named(overlay, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])


@BOTH
def test_clients_reach_the_scheduler_and_only_the_cluster_reaches_ray(overlay: str) -> None:
    """Whoever reaches Ray may run programs on its machines."""
    head, worker = (each["template"]["metadata"]["labels"] for each in ray_groups(overlay).values())
    client = {"cadenza.dev/client": "true"}
    assert admits(overlay, head, client, 50051)
    for port in (6379, 6380, 8265, 9464):
        assert not admits(overlay, head, client, port)
        assert not admits(overlay, worker, client, port)
    for port in (6379, 6380, 40000):
        assert admits(overlay, head, worker, port)
        assert admits(overlay, worker, head, port)
        assert admits(overlay, worker, worker, port)
    assert not admits(overlay, head, {"app": "any"}, 50051)


def test_the_service_is_that_of_the_head() -> None:
    head = ray_groups(RAY)["head"]
    service = named(RAY, "Service", "cadenza-scheduler")
    assert service["spec"]["selector"].items() <= head["template"]["metadata"]["labels"].items()
    assert {each["targetPort"] for each in service["spec"]["ports"]} <= {
        each["name"] for each in container_of(head)["ports"]
    }


_STUBS = {
    "ray": 'echo "ray $*" >> log; [ "$1" = start ] && { touch up; while [ -e up ]; do sleep 0.05; done; exit 3; }; '
    "[ -e up ]\n",
    "cadenza": 'trap "echo drained >> log; exit 0" TERM; echo "cadenza $*" >> log; while :; do sleep 0.05; done\n',
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("ends", ["ray", "term", "cadenza"])
def test_the_head_ends_with_ray_and_with_the_server(tmp_path: Path, ends: str) -> None:
    """Its script, with small scripts in place of both programs."""
    for name, text in _STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "KUBERAY_GEN_RAY_START_CMD": "ray start"}
    command = ["/bin/bash", "-c", head_script().replace("ulimit -n 65536", "")]
    log = tmp_path / "log"
    with subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True) as head:
        try:
            while not log.exists() or "cadenza up" not in log.read_text():
                assert head.poll() is None
            if ends == "ray":
                (tmp_path / "up").unlink()
            elif ends == "term":
                head.send_signal(signal.SIGTERM)
            else:
                (up,) = (each for each in psutil.Process(head.pid).children() if "cadenza" in " ".join(each.cmdline()))
                up.terminate()
            head.wait(10)
        finally:
            if head.poll() is None:
                os.killpg(head.pid, signal.SIGKILL)
            (tmp_path / "up").unlink(missing_ok=True)
    lines = log.read_text().splitlines()
    assert "ray start" in lines
    assert lines[-1] == "drained"
    (up,) = (line for line in lines if line.startswith("cadenza"))
    assert "--ray-address 127.0.0.1:6379" in up
