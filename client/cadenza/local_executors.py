"""The programs that are started, and what runs the executors: this machine, or Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cadenza.child_process import LogSink
from cadenza.executor_hosts import Command, ExecutorHost, ThisMachine
from cadenza.executor_shares import executor_shares
from cadenza.local_checks import check_device
from cadenza.local_options import SCHEDULER, ServiceArguments
from cadenza.local_ports import metrics_ports


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs to run: `["-m", module]` or `[script.py]`; tests replace the services by small scripts."""

    executor: Sequence[str] = ("-m", "executor_svc")
    scheduler: Sequence[str] = ("-m", "scheduler_svc")
    gateway: Sequence[str] = ("-m", "cadenza.gateway")


def executors_of(
    arguments: ServiceArguments,
    programs: Programs | None,
    kept: contextlib.ExitStack,
    on_log: LogSink,
    on_event: Callable[[str], None],
) -> tuple[ExecutorHost, int | None]:
    """Return what runs the executors, and the port of the scheduler's metrics. Raises OptionError."""
    settings = arguments.settings
    command = Command((programs or Programs()).executor, arguments.executor)
    if arguments.uses_ray:
        from cadenza.on_ray.executors import RayExecutors

        ports = metrics_ports(settings, (), kept)
        return RayExecutors(command, arguments, on_log=on_log, on_event=on_event), ports.get(SCHEDULER)
    if programs is None:
        check_device(settings)
    shares = executor_shares(arguments.executors, settings)
    ports = metrics_ports(settings, list(shares), kept)
    return ThisMachine(command, shares, ports, on_log), ports.get(SCHEDULER)
