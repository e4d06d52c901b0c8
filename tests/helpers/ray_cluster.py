"""A Ray cluster of two raylets on this machine, and `cadenza up` on it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psutil

from tests.helpers.service_scripts import until

_STORE_BYTES = 80 << 20
"""The least that Ray takes."""
_FAST = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
"""How Ray notices a lost machine; by default it takes a quarter of a minute."""
_PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
"""Serve gives up its proxy when it was not ready three times in 5 s each, which a busy machine needs to start it."""


class RayMachines:
    """The raylets; the first one is the head's."""

    def __init__(self, cluster: Any, num_cpus: int) -> None:
        self._cluster = cluster
        self._num_cpus = num_cpus
        self.address: str = cluster.address

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=self._num_cpus, object_store_memory=_STORE_BYTES)

    def kill(self, node: Any) -> None:
        """Kill a raylet, and what it has started beside it, as when a machine is lost."""
        self._cluster.remove_node(node, allow_graceful=False)

    def head(self) -> Any:
        return self._cluster.head_node

    def others(self) -> list[Any]:
        return [node for node in self._cluster.list_all_nodes() if not node.head]


@contextlib.contextmanager
def ray_machines(num_cpus: int, *, of_head: int | None = None) -> Iterator[RayMachines]:
    """Two machines with this many processors each, by their own account. Strangers cannot use them (tests/conftest.py).

    of_head: the head's processors, if it has others.
    """
    with _variables(_PATIENT):
        yield from _machines(num_cpus, num_cpus if of_head is None else of_head)


def _machines(num_cpus: int, of_head: int) -> Iterator[RayMachines]:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": of_head, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": _FAST})
    try:
        machines = RayMachines(cluster, num_cpus)
        machines.add()
        yield machines
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """In the body, the environment has these; what is started there keeps them."""
    kept = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def raylet_of(node: Any) -> psutil.Process:
    (info,) = node.all_processes["raylet"]
    return psutil.Process(info.process.pid)


def executors_below(process: psutil.Process) -> list[psutil.Process]:
    """The processes of executors and ranks that actors of a raylet, or an actor, have started."""
    return [each for each in process.children(recursive=True) if "executor_svc" in command_of(each)]


def command_of(process: psutil.Process) -> str:
    """The command line of a process; empty once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def end_within(processes: list[psutil.Process], timeout_s: float) -> None:
    """Return once all have ended; what is left of one whose parent was killed may stay."""

    def runs(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.status() != psutil.STATUS_ZOMBIE
        return False

    until(lambda: not any(map(runs, processes)), timeout_s)


class Up:
    """A running `cadenza up`."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "cadenza", "up", "--port", "0", "--distributed-executor-backend", "ray"]
        self._process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("ready "), self.lines
        self.target = line.split()[1]

    def logged(self, text: str, count: int = 1) -> None:
        """Return once so many lines have this text."""
        until(lambda: sum(text in line for line in self.lines) >= count, timeout_s=60)

    def stop(self) -> int:
        """Stop it at once; returns its exit code."""
        self._process.send_signal(signal.SIGINT)
        try:
            code = self._process.wait(30)
        finally:
            self._process.kill()
        self._reader.join(5)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def _read(self) -> None:
        with self._process.stderr as stderr:
            for line in stderr:
                self.lines.append(line.rstrip())


@contextlib.contextmanager
def cadenza_up(*arguments: str) -> Iterator[Up]:
    """Yields it once it serves; it must stop without an error."""
    running = Up(*arguments)
    try:
        yield running
    finally:
        code = running.stop()
    assert code == 0, running.lines
    # An executor whose rank is lost logs the step that failed.
    own = [line for line in running.lines if not line.startswith("executor")]
    assert not any("Traceback" in line for line in own), own
