"""Asks the probes of a pod as the kubelet does."""

from __future__ import annotations

import subprocess
import urllib.request

from cadenza.healthcheck import check
from tests.helpers.manifests import PodTemplate


def failure_in_container(pod: PodTemplate, name: str, container: str, address: str, timeout_s: float) -> str | None:
    """Run a probe of a pod whose container has this name and this address once. None: it passes; or why it fails."""
    match pod.container[name]:
        case {"exec": {"command": command}}:
            try:
                done = subprocess.run(
                    ["docker", "exec", container, *command],
                    capture_output=True,
                    check=False,
                    text=True,
                    timeout=timeout_s,
                )
            except subprocess.TimeoutExpired:
                return f"no answer after {timeout_s} s"
            return None if done.returncode == 0 else done.stdout + done.stderr
    return failure_from_outside(pod, name, address, timeout_s)


def failure_from_outside(pod: PodTemplate, name: str, address: str, timeout_s: float = 5.0) -> str | None:
    """The same of a pod at this address, for a probe that is no command."""
    match pod.container[name]:
        case {"grpc": {"port": port}}:
            return check(f"{address}:{port}", timeout_s=timeout_s)
        case {"httpGet": {"path": path, "port": port}}:
            return _failure(f"http://{address}:{pod.port(port)}{path}", timeout_s)
        case probe:
            raise AssertionError(f"a probe that this rig does not know: {probe}")


def _failure(url: str, timeout_s: float) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return None if 200 <= answer.status < 400 else f"status {answer.status}"
    except OSError as error:
        return str(error)
