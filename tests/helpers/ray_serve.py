"""Ray Serve with the configuration of deploy/overlays/ray-service, on a cluster of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
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
_START_S = 60


def serve_config(host: str, **args: Any) -> dict[str, Any]:
    """The manifest's, with addresses of this machine and these arguments of the application."""
    config = yaml.safe_load(yaml.safe_load(_MANIFEST.read_text())["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    config["http_options"]["host"] = host
    application["args"] |= {"host": host, "metrics_host": host, **args}
    return config


class Served:
    """`serve run` with a configuration."""

    def __init__(self, machines: RayMachines, config: dict[str, Any], folder: Path) -> None:
        self._machines, self._folder = machines, folder
        self.lines: list[str] = []
        self.process = self._run("config.yaml", config, "--blocking")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def apply(self, config: dict[str, Any]) -> None:
        """Make another configuration hold; returns once Serve has it."""
        done = self._run("next.yaml", config, "--non-blocking")
        output, _ = done.communicate(timeout=_START_S)
        assert done.returncode == 0, output

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
        (command,) = (command_of(each) for each in self.below("cadenza.gateway"))
        (address,) = (each.removeprefix("--http=") for each in command.split() if each.startswith("--http="))
        return address

    def gone(self) -> bool:
        """Whether no process of the server is left."""
        return not any(self.below(text) for text in ("scheduler_svc", "executor_svc", "cadenza.gateway", "::Serve"))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(_START_S)
        finally:
            self.process.kill()
            self._reader.join(5)
        until(self.gone)

    def _run(self, name: str, config: dict[str, Any], how: str) -> subprocess.Popen[str]:
        path = self._folder / name
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "ray.serve.scripts", "run", str(path), how]
        return subprocess.Popen(
            [*command, "--address", self._machines.address],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ), cwd=ROOT,
        )  # fmt: skip

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())


@contextlib.contextmanager
def served(machines: RayMachines, config: dict[str, Any], folder: Path) -> Iterator[Served]:
    """Yields it at once: the application starts by and by."""
    running = Served(machines, config, folder)
    try:
        yield running
    finally:
        running.stop()
