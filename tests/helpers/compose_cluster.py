"""Runs the containers of an overlay under Compose, and replaces them as the controllers of Kubernetes do."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

from tests.helpers.docker_engine import compose_tool, inspect, run
from tests.helpers.manifest_compose import compose_file, replicas
from tests.helpers.manifests import PodTemplate, pod_templates
from tests.helpers.probes import passes_from_outside

_PROJECT = "cadenza-manifests"
_NUM_LOOKS, _LOOK_S = 600, 0.2
SCHEDULER, EXECUTOR = "cadenza-scheduler", "cadenza-executor"


class ComposeCluster:
    """The containers of an overlay. The scheduler's service has a port of the loopback."""

    def __init__(self, folder: Path, overlay: str, claims: Mapping[str, Path]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.target = f"127.0.0.1:{free.getsockname()[1]}"
        self._file, self._claims = folder / "compose.yaml", claims
        self._tool = *compose_tool(), "--project-name", _PROJECT, "--file", str(self._file)
        self.pods: dict[str, PodTemplate] = {}
        self.apply(overlay)

    def apply(self, overlay: str) -> None:
        """Take the manifests of another overlay for the containers that are started from now on."""
        self.pods = {pod.name: pod for pod in pod_templates(overlay)}
        published = {SCHEDULER: int(self.target.rpartition(":")[2])}
        self._file.write_text(yaml.safe_dump(compose_file(overlay, self._claims, published)))
        self._replicas = replicas(overlay)

    def build(self) -> None:
        """Build the images."""
        self._compose("build")

    async def up(self) -> None:
        """Start all containers, and wait until each is ready."""
        scale = [f"--scale={name}={count}" for name, count in self._replicas.items()]
        await asyncio.to_thread(self._compose, "up", "--detach", *scale)
        for name in self.pods:
            for container in await self.containers(name):
                await self.ready(container)

    async def containers(self, name: str) -> list[str]:
        """Those of a Deployment."""
        return (await asyncio.to_thread(self._compose, "ps", "--quiet", name)).split()

    async def add(self, name: str) -> str:
        """Start one more container of a Deployment, with its manifest of now; return it once it is ready."""
        before = await self.containers(name)
        scale = f"--scale={name}={len(before) + 1}"
        await asyncio.to_thread(self._compose, "up", "--detach", "--no-deps", "--no-recreate", scale, name)
        (new,) = set(await self.containers(name)) - set(before)
        await self.ready(new)
        return new

    async def remove(self, container: str) -> str:
        """End a container with SIGTERM; it must end by itself within its grace period, without an error. Its log."""
        return await asyncio.to_thread(_remove, container)

    async def recreate(self, name: str) -> str:
        """As the strategy Recreate: the next container starts when the last one has ended, whose log this returns."""
        assert self.pods[name].owner["spec"]["strategy"] == {"type": "Recreate"}
        (old,) = await self.containers(name)
        log = await self.remove(old)
        await self.add(name)
        return log

    async def ready(self, container: str) -> None:
        """Wait until the health check of a container, its readiness probe, passes."""
        for _ in range(_NUM_LOOKS):
            state = (await asyncio.to_thread(inspect, container))["State"]
            if state["Health"]["Status"] == "healthy":
                return
            await asyncio.sleep(_LOOK_S)
        raise AssertionError(f"{container} is not ready: {state}")

    def passes(self, name: str, probe: str, container: str) -> bool:
        """Run a probe of a Deployment's container once, as its node does."""
        return passes_from_outside(self.pods[name], probe, self.address(container))

    def address(self, container: str) -> str:
        """The address of a container on the network of all."""
        (network,) = inspect(container)["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    def environment(self, container: str) -> dict[str, str]:
        """The variables of a container."""
        return dict(each.split("=", 1) for each in inspect(container)["Config"]["Env"])

    def down(self) -> None:
        """End and remove all."""
        self._compose("down", "--volumes", "--remove-orphans")

    def _compose(self, *arguments: str) -> str:
        return run(*self._tool, *arguments)


def _remove(container: str) -> str:
    grace_s, began = inspect(container)["Config"]["StopTimeout"], time.monotonic()
    run("docker", "stop", container)
    took_s, log = time.monotonic() - began, run("sh", "-c", 'docker logs "$0" 2>&1', container)
    assert took_s < grace_s, log
    assert inspect(container)["State"]["ExitCode"] == 0, log
    run("docker", "rm", container)
    return log


@asynccontextmanager
async def compose_cluster(folder: Path, overlay: str, claims: Mapping[str, Path]) -> AsyncIterator[ComposeCluster]:
    """Images that are built, and containers that are ready; all containers are removed at the end."""
    cluster = ComposeCluster(folder, overlay, claims)
    try:
        await asyncio.to_thread(cluster.build)
        await cluster.up()
        yield cluster
    finally:
        await asyncio.to_thread(cluster.down)
