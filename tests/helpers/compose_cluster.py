"""Runs the pods of an overlay as containers under Compose, and replaces them as the controllers of Kubernetes do."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.helpers.docker_engine import compose_tool, run
from tests.helpers.kubelet import Kubelet
from tests.helpers.kubernetes_api import FakeKubernetes, kubernetes_api
from tests.helpers.leader_worker_set import group_pods
from tests.helpers.manifest_compose import PodInstance, Service, Storage, compose_service
from tests.helpers.manifest_secrets import ManifestSecrets, mount
from tests.helpers.manifests import matches, named, of_kind, pod_templates

_PROJECT = f"cadenza-manifests-{os.getpid()}"
SCHEDULER, EXECUTOR = "cadenza-scheduler", "cadenza-executor"
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="gives volumes to the groups of pods, and listens at port 443"
)


@dataclass(frozen=True, slots=True)
class Replica:
    """What an owner has several of: a pod of a Deployment, or a LeaderWorkerSet's group of pods, the leader first."""

    owner: str
    index: int
    """That of a group; 0 for a Deployment's pod."""
    pods: tuple[Kubelet, ...]

    @property
    def address(self) -> str:
        """Where the others reach it, HOST:PORT."""
        first = self.pods[0]
        return f"{first.address}:{first.template.port('grpc')}"


