"""Where the executors of a server run: as children on this machine, or elsewhere, as with Ray (`on_ray`)."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cadenza.errors import LocalServiceError
from cadenza_common.wire.tls import TLS
from cadenza_launcher.services.child_process import ChildService, LogSink, StartedService
from cadenza_launcher.services.executor_shares import ExecutorShare
from cadenza_launcher.services.ports import reserve_port
from cadenza_launcher.services.supervised_service import SupervisedChild
from executor_svc.cpu_memory import FAMILY


class ExecutorChild(SupervisedChild, StartedService, Protocol):
    """One life of an executor."""

    def begin_stop(self) -> None:
        """Begin to stop it, and do not wait; `stop` waits."""


class ExecutorHost(Protocol):
    """Starts executors, and gives the scheduler their addresses."""

    @property
    def names(self) -> Sequence[str]:
        """The executors that are to run now; it may change while they run."""

    @property
    def scheduler_arguments(self) -> Sequence[str]:
        """The scheduler's options about them."""

    @property
    def tls(self) -> TLS | None:
        """How they are connected to; None: in plain text."""

    def spawn(self, name: str) -> ExecutorChild:
        """Start an executor, and return at once; raises LocalServiceError if it cannot be started."""

    def give_up(self, name: str) -> None:
        """Take an executor off `names`: it is not started again."""

    def follow(self, scheduler: Callable[[], str], tls: TLS | None) -> None:
        """All serve: change `names` from now on, if that is asked for; `scheduler` gives the scheduler's address."""

    def close(self) -> None:
        """Release everything, once all have stopped."""


@dataclass(frozen=True, slots=True)
class Command:
    """How an executor is started."""

    program: Sequence[str]
    """`["-m", module]` or `[script.py]`."""
    arguments: Sequence[str]
    """Those of all executors."""


class ThisMachine:
    """Implements ExecutorHost for child processes, each of which keeps its port on loopback."""

    tls = None

    def __init__(
        self,
        command: Command,
        shares: Mapping[str, ExecutorShare],
        metrics_ports: Mapping[str, int],
        on_log: LogSink,
    ) -> None:
        """shares: by the executor's name; metrics_ports: by name too, for executors that serve metrics."""
        self._command, self._shares, self._metrics_ports, self._on_log = command, dict(shares), metrics_ports, on_log
        # Executors that divide the memory do not take each other's pools from the free memory again.
        self._environment = {FAMILY: uuid.uuid4().hex}
        self._kept = contextlib.ExitStack()
        self._addresses = {name: reserve_port("127.0.0.1", self._kept) for name in shares}
        self.scheduler_arguments = [part for each in self._addresses.values() for part in ("--executor", each)]

    @property
    def names(self) -> Sequence[str]:
        """As in ExecutorHost."""
        return list(self._shares)

    def spawn(self, name: str) -> ChildService:
        """As in ExecutorHost."""
        share, command = self._shares[name], self._command
        own = ["--listen", self._addresses[name]]
        if name in self._metrics_ports:
            own.append(f"--metrics-port={self._metrics_ports[name]}")
        arguments = [*command.arguments, *share.arguments, *own]
        return spawn_child(name, command.program, arguments, self._on_log, self._environment | share.environment)

    def give_up(self, name: str) -> None:
        """As in ExecutorHost."""
        del self._shares[name]

    def follow(self, scheduler: Callable[[], str], tls: TLS | None) -> None:
        """As in ExecutorHost: their number stays."""

    def close(self) -> None:
        """As in ExecutorHost."""
        self._kept.close()


def spawn_child(
    name: str,
    program: Sequence[str],
    arguments: Sequence[str],
    on_log: LogSink,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], bool] | None = None,
) -> ChildService:
    """Start a child process; raises LocalServiceError if the system refuses a process, file descriptor or thread."""
    try:
        return ChildService(name, program, arguments, on_log, environment, on_line)
    except (OSError, RuntimeError) as error:
        raise LocalServiceError(str(error)) from error
