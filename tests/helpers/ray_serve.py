"""Ray Serve with the configuration of deploy/overlays/ray-service, on a cluster of this machine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.helpers.paths import ROOT
from tests.helpers.ray_cluster import RayMachines, command_of, raylet_of
from tests.helpers.service_scripts import until

_MANIFEST = ROOT / "deploy" / "overlays" / "ray-service" / "service.yaml"
_WAIT_S = 90
"""On a machine that does much else; seconds as a rule."""


def serve_config(host: str, **args: Any) -> dict[str, Any]:
    """The manifest's, with addresses of this machine and these arguments of the application."""
    config = yaml.safe_load(yaml.safe_load(_MANIFEST.read_text())["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    config["http_options"]["host"] = host
    application["args"] |= {"host": host, "metrics_host": host, **args}
    return config


_APPLY = """
import sys
from ray import serve
from ray.serve.scripts import run

for path in sys.stdin:
    run.main([path.strip(), "--non-blocking", "--address", sys.argv[1]], standalone_mode=False)
    print("applied", path.strip(), flush=True)
serve.shutdown()
"""
"""`serve run` for each configuration that it is given, in one process: to start one takes seconds."""


class Served:
    """Ray Serve with one configuration after another."""

    def __init__(self, machines: RayMachines, folder: Path) -> None:
        self._machines, self._path = machines, folder / "serve.yaml"
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", _APPLY, machines.address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def apply(self, config: dict[str, Any]) -> None:
        """Make a configuration hold; returns once Serve has it."""
        count = self._num_applied()
        self._path.write_text(yaml.safe_dump(config))
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._path}\n")
        self._process.stdin.flush()
        until(lambda: self._num_applied() > count, _WAIT_S)

    def _num_applied(self) -> int:
        assert self._process.poll() is None, self.lines
        return sum(line == f"applied {self._path}" for line in self.lines)

    def below(self, text: str) -> list[psutil.Process]:
        """The processes of the cluster whose command lines have this text."""
        raylets = [raylet_of(node) for node in (self._machines.head(), *self._machines.others())]
        found = [each for raylet in raylets for each in raylet.children(recursive=True)]
        return [each for each in found if text in command_of(each)]

    def replica(self) -> psutil.Process:
        (only,) = self.below("ray::ServeReplica:cadenza:Server")
        return only

    def gateway(self) -> str:
        """Where the replica's gateway listens."""
        (command,) = (command_of(each) for each in self.below("gateway_svc"))
        (address,) = (each.removeprefix("--http=") for each in command.split() if each.startswith("--http="))
        return address

    def gone(self) -> bool:
        """Whether no process of the server is left."""
        return not any(self.below(text) for text in ("scheduler_svc", "executor_svc", "gateway_svc", "::Serve"))

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(_WAIT_S) == 0, self.lines
        finally:
            self._process.kill()
            self._reader.join(5)
        until(self.gone, _WAIT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())


@contextlib.contextmanager
def served(machines: RayMachines, config: dict[str, Any], folder: Path) -> Iterator[Served]:
    """Yields it at once: the application starts by and by."""
    running = Served(machines, folder)
    try:
        running.apply(config)
        yield running
    finally:
        running.stop()