class ComposeCluster:
    """The pods of an overlay that run, and what they know of each other."""

    def __init__(
        self, folder: Path, overlay: str, claims: Mapping[str, Path], gateway: str, api: FakeKubernetes | None
    ) -> None:
        """gateway: the address of this machine for containers, at which the API server listens, if there is one."""
        self.replicas: dict[str, list[Replica]] = {}
        self.secrets = ManifestSecrets(overlay, folder / "certificates")
        self._file = folder / "compose.yaml"
        self._tool = *compose_tool(), "--project-name", _PROJECT, "--file", str(self._file)
        self._gateway, self._api = gateway, api
        self._services: dict[str, Service] = {}
        self._kubelets: list[Kubelet] = []
        self._numbers = itertools.count(1)
        self._storage = Storage(claims, {name: folder / name for name in self.secrets.names}, api and api.account)
        self.apply(overlay)
        self._ports = {name: _free_port() for name, pod in self.templates.items() if pod.party == "scheduler"}
        (self._group,) = {pod.spec["securityContext"]["fsGroup"] for pod in self.templates.values()}
        self._give_claims()
        self.mount_secrets()

    def target(self, scheduler: str = SCHEDULER) -> str:
        """Where clients of this machine reach the service of a scheduler, whichever pod that has."""
        return f"127.0.0.1:{self._ports[scheduler]}"

    def apply(self, overlay: str) -> None:
        """Take the manifests of another overlay for the pods that are started from now on."""
        self.overlay = overlay
        self.templates = {pod.name: pod for pod in pod_templates(overlay)}

    def mount_secrets(self) -> None:
        """Write the secrets as they are now into the folders that pods have mounted."""
        volumes = [volume for pod in self.templates.values() for volume in pod.spec["volumes"]]
        for secret in (volume["secret"] for volume in volumes if "secret" in volume):
            name = secret["secretName"]
            mount(self._storage.secrets[name], self.secrets.files(name), self._group, secret["defaultMode"])

    def build(self) -> None:
        """Build the images."""
        for image in {pod.container["image"] for pod in self.templates.values()}:
            target = image.partition(":")[0].removeprefix("cadenza-")
            run("docker", "build", "--target", target, "--tag", image, ".")

    async def up(self, replicas: Mapping[str, int]) -> None:
        """Start all pods, and wait until each is ready. replicas: of owners whose number is a scaler's business."""
        counts = {name: pod.owner["spec"].get("replicas") or replicas[name] for name, pod in self.templates.items()}
        await self._start([(name, index) for name, count in counts.items() for index in range(count)])

    async def start(self, owner: str, index: int = 0) -> Replica:
        """Start one more replica, with the manifest of now; return it once it is ready. index: of a group."""
        (new,) = await self._start([(owner, index)])
        return new

    async def end(self, replica: Replica) -> list[str]:
        """Delete the pods of a replica: they end by themselves, without an error. Returns their logs."""
        logs = await asyncio.gather(*(pod.end() for pod in replica.pods))
        self._gone(replica)
        return logs

    async def recreate(self, owner: str) -> list[str]:
        """As the strategy Recreate: the next pod starts when the last one has ended, whose log this returns."""
        assert self.templates[owner].owner["spec"]["strategy"] == {"type": "Recreate"}
        (old,) = self.replicas[owner]
        logs = await self.end(old)
        await self.start(owner)
        return logs

    async def remove_ended(self, replica: Replica) -> list[tuple[int, str]]:
        """Wait until all pods of a replica have ended, in whichever way, and remove them. Returns codes and logs."""
        codes = await asyncio.gather(*(pod.ended() for pod in replica.pods))
        logs = await asyncio.gather(*(pod.log() for pod in replica.pods))
        await asyncio.gather(*(pod.remove() for pod in replica.pods))
        self._gone(replica)
        return list(zip(codes, logs, strict=True))

    async def down(self) -> None:
        """End and remove all. What they have printed goes into a file, for whoever looks for a failure."""
        await asyncio.gather(*(each.forget() for each in self._kubelets))
        self._file.with_suffix(".log").write_text(await asyncio.to_thread(self._compose, "logs", "--no-color"))
        await asyncio.to_thread(self._compose, "down", "--volumes", "--remove-orphans", "--timeout=1")

    async def _start(self, wanted: list[tuple[str, int]]) -> list[Replica]:
        made = [self._pods(owner, index) for owner, index in wanted]
        names = [pod.name for pods in made for pod in pods]
        for pod in itertools.chain(*made):
            self._services[pod.name] = compose_service(self.overlay, pod, self._storage, self._gateway)
        self._file.write_text(yaml.safe_dump(self._content()))
        await asyncio.to_thread(self._compose, "up", "--detach", "--no-deps", *names)
        started = []
        for (owner, index), pods in zip(wanted, made, strict=True):
            kubelets = tuple([await self._watch(pod) for pod in pods])
            started.append(Replica(owner, index, kubelets))
            self.replicas.setdefault(owner, []).append(started[-1])
        await asyncio.gather(*(pod.until_ready() for each in started for pod in each.pods))
        return started

    def _pods(self, owner: str, index: int) -> list[PodInstance]:
        template = self.templates[owner]
        if template.owner["kind"] == "LeaderWorkerSet":
            return group_pods(self.overlay, template, index)
        port = self._ports.get(owner)
        published = None if port is None else f"127.0.0.1:{port}"
        return [PodInstance(f"{owner}-{next(self._numbers)}", template, {}, published=published)]

    async def _watch(self, pod: PodInstance) -> Kubelet:
        container = (await asyncio.to_thread(self._compose, "ps", "--quiet", pod.name)).strip()
        self._kubelets.append(Kubelet(pod.template, container, self._publish))
        return self._kubelets[-1]

    def _gone(self, replica: Replica) -> None:
        self.replicas[replica.owner].remove(replica)
        for pod in replica.pods:
            self._kubelets.remove(pod)
        self._publish()

    def _publish(self) -> None:
        """Let the API server's slices have the pods of the executors' service, ready or not."""
        if self._api is not None:
            selector = {"matchLabels": named(self.overlay, "Service", self._api.service)["spec"]["selector"]}
            chosen = [pod for pod in self._kubelets if matches(selector, pod.template.labels)]
            self._api.publish({pod.address: pod.ready for pod in chosen})

    def _give_claims(self) -> None:
        """As with an fsGroup: what pods may write belongs to their group."""
        for pod in self.templates.values():
            for each in pod.container["volumeMounts"]:
                claim = pod.volume_of(each).get("persistentVolumeClaim")
                if claim and not each.get("readOnly"):
                    folder = self._storage.claims[claim["claimName"]]
                    os.chown(folder, -1, self._group)
                    folder.chmod(0o2775)

    def _content(self) -> dict[str, object]:
        return {"services": self._services, "networks": {"default": {"external": True, "name": _PROJECT}}}

    def _compose(self, *arguments: str) -> str:
        return run(*self._tool, *arguments)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def _network() -> Iterator[str]:
    """A network for the containers; yields the address of this machine in it."""
    run("docker", "network", "create", _PROJECT)
    try:
        (found,) = json.loads(run("docker", "network", "inspect", _PROJECT))
        (subnet,) = found["IPAM"]["Config"]
        yield subnet["Gateway"]
    finally:
        run("docker", "network", "rm", _PROJECT)


@asynccontextmanager
async def compose_cluster(
    folder: Path, overlay: str, claims: Mapping[str, Path], replicas: Mapping[str, int] | None = None
) -> AsyncIterator[ComposeCluster]:
    """Images that are built, and pods that are ready; all are removed at the end. replicas: as in `up`."""
    with ExitStack() as stack:
        gateway = stack.enter_context(_network())
        api = None
        if of_kind(overlay, "Role"):
            api = stack.enter_context(kubernetes_api(folder, listen=(gateway, 443)))
        cluster = ComposeCluster(folder, overlay, claims, gateway, api)
        await asyncio.to_thread(cluster.build)
        try:
            await cluster.up(replicas or {})
            yield cluster
        finally:
            await cluster.down()
