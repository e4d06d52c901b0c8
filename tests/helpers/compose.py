"""Reads docker-compose.yml and the Dockerfile, and runs the compose file's services as processes of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.machine.loopback import new_address
from tests.helpers.paths import ROOT

COMPOSE_FILE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "Dockerfile"

_VARIABLE = re.compile(r"\$\{(\w+):-([^}$]*)\}")
_CHECK_DEADLINE_S = 60
METRICS_PORT = "9464"
"""In each container. Here they are on one machine, so each has a port of its own."""


def read_compose(environ: Mapping[str, str]) -> dict[str, Any]:
    """The file as docker-compose sees it from a shell with `environ`: variables in strings, names without a value."""
    text = _VARIABLE.sub(lambda found: environ.get(found[1]) or found[2], _without_comments(COMPOSE_FILE.read_text()))
    assert "$" not in text, "a variable in a form that this reader does not know"
    content = yaml.safe_load(text)
    for service in content["services"].values():
        given = {name: environ.get(name) if value is None else value for name, value in service["environment"].items()}
        service["environment"] = {name: value for name, value in given.items() if value is not None}
    return content


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the Dockerfile."""

    parent: str
    instructions: tuple[tuple[str, str], ...]  # (INSTRUCTION, what follows it), FROM left out


def read_dockerfile() -> dict[str, Stage]:
    """Stages by name, in the file's order."""
    stages: dict[str, Stage] = {}
    name, parent, instructions = "", "", []
    for instruction, rest in [*_instructions(), ("FROM", "")]:
        if instruction != "FROM":
            instructions.append((instruction, rest))
            continue
        if name:
            stages[name] = Stage(parent, tuple(instructions))
        parent, _, name = rest.partition(" AS ")
        instructions = []
    return stages


def last_instruction(stages: Mapping[str, Stage], target: str, wanted: str) -> str:
    """What stands behind the last `wanted` of a target, its parents' included; "" if there is none."""
    while target in stages:
        found = [rest for instruction, rest in stages[target].instructions if instruction == wanted]
        if found:
            return found[-1]
        target = stages[target].parent
    return ""


def _instructions() -> Iterator[tuple[str, str]]:
    text = _without_comments(DOCKERFILE.read_text()).replace("\\\n", "")
    for line in text.splitlines():
        if line.strip():
            instruction, _, rest = line.partition(" ")
            yield instruction, rest.strip()


def _without_comments(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.lstrip().startswith("#"))


@dataclass(slots=True)
class LocalStack:
    """The services that `docker-compose up` would start, each with its own command, environment and health check.

    Only what a container has and a process has not is replaced: `python` is this one, all addresses are `host`, so that
    each service has a port of its own for metrics, and a mounted path is its folder on the host.
    """

    services: dict[str, dict[str, Any]]
    entrypoints: dict[str, list[str]]
    folder: Path
    host: str
    """An address of the loopback."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def address(self, port: int) -> str:
        return f"{self.host}:{port}"

    def metrics_port(self, name: str) -> int:
        return int(METRICS_PORT) + list(self.services).index(name)

    def start(self, name: str) -> None:
        """Start a service and return when its health check has passed; fails if it ends before."""
        service = self.services[name]
        command = [*self.entrypoints[name], *service["command"]]
        environment = {variable: self._local(name, str(value)) for variable, value in service["environment"].items()}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [self._local(name, part) for part in command],
                cwd=self.folder,
                env={**_base_environment(), **environment},
                stdout=log,
                stderr=log,
            )
        self.wait_healthy(name)

    def check(self, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        """Run the health check of a service once."""
        kind, *command = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        return subprocess.run(
            [*(self._local(name, part) for part in command), *more],
            cwd=self.folder,
            env=_base_environment(),
            capture_output=True,
            text=True,
            timeout=_seconds(self.services[name]["healthcheck"]["timeout"]),
            check=False,
        )

    def wait_healthy(self, name: str) -> None:
        """Ask again and again, as an engine does; a check is a process and takes its time."""
        deadline = time.monotonic() + _CHECK_DEADLINE_S
        while (answer := self.check(name)).returncode != 0:
            assert self.processes[name].poll() is None, f"{name} ended: {self.log(name)}"
            assert time.monotonic() < deadline, f"{name}: {answer.stderr}{self.log(name)}"

    def stop(self, name: str) -> int:
        """What `docker-compose stop` does: SIGTERM, and a grace period. Returns the exit code."""
        process = self.processes.pop(name)
        process.terminate()
        return process.wait(_seconds(self.services[name]["stop_grace_period"]))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _local(self, name: str, text: str) -> str:
        if text == "python":
            return sys.executable
        for mount in self.services[name]["volumes"]:
            source, target = mount.split(":")[:2]
            if text == target and source.startswith((".", "/")):
                return str((ROOT / source).resolve())
        if text == METRICS_PORT:
            return str(self.metrics_port(name))
        hosts = "|".join(["0.0.0.0", "127.0.0.1", *self.services])
        found = re.fullmatch(rf"({hosts}):(\d+)", text)
        if found:
            return self.address(int(found[2]))
        return self.host if text == "0.0.0.0" else text


@contextmanager
def local_stack(folder: Path, environ: Mapping[str, str]) -> Iterator[LocalStack]:
    """Start the services without a profile, in the order of `depends_on`; what still runs at the end is killed."""
    services = {name: each for name, each in read_compose(environ)["services"].items() if "profiles" not in each}
    stages = read_dockerfile()
    entrypoints = {
        name: yaml.safe_load(last_instruction(stages, service["build"]["target"], "ENTRYPOINT"))
        for name, service in services.items()
    }
    stack = LocalStack(services, entrypoints, folder, new_address())
    try:
        for name in start_order(services):
            stack.start(name)
        yield stack
    finally:
        for process in stack.processes.values():
            process.kill()
            process.wait()


def start_order(services: Mapping[str, Any]) -> list[str]:
    """Names such that whatever a service depends on comes before it."""
    order: list[str] = []

    def visit(name: str) -> None:
        for needed in services[name].get("depends_on", {}):
            visit(needed)
        if name not in order:
            order.append(name)

    for name in services:
        visit(name)
    return order


def _base_environment() -> dict[str, str]:
    """This environment without what the compose file may set: no option comes from here."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CADENZA_")}


def _seconds(duration: str) -> float:
    units = {"s": 1, "m": 60}
    return float(duration[:-1]) * units[duration[-1]]
