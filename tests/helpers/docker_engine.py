"""Docker and Compose, for tests that run containers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from tests.helpers.paths import ROOT

needs_docker = pytest.mark.skipif(
    os.environ.get("CADENZA_TEST_DOCKER") != "1", reason="builds images: set CADENZA_TEST_DOCKER=1 to run it"
)


def compose_tool() -> tuple[str, ...]:
    """`docker compose` where the engine's program has that plugin, otherwise docker-compose 1.29."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ("docker", "compose") if plugin.returncode == 0 else ("docker-compose",)


def run(*command: str, expected: Sequence[int] = (0,), **environment: str) -> str:
    """Run a command in the project's folder, with these variables and none of ours; returns its stdout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CADENZA_")}
    result = subprocess.run(command, cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, check=False)
    assert result.returncode in expected, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def inspect(container: str) -> Any:
    """What the engine knows of a container."""
    (found,) = json.loads(run("docker", "inspect", container))
    return found
