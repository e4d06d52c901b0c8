"""Runs the pods of an overlay as processes of this machine, each at an address of its own, as a cluster would.

Only what a container has and a process has not is replaced: `python` is this one, 0.0.0.0 and 127.0.0.1 are the pod's
address on the loopback, a mounted path is a folder, and the cluster's DNS and API server are the test's (in_pod.py).
Commands, environment, probes and grace periods are those of the manifests.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

from tests.helpers.compose import last_instruction, read_dockerfile
from tests.helpers.kubernetes_api import FakeKubernetes, kubernetes_api
from tests.helpers.machine.loopback import new_address
from tests.helpers.manifest_secrets import ManifestSecrets, mount
from tests.helpers.manifests import PodTemplate, environment_of, named, pod_templates, worker_template
from tests.helpers.paths import ROOT
from tests.helpers.probes import failure_from_outside

_READY_S = 60


class Pod:
    """A pod that has been started."""

    def __init__(
        self, cluster: LocalCluster, template: PodTemplate, address: str, variables: Mapping[str, str] | None = None
    ) -> None:
        """variables: those that the owner of the pod adds."""
        self.template = template
        self.address = address
        self.process: Process
        self.log_file = cluster.folder / f"{template.party}-{address}.log"
        self.workers: list[Pod] = []
        """Those of the group that it leads."""
        self._variables = dict(variables or {})
        self._cluster = cluster
        self._folders = cluster.mounted(template, address)

    async def start(self) -> None:
        container = self.template.container
        target = container["image"].partition(":")[0].removeprefix("cadenza-")
        command = [
            *yaml.safe_load(last_instruction(read_dockerfile(), target, "ENTRYPOINT")),
            *container.get("args", []),
        ]
        environment = environment_of(self._cluster.overlay, self.template) | self._cluster.chosen.get(target, {})
        own = {name: value for name, value in os.environ.items() if not name.startswith("CADENZA_")}
        with self.log_file.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(ROOT / "tests" / "helpers" / "in_pod.py")),
                *(self._local(part) for part in command[1:]),
                env={
                    **own,
                    **{name: self._local(value) for name, value in environment.items()},
                    **self._variables,
                    "TEST_CLUSTER": str(self._cluster.file),
                },
                stdout=DEVNULL,
                stderr=log,
            )

    async def passes(self, name: str) -> bool:
        """Run a probe once: readinessProbe, livenessProbe or startupProbe."""
        match self.template.container[name]:
            case {"exec": {"command": ["python", *rest]}}:
                command = (sys.executable, *(self._local(part) for part in rest))
                process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
                return await process.wait() == 0
        return await asyncio.to_thread(failure_from_outside, self.template, name, self.address) is None

    def port(self, name: str) -> int:
        return self.template.port(name)

    async def ready(self) -> None:
        """Probe it until it is ready."""
        async with asyncio.timeout(_READY_S):
            while not await self.passes("readinessProbe"):
                assert self.process.returncode is None, self.log()

    async def terminate(self) -> None:
        """SIGTERM; it must end by itself within the grace period."""
        self.process.terminate()
        async with asyncio.timeout(self.template.spec["terminationGracePeriodSeconds"]):
            assert await self.process.wait() == 0, self.log()

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def _local(self, text: str) -> str:
        places = "|".join(map(re.escape, sorted(self._folders, key=len, reverse=True)))
        text = re.sub(rf"(?<![\w/])({places})(?=/|$)", lambda found: self._folders[found[1]], text)
        return re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1)(?=:|$)", self.address, text)


class LocalCluster:
    """The pods of an overlay, and what they know of each other. `chosen`: options of a party instead of the maps'."""

    def __init__(
        self, overlay: str, folder: Path, api: FakeKubernetes, models: Path, chosen: Mapping[str, dict[str, str]]
    ) -> None:
        self.overlay = overlay
        self.folder = folder
        self.chosen = chosen
        self.file = folder / "cluster.json"
        self.executors: list[Pod] = []
        self._api = api
        self._models = models
        self._templates = {template.party: template for template in pod_templates(overlay)}
        self._worker = worker_template(overlay)
        self._names = folder / "names.json"
        self._listed: dict[str, bool] = {}
        account = [api.cluster.host, api.cluster.port, str(api.account)]
        self.file.write_text(json.dumps({"names": str(self._names), "api": account}))
        self._secrets = ManifestSecrets(overlay, folder / "certs")
        self.scheduler = Pod(self, self._templates["scheduler"], new_address())
        self._names.write_text("{}")

    @property
    def target(self) -> str:
        """Where clients connect to: the address of the scheduler's service."""
        return f"{self.scheduler.address}:{self.scheduler.port('grpc')}"

    @property
    def client_environment(self) -> dict[str, str]:
        """As in `ManifestSecrets`."""
        return self._secrets.client_environment

    async def start_executor(self) -> Pod:
        """Start an executor, or a group, whose probe passes, and which its service does not have yet."""
        pod = self._new_executor()
        self.executors.append(pod)
        for each in (pod, *pod.workers):
            await each.start()
        self._publish(pod, is_ready=False)
        await pod.ready()
        return pod

    def _new_executor(self) -> Pod:
        template, address = self._templates["executor"], new_address()
        if self._worker is None:
            return Pod(self, template, address)
        size = template.owner["spec"]["leaderWorkerTemplate"]["size"]
        variables = {"LWS_LEADER_ADDRESS": address, "LWS_GROUP_SIZE": str(size)}
        leader = Pod(self, template, address, {**variables, "LWS_WORKER_INDEX": "0"})
        for index in range(1, size):
            own = {**variables, "LWS_WORKER_INDEX": str(index)}
            leader.workers.append(Pod(self, self._worker, new_address(), own))
        return leader

    def serve(self, pod: Pod) -> None:
        """Let the service of the executors have it."""
        self._publish(pod, is_ready=True)

    async def remove_executor(self, pod: Pod) -> None:
        """What Kubernetes does with a pod that is deleted: it is not ready any more, and gets SIGTERM."""
        self._publish(pod, is_ready=False)
        await asyncio.gather(*(each.terminate() for each in (*pod.workers, pod)))
        self._publish(pod, is_ready=None)
        self.executors.remove(pod)

    async def start_scheduler(self) -> None:
        await self.scheduler.start()
        await self.scheduler.ready()

    async def replace_scheduler(self) -> None:
        """As strategy Recreate: the next pod starts when the last one has ended. The service's address stays."""
        assert self.scheduler.template.owner["spec"]["strategy"] == {"type": "Recreate"}
        await self.scheduler.terminate()
        await self.start_scheduler()

    def mounted(self, template: PodTemplate, address: str) -> dict[str, str]:
        """The folder behind each mounted path: a claim is the same for all pods, a scratch folder is the pod's own."""
        return {
            mount["mountPath"]: str(self._volume(template.volume_of(mount), address))
            for mount in template.container["volumeMounts"]
        }

    def _volume(self, volume: dict[str, object], address: str) -> Path:
        match volume:
            case {"persistentVolumeClaim": {"claimName": "cadenza-models"}}:
                return self._models
            case {"persistentVolumeClaim": {"claimName": str(claim)}}:
                folder = self.folder / claim
            case {"secret": {"secretName": str(secret)}}:
                folder = self.folder / secret
                return folder if folder.exists() else mount(folder, self._secrets.files(secret))
            case {"emptyDir": {}}:
                folder = self.folder / f"{volume['name']}-{address}"
            case _:
                raise AssertionError(f"a volume that this rig does not know: {volume}")
        folder.mkdir(exist_ok=True)
        return folder

    def _publish(self, pod: Pod, *, is_ready: bool | None) -> None:
        """Tell the name and the slices of the service. None: the pod is gone."""
        self._listed.pop(pod.address, None)
        if is_ready is not None:
            self._listed[pod.address] = is_ready
        service = named(self.overlay, "Service", "cadenza-executor")
        ready = [address for address, serves in self._listed.items() if serves]
        new = self._names.with_suffix(".new")
        new.write_text(json.dumps({service["metadata"]["name"]: ready} if ready else {}))
        new.replace(self._names)
        self._api.publish(self._listed)

    async def kill(self) -> None:
        workers = [worker for pod in self.executors for worker in pod.workers]
        for pod in [self.scheduler, *self.executors, *workers]:
            if hasattr(pod, "process") and pod.process.returncode is None:
                pod.process.kill()
                await pod.process.wait()


@asynccontextmanager
async def local_cluster(
    overlay: str, folder: Path, models: Path, num_executors: int, **chosen: dict[str, str]
) -> AsyncIterator[LocalCluster]:
    """An overlay whose scheduler is ready, with so many executors; what runs at the end is killed."""
    with kubernetes_api(folder) as api:
        cluster = LocalCluster(overlay, folder, api, models, chosen)
        try:
            for pod in await asyncio.gather(*(cluster.start_executor() for _ in range(num_executors))):
                cluster.serve(pod)
            await cluster.start_scheduler()
            yield cluster
        finally:
            await cluster.kill()
