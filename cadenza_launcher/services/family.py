"""The processes of one server: what they are started with, and how each is started."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cadenza.errors import LocalServiceError
from cadenza_common.wire.tls import TLS
from cadenza_launcher.services.child_process import ChildService, LogSink
from cadenza_launcher.services.executor_hosts import ExecutorChild, ExecutorHost, spawn_child
from cadenza_launcher.services.gateway import gateway_arguments, gateway_environment
from cadenza_launcher.services.options import GATEWAY, SCHEDULER, ServiceArguments
from cadenza_launcher.services.supervised_service import RestartPolicy
from gateway_svc.page_starter import PAGE_DEMO, kill_when_asked


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs to run: `["-m", module]` or `[script.py]`; tests replace the services by small scripts."""

    executor: Sequence[str] = ("-m", "executor_svc")
    scheduler: Sequence[str] = ("-m", "scheduler_svc")
    gateway: Sequence[str] = ("-m", "gateway_svc")


@dataclass(slots=True)
class Family:
    """The child processes and what a restart needs; shared with the watcher thread, so it must not refer to
    LocalServices."""

    arguments: ServiceArguments
    host: ExecutorHost
    programs: Programs
    addresses: dict[str, str]  # of those that have one; the scheduler's port may be 0 until it has chosen one
    gateway: dict[str, str]  # where the gateway listens, by option; its own address is the first
    kept: contextlib.ExitStack  # held as long as services may be started: ports that were chosen for them
    start_timeout_s: float
    stop_grace_s: float
    restarts: RestartPolicy
    on_log: LogSink
    on_event: Callable[[str], None]
    on_back: Callable[[str], None]
    metrics_port: int | None  # of the scheduler
    tls: TLS | None = None  # of connections to the scheduler
    page: dict[str, str] = field(default_factory=dict)  # what the gateway gets for its live page
    owner: int = field(default_factory=os.getpid)  # the parent process
    children: dict[str, ExecutorChild] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    failed: threading.Event = field(default_factory=threading.Event)
    failure: LocalServiceError | None = None
    watcher: threading.Thread | None = None


def spawn(family: Family, service: str) -> ExecutorChild:
    """Start one service; raises LocalServiceError if the system refuses a process."""
    makers = {SCHEDULER: _scheduler, GATEWAY: _gateway}
    maker = makers.get(service)
    family.children[service] = child = family.host.spawn(service) if maker is None else maker(family)
    return child


def _scheduler(family: Family) -> ChildService:
    own = ["--listen", family.addresses[SCHEDULER]]
    if family.metrics_port is not None:
        own.append(f"--metrics-port={family.metrics_port}")
    arguments = [*family.arguments.scheduler, *own, *family.host.scheduler_arguments]
    return spawn_child(SCHEDULER, family.programs.scheduler, arguments, family.on_log)


def _gateway(family: Family) -> ChildService:
    own = gateway_arguments(family.addresses[SCHEDULER], family.gateway)
    arguments, environment = [*family.arguments.gateway, *own], gateway_environment(family.tls) | family.page
    on_line = None
    if PAGE_DEMO in family.page:
        executors = {name: address for name, address in family.addresses.items() if name in family.host.names}
        on_line = kill_when_asked(executors, partial(_kill, family))
    return spawn_child(GATEWAY, family.programs.gateway, arguments, family.on_log, environment, on_line)


def _kill(family: Family, service: str) -> None:
    """Kill a service, which its supervision starts again."""
    if not family.stopping.is_set():
        family.children[service].kill("killed from the live page")
