"""The executors of `cadenza up --distributed-executor-backend ray`: Ray places them, and the scheduler follows a list.

Ray is asked for places, and for actors, which it starts again when they are lost. All else goes over gRPC.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cadenza.errors import LocalServiceError
from cadenza_common.wire.tls import TLS
from cadenza_launcher.on_ray.certificates import make_link_certificates
from cadenza_launcher.on_ray.cluster import RayCluster, all_on_loopback
from cadenza_launcher.on_ray.launch import RayLaunch
from cadenza_launcher.on_ray.places import Places
from cadenza_launcher.on_ray.replica import Replica, ReplicaLife
from cadenza_launcher.on_ray.scaler import LoadReader, Scaler
from cadenza_launcher.on_ray.scaling import Scaling
from cadenza_launcher.on_ray.shares import placement_of, rank_share
from cadenza_launcher.services.child_process import LogSink
from cadenza_launcher.services.executor_hosts import Command
from cadenza_launcher.services.options import EXECUTOR, ServiceArguments


class RayExecutors:
    """Implements ExecutorHost, and what a Scaler changes."""

    def __init__(
        self, command: Command, arguments: ServiceArguments, *, on_log: LogSink, on_event: Callable[[str], None]
    ) -> None:
        """Connect to the cluster; raises OptionError."""
        values = arguments.values
        least, most = arguments.executors, values.get("max_executors") or arguments.executors
        self._on_log, self._on_event = on_log, on_event
        self._kept = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._replicas: dict[str, Replica] = {}
        self._lives: dict[str, ReplicaLife] = {}
        self._leaving: dict[str, str] = {}
        """Addresses of executors that are off the list, and go once the scheduler has nothing there any more."""
        self._num_named = 0
        self._scaler: Scaler | None = None
        self._scaling = None
        if most > least:
            up, down = values.get("scale_up_after_s", 5.0), values.get("scale_down_after_s", 120.0)
            self._scaling = Scaling(least, most, up, down)
        try:
            cluster = RayCluster(values.get("ray_address"))
            self._kept.callback(cluster.close)
            machines = cluster.machines()
            share = rank_share(values, machines, most)
            folder = Path(self._kept.enter_context(tempfile.TemporaryDirectory(prefix="cadenza-ray-")))
            self._list = ExecutorList(folder / "executors")
            self._links = None if all_on_loopback(machines) else make_link_certificates(folder)
            placement = placement_of(values, share)
            self._places = Places(cluster, placement, least)
        except BaseException:
            self._kept.close()
            raise
        links = self._links
        own = () if links is None else links.executor_arguments
        arguments_of_all = [*command.arguments, *share.arguments, *own]
        self._launch = RayLaunch(
            command.program, arguments_of_all, placement.num_actors, {} if links is None else links.files
        )
        for index in range(least):
            self._add(EXECUTOR if most == 1 else f"{EXECUTOR} {index}")

    # --- as in ExecutorHost ------------------------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        """As in ExecutorHost."""
        with self._lock:
            return list(self._replicas)

    @property
    def scheduler_arguments(self) -> Sequence[str]:
        """As in ExecutorHost."""
        links = () if self._links is None else self._links.scheduler_arguments
        return ["--executor", self._list.entry, *links]

    @property
    def tls(self) -> TLS | None:
        """As in ExecutorHost."""
        return None if self._links is None else self._links.tls

    def spawn(self, name: str) -> ReplicaLife:
        """As in ExecutorHost."""
        with self._lock:
            if name not in self._replicas:
                raise LocalServiceError(f"{name} has left")
            life = self._replicas[name].start(self._launch.orders(name), self._on_log, partial(self._on_change, name))
            self._lives[name] = life
        return life

    def give_up(self, name: str) -> None:
        """As in ExecutorHost."""
        with self._lock:
            self._replicas.pop(name, None)
            self._leaving.pop(name, None)
        self._places.release(name)

    def follow(self, scheduler: Callable[[], str], tls: TLS | None) -> None:
        """As in ExecutorHost."""
        if self._scaling is not None:
            self._scaler = Scaler(self, self._scaling, LoadReader(scheduler, tls).read, self._on_event)
            self._scaler.start()

    def close(self) -> None:
        """As in ExecutorHost."""
        if self._scaler is not None:
            self._scaler.stop()
        self._kept.close()

    # --- for the scaler ----------------------------------------------------------------------------------------------

    @property
    def num_wanted(self) -> int:
        """Number of executors that run or start; an executor that leaves does not count."""
        with self._lock:
            return len(self._replicas) - len(self._leaving)

    @property
    def num_starting(self) -> int:
        """Of these, executors that are not ready."""
        with self._lock:
            staying = [name for name in self._replicas if name not in self._leaving]
            return sum(name not in self._lives or not self._lives[name].serves for name in staying)

    def add(self) -> str:
        """Add an executor, or keep the last one that leaves; returns its name."""
        with self._lock:
            if self._leaving:
                name, _ = self._leaving.popitem()
                life = self._lives.get(name)
                if life is not None and life.serves:  # else it joins when it is ready again
                    self._list.join(name, life.address)
                return name
        name = f"{EXECUTOR} {self._num_named}"
        self._add(name)
        return name

    def begin_to_leave(self) -> str | None:
        """Take the executor that was added last off the list, so that it is drained; returns its name."""
        with self._lock:
            name = next((each for each in reversed(self._replicas) if self._places.may_go(each, self._leaving)), None)
            if name is None:
                return None
            life = self._lives.get(name)
            self._leaving[name] = "" if life is None else life.address
            self._list.leave(name)
            return name

    def finish_leaving(self, targets: frozenset[str]) -> list[str]:
        """End the leaving executors that the scheduler has forgotten; returns their names."""
        with self._lock:
            gone = [name for name, address in self._leaving.items() if address not in targets]
            for name in gone:
                del self._leaving[name], self._replicas[name]
            ended = [name for name in gone if name not in self._lives or self._lives[name].exit_code() is not None]
        for name in ended:
            self._places.release(name)
        return gone

    # --- lives -------------------------------------------------------------------------------------------------------

    def _add(self, name: str) -> None:
        replica = self._places.take(name)
        with self._lock:
            self._num_named += 1
            self._replicas[name] = replica

    def _on_change(self, name: str) -> None:
        """Keep the list as the executors are, and release the place of one that has left."""
        with self._lock:
            life, has_left = self._lives[name], name not in self._replicas
            if not has_left and name not in self._leaving:
                if life.serves:
                    self._list.join(name, life.address)
                else:
                    self._list.leave(name)
        if has_left and life.exit_code() is not None:
            self._places.release(name)


class ExecutorList:
    """Addresses by executor. For several threads."""

    def __init__(self, path: Path) -> None:
        """Begin an empty list in a file."""
        self._path = path
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        self._write()

    @property
    def entry(self) -> str:
        """The value of --executor."""
        return f"file:{self._path}"

    def join(self, name: str, address: str) -> None:
        """Put an executor on the list, or change its address."""
        with self._lock:
            if self._addresses.get(name) != address:
                self._addresses[name] = address
                self._write()

    def leave(self, name: str) -> None:
        """Take an executor off the list, if it is there."""
        with self._lock:
            if self._addresses.pop(name, None) is not None:
                self._write()

    def _write(self) -> None:
        """Replace the file in one step: the scheduler never reads half of it."""
        lines = (f"{address}  # {name}\n" for name, address in sorted(self._addresses.items()))
        made = self._path.with_suffix(".new")
        made.write_text("".join(lines))
        os.replace(made, self._path)
