"""Asks the probes of a pod as the kubelet does."""

from __future__ import annotations

import subprocess
import urllib.request

from cadenza.healthcheck import check
from tests.helpers.manifests import PodTemplate


def passes_in_container(pod: PodTemplate, name: str, container: str, address: str, timeout_s: float) -> bool:
    """Run a probe of a pod whose container has this name and this address once, as `passes_from_outside` does."""
    match pod.container[name]:
        case {"exec": {"command": command}}:
            try:
                done = subprocess.run(
                    ["docker", "exec", container, *command], capture_output=True, check=False, timeout=timeout_s
                )
            except subprocess.TimeoutExpired:
                return False
            return done.returncode == 0
    return passes_from_outside(pod, name, address, timeout_s)


def passes_from_outside(pod: PodTemplate, name: str, address: str, timeout_s: float = 5.0) -> bool:
    """Run a probe of a pod at this address once: readinessProbe, livenessProbe or startupProbe."""
    match pod.container[name]:
        case {"grpc": {"port": port}}:
            return check(f"{address}:{port}", timeout_s=timeout_s) is None
        case {"httpGet": {"path": path, "port": port}}:
            return _answers(f"http://{address}:{pod.port(port)}{path}", timeout_s)
        case probe:
            raise AssertionError(f"a probe that this rig does not know: {probe}")


def _answers(url: str, timeout_s: float) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return 200 <= answer.status < 400
    except OSError:
        return False
