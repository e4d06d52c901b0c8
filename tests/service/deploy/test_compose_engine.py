"""The images built and the containers run by a real engine; minutes, so only with CADENZA_TEST_DOCKER=1.

On a machine without an engine, test_compose.py runs the same commands, environment and health checks as processes.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from cadenza import Client, SamplingParams
from cadenza.healthcheck import check
from tests.helpers.docker_engine import compose_tool, inspect, needs_docker, run
from tests.helpers.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_docker]

PROJECT = "cadenza-test"
SERVICES = ("executor", "scheduler")
GREEDY = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
# Ends the service in a container, which is the child of the init process; an engine may end this with it.
KILL = "kill -KILL $(cat /proc/1/task/1/children) || echo failed"


@dataclass(frozen=True, slots=True)
class Compose:
    """The project's stack under a name and a port of its own."""

    port: int

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    tool: tuple[str, ...]

    def __call__(self, *arguments: str, expected: tuple[int, ...] = (0,)) -> str:
        """Run Compose; returns its stdout."""
        return self.run(*self.tool, *arguments, expected=expected)

    def run(self, *command: str, expected: tuple[int, ...] = (0,)) -> str:
        """Run a command, in which Compose finds this project; returns its stdout."""
        return run(*command, expected=expected, COMPOSE_PROJECT_NAME=PROJECT, SCHEDULER_PORT=str(self.port))

    def inside(self, service: str, *command: str, expected: tuple[int, ...] = (0,)) -> str:
        return self("exec", "-T", service, *command, expected=expected)

    def inspect(self, service: str) -> Any:
        return inspect(self("ps", "-q", service).strip())

    def up(self) -> None:
        """Start what is not running, and wait, by the lines of docs/docker.md."""
        self.run("sh", "-e", "-c", _lines_to_start(self.tool))


def _lines_to_start(tool: tuple[str, ...]) -> str:
    page = (ROOT / "docs" / "docker.md").read_text()
    (lines,) = re.findall(rf"^```sh\n({' '.join(tool)} up (?:--wait|-d).*?)(?:^cadenza .*?)?^```", page, re.M | re.S)
    return lines


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stack = Compose(port, compose_tool())
    try:
        stack("build")
        stack.up()
        yield stack
    finally:
        stack("down", "--volumes")


def test_it_serves_when_the_lines_of_the_page_return(compose: Compose) -> None:
    compose("stop")
    compose.up()
    assert check(compose.target) is None


def test_generate_from_the_host(compose: Compose) -> None:
    answer = run(sys.executable, "-m", "cadenza", "generate", "--target", compose.target, "What is 27 + 48?")
    assert answer.strip()


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_has_no_rights(compose: Compose, service: str) -> None:
    status = compose.inside(service, "cat", "/proc/1/status")
    assert re.search(r"^CapEff:\s*0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s*1$", status, re.MULTILINE)
    assert int(compose.inside(service, "id", "-u")) > 0
    writable = "for folder in / /opt/cadenza /home/cadenza /model; do test -w $folder && echo $folder; done; true"
    assert compose.inside(service, "sh", "-c", writable) == ""
    compose.inside(service, "touch", "/tmp/a", "/home/cadenza/.cache/huggingface/a")


def test_the_scheduler_image_holds_no_torch(compose: Compose) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
    assert compose.inside("executor", "python", "-c", code).strip() == "True"
    assert compose.inside("scheduler", "python", "-c", code).strip() == "False"


def test_a_killed_executor_costs_no_token(compose: Compose) -> None:
    """The engine starts it again, and the stream goes on."""
    restarts = compose.inspect("executor")["RestartCount"]
    with Client(compose.target) as client:
        expected = client.generate(["Tell me a story."], GREEDY)[0].outputs[0].token_ids
        stream = client.stream("Tell me a story.", GREEDY)
        tokens = list(next(stream).outputs[0].token_ids)
        assert compose.inside("executor", "sh", "-c", KILL, expected=(0, 137)) == ""
        for delta in stream:
            tokens += delta.outputs[0].token_ids
    assert tokens == expected
    assert compose.inspect("executor")["RestartCount"] == restarts + 1


def test_stop_is_quick_and_clean(compose: Compose) -> None:
    containers = {service: compose("ps", "-q", service).strip() for service in SERVICES}
    began = time.monotonic()
    compose("stop")
    assert time.monotonic() - began < 8, "a grace period of 10 s has run out"
    for service, container in containers.items():
        assert inspect(container)["State"]["ExitCode"] == 0, service
    compose.up()
