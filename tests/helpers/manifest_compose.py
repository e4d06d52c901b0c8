"""Turns a pod of an overlay into a service of Compose, with what Kubernetes would give its container.

Images, arguments, variables, users, rights, volumes, limits, grace periods and names in DNS are those of the manifests;
probes and hooks are the kubelet's (kubelet.py). What a manifest says that this does not know is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_svc.executors.kubernetes import KubernetesApi
from tests.helpers.manifests import PodTemplate, environment_of, matches, of_kind

Service = dict[str, Any]
_KNOWN = {
    "args", "env", "envFrom", "image", "lifecycle", "livenessProbe", "name", "ports", "readinessProbe", "resources",
    "securityContext", "startupProbe", "volumeMounts",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Storage:
    """The folders behind what pods mount."""

    claims: Mapping[str, Path]
    secrets: Mapping[str, Path]
    account: Path | None
    """Of the service account of pods that may ask the API server; None: none may."""


@dataclass(frozen=True, slots=True)
class PodInstance:
    """A pod, by the template that it is made from and what its owner gives it."""

    name: str
    template: PodTemplate
    variables: Mapping[str, str]
    names: tuple[str, ...] = ()
    """In DNS, besides those of services."""
    is_restarted: bool = True
    """Whether its container is started again when it ends."""
    published: str | None = None
    """Where the host has its first port, as ADDRESS:PORT."""


def compose_service(overlay: str, pod: PodInstance, storage: Storage, gateway: str) -> Service:
    """Return the service that is this pod. gateway: the address of this machine for containers."""
    container, spec = pod.template.container, pod.template.spec
    assert set(container) <= _KNOWN, f"a field that this rig does not know: {set(container) - _KNOWN}"
    user, rights = spec["securityContext"], container["securityContext"]
    assert rights == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    bound, scratch = _volumes(pod.template, storage)
    asks_api = spec["automountServiceAccountToken"]
    if asks_api:
        bound.append(f"{storage.account}:{KubernetesApi().account}:ro")
    environment = environment_of(overlay, pod.template) | pod.variables
    return {
        "image": container["image"],
        "command": [_literal(argument) for argument in container.get("args", [])],
        "environment": {name: _literal(value) for name, value in environment.items()},
        "user": f"{user['runAsUser']}:{user['runAsGroup']}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "volumes": bound,
        "tmpfs": scratch,
        "restart": "always" if pod.is_restarted else "no",
        "networks": {"default": {"aliases": [*_names(overlay, pod.template), *pod.names]}},
        "extra_hosts": [f"{KubernetesApi().host}:{gateway}"] if asks_api else [],
        "ports": [f"{pod.published}:{container['ports'][0]['containerPort']}"] if pod.published else [],
        **_limits(container["resources"]["limits"]),
    }


def _volumes(pod: PodTemplate, storage: Storage) -> tuple[list[str], list[str]]:
    """Return folders that are mounted, and memory that is."""
    bound, scratch = [], []
    for mount in pod.container["volumeMounts"]:
        mode = "ro" if mount.get("readOnly") else "rw"
        match pod.volume_of(mount):
            case {"persistentVolumeClaim": {"claimName": str(claim)}}:
                bound.append(f"{storage.claims[claim]}:{mount['mountPath']}:{mode}")
            case {"secret": {"secretName": str(secret)}}:
                bound.append(f"{storage.secrets[secret]}:{mount['mountPath']}:{mode}")
            case {"emptyDir": {}}:
                scratch.append(f"{mount['mountPath']}:mode=1777,exec")
            case volume:
                raise AssertionError(f"a volume that this rig does not know: {volume}")
    return bound, scratch


def _names(overlay: str, pod: PodTemplate) -> list[str]:
    """The names of the services that lead to the pod."""
    services = of_kind(overlay, "Service")
    return [
        each["metadata"]["name"] for each in services if matches({"matchLabels": each["spec"]["selector"]}, pod.labels)
    ]


def _limits(limits: Mapping[str, str]) -> Service:
    """Docker refuses more processors than there are."""
    found: Service = {"mem_limit": limits["memory"].removesuffix("i").lower()}
    if "cpu" in limits:
        found["cpus"] = min(float(limits["cpu"]), float(os.cpu_count() or 1))
    return found


def _literal(text: str) -> str:
    """A text in which Compose finds no variable."""
    return text.replace("$", "$$")
