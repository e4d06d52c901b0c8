"""Turns the Deployments of an overlay into services of Compose, with what Kubernetes would give their containers.

Images, arguments, variables, users, rights, volumes, limits, grace periods and names in DNS are those of the manifests.
Docker has one health check for a container: it is the readiness probe, asked from within, for as long a start as the
startup probe allows. What a manifest says that this does not know is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.manifests import Manifest, PodTemplate, environment_of, matches, of_kind, pod_templates
from tests.helpers.paths import ROOT

Service = dict[str, Any]
_KNOWN = {
    "args", "env", "envFrom", "image", "livenessProbe", "name", "ports", "readinessProbe", "resources",
    "securityContext", "startupProbe", "volumeMounts",
}  # fmt: skip
_PROBE = {"periodSeconds": 10, "timeoutSeconds": 1, "failureThreshold": 3}
"""Kubernetes' own, where a probe does not say."""


def compose_file(overlay: str, claims: Mapping[str, Path], published: Mapping[str, int]) -> Manifest:
    """Return a file of Compose with a service for each Deployment, by its name.

    claims: the folder behind each claim; published: for some services, the port of the loopback that leads to their
    first one.
    """
    services = {pod.name: _service(overlay, pod, claims) for pod in pod_templates(overlay)}
    for name, port in published.items():
        (pod,) = (each for each in pod_templates(overlay) if each.name == name)
        services[name]["ports"] = [f"127.0.0.1:{port}:{pod.container['ports'][0]['containerPort']}"]
    return {"services": services}


def replicas(overlay: str) -> dict[str, int]:
    """How many containers each service has."""
    return {pod.name: pod.owner["spec"]["replicas"] for pod in pod_templates(overlay)}


def _service(overlay: str, pod: PodTemplate, claims: Mapping[str, Path]) -> Service:
    container, spec = pod.container, pod.spec
    assert set(container) <= _KNOWN, f"a field that this rig does not know: {set(container) - _KNOWN}"
    user, rights = spec["securityContext"], container["securityContext"]
    assert rights == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    bound, scratch = _volumes(pod, claims)
    environment = environment_of(overlay, pod)
    return {
        "image": container["image"],
        "build": {"context": str(ROOT), "target": container["image"].partition(":")[0].removeprefix("cadenza-")},
        "command": [_literal(argument) for argument in container["args"]],
        "environment": {name: _literal(value) for name, value in environment.items()},
        "user": f"{user['runAsUser']}:{user['runAsGroup']}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "volumes": bound,
        "tmpfs": scratch,
        "healthcheck": _health_check(container),
        "stop_grace_period": f"{spec['terminationGracePeriodSeconds']}s",
        "restart": "always",
        "networks": {"default": {"aliases": _names(overlay, pod)}},
        **_limits(container["resources"]["limits"]),
    }


def _volumes(pod: PodTemplate, claims: Mapping[str, Path]) -> tuple[list[str], list[str]]:
    """Return folders that are mounted, and memory that is."""
    bound, scratch = [], []
    for mount in pod.container["volumeMounts"]:
        match pod.volume_of(mount):
            case {"persistentVolumeClaim": {"claimName": str(claim)}}:
                mode = "ro" if mount.get("readOnly") else "rw"
                bound.append(f"{claims[claim]}:{mount['mountPath']}:{mode}")
            case {"emptyDir": {}}:
                scratch.append(f"{mount['mountPath']}:mode=1777,exec")
            case volume:
                raise AssertionError(f"a volume that this rig does not know: {volume}")
    return bound, scratch


def _health_check(container: Manifest) -> Service:
    ready, start = _PROBE | container["readinessProbe"], _PROBE | container["startupProbe"]
    asked = f"127.0.0.1:{ready['grpc']['port']}", "--timeout-s", str(ready["timeoutSeconds"])
    return {
        "test": ["CMD", "python", "-m", "cadenza.healthcheck", *asked],
        "interval": f"{ready['periodSeconds']}s",
        # The check is a process, and takes time to start.
        "timeout": f"{ready['timeoutSeconds'] + 5}s",
        "retries": ready["failureThreshold"],
        "start_period": f"{start['periodSeconds'] * start['failureThreshold']}s",
    }


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
