"""Renders the manifests of deploy/ by `kubectl kustomize`, and reads them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.paths import ROOT

OVERLAYS = ("cpu", "gpu", "ranks", "pool")
"""Those whose pods are the two services."""
RAY, RAY_SERVICE = "ray", "ray-service"
"""The overlays whose pods are machines of a Ray cluster."""
KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="no kubectl, which renders the manifests")
Manifest = dict[str, Any]


@functools.cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """What `kubectl apply -k` sends for an overlay: one of deploy/ by its name, or another folder by its whole path.

    Fails on warnings too.
    """
    return build(ROOT / "deploy" / "overlays" / overlay)


def build(folder: Path) -> tuple[Manifest, ...]:
    """The same for any folder with a kustomization."""
    assert KUBECTL
    command = [KUBECTL, "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    return tuple(yaml.load_all(done.stdout, yaml.CSafeLoader))


def of_kind(overlay: str, *kinds: str) -> list[Manifest]:
    return [each for each in rendered(overlay) if each["kind"] in kinds]


def named(overlay: str, kind: str, name: str) -> Manifest:
    (found,) = (each for each in of_kind(overlay, kind) if each["metadata"]["name"] == name)
    return found


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """The pods of a Deployment, or of a LeaderWorkerSet's groups."""

    owner: Manifest
    labels: dict[str, str]
    """With those that LeaderWorkerSet gives its leaders."""
    spec: Manifest

    @property
    def name(self) -> str:
        return self.owner["metadata"]["name"]

    @property
    def container(self) -> Manifest:
        (only,) = self.spec["containers"]
        return only

    @property
    def party(self) -> str:
        """scheduler or executor."""
        return self.container["name"]

    def port(self, name: str | int) -> int:
        """The number of a port of the container that has this name; a number is itself."""
        if isinstance(name, int):
            return name
        (port,) = (each["containerPort"] for each in self.container["ports"] if each["name"] == name)
        return port

    def volume_of(self, mount: Manifest) -> Manifest:
        """What is mounted by one of the container's volumeMounts."""
        (volume,) = (each for each in self.spec["volumes"] if each["name"] == mount["name"])
        return volume


def pod_templates(overlay: str) -> list[PodTemplate]:
    return list(_pod_templates(overlay))


def _pod_templates(overlay: str) -> Iterator[PodTemplate]:
    for owner in of_kind(overlay, "Deployment"):
        template = owner["spec"]["template"]
        yield PodTemplate(owner, template["metadata"]["labels"], template["spec"])
    for owner in of_kind(overlay, "LeaderWorkerSet"):
        template = owner["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        added = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
        yield PodTemplate(owner, {**template["metadata"]["labels"], **added}, template["spec"])


def worker_template(overlay: str) -> PodTemplate | None:
    """The pods of a LeaderWorkerSet's groups besides the leaders; None: an overlay has none."""
    for owner in of_kind(overlay, "LeaderWorkerSet"):
        template = owner["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        return PodTemplate(owner, template["metadata"]["labels"], template["spec"])
    return None


def environment_of(overlay: str, pod: PodTemplate) -> dict[str, str]:
    """The variables of the pod's container."""
    found: dict[str, str] = {}
    for source in pod.container.get("envFrom", []):
        found |= named(overlay, "ConfigMap", source["configMapRef"]["name"])["data"]
    return found | {each["name"]: each["value"] for each in pod.container.get("env", [])}


def ray_cluster(overlay: str) -> dict[str, Any]:
    """The spec of the cluster in one of the overlays with Ray."""
    if overlay == RAY:
        return named(RAY, "RayCluster", "cadenza")["spec"]
    return named(overlay, "RayService", "cadenza")["spec"]["rayClusterConfig"]


def ray_groups(overlay: str) -> dict[str, dict[str, Any]]:
    """The groups of its machines by name, the head's first."""
    spec = ray_cluster(overlay)
    return {"head": spec["headGroupSpec"], **{each["groupName"]: each for each in spec["workerGroupSpecs"]}}


def container_of(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    return only


def admits(overlay: str, to: dict[str, str], peer: dict[str, str], port: int) -> bool:
    """Whether the network policies let pods with the labels `peer` in, at a port of a pod with the labels `to`."""
    rules = [
        rule
        for policy in (each["spec"] for each in of_kind(overlay, "NetworkPolicy"))
        if matches(policy["podSelector"], to) and "Ingress" in policy["policyTypes"]
        for rule in policy.get("ingress", [])
    ]
    return any(
        ("ports" not in rule or port in {each["port"] for each in rule["ports"]})
        and any(matches(each["podSelector"], peer) for each in rule["from"] if "podSelector" in each)
        for rule in rules
    )


def matches(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    """Whether a selector by labels selects these; without one, or an empty one, everything."""
    wanted = (selector or {}).get("matchLabels", {})
    for each in (selector or {}).get("matchExpressions", []):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return wanted.items() <= labels.items()
