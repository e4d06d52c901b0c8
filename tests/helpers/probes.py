"""Asks the probes of a pod as the kubelet does, from outside of its container."""

from __future__ import annotations

import urllib.request

from cadenza.healthcheck import check
from tests.helpers.manifests import PodTemplate


def passes_from_outside(pod: PodTemplate, name: str, address: str) -> bool:
    """Run a probe of a pod at this address once: readinessProbe, livenessProbe or startupProbe."""
    match pod.container[name]:
        case {"grpc": {"port": port}}:
            return check(f"{address}:{port}") is None
        case {"httpGet": {"path": path, "port": port}}:
            return _answers(f"http://{address}:{pod.port(port)}{path}")
        case probe:
            raise AssertionError(f"a probe that this rig does not know: {probe}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return 200 <= answer.status < 400
    except OSError:
        return False
