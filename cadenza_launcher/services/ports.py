"""Ports of this machine for the services that Cadenza starts itself; nobody else gets them while a service is down."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence

from cadenza_common.wire.transport import format_address
from cadenza_launcher.services.options import SCHEDULER, Setting

_LAST_PORT = 65535


def scheduler_address(host: str, port: int, kept: contextlib.ExitStack) -> str:
    """Where the scheduler listens: a port that is free is chosen here, so that a restarted scheduler has it too."""
    if port == 0:
        with contextlib.suppress(OSError):  # such as an IPv6 address: the scheduler chooses the port itself
            return reserve_port(host, kept)
    return format_address(host, port)


def metrics_ports(
    settings: Mapping[str, Setting], executors: Sequence[str], kept: contextlib.ExitStack
) -> dict[str, int]:
    """The port of each service's metrics: the scheduler has that of the option, the executors the next ones.

    With port 0 each has a free one, which it keeps over restarts. None without the option. Raises OptionError.
    """
    if "metrics_port" not in settings:
        return {}
    services, first = [SCHEDULER, *executors], int(settings["metrics_port"].value)
    if first + len(executors) > _LAST_PORT:
        reason = f"the scheduler and {len(executors)} executors need {len(services)} ports from {first} on"
        raise settings["metrics_port"].refused("metrics_port", reason)
    if first:
        return {service: first + index for index, service in enumerate(services)}
    host = str(settings["metrics_host"].value) if "metrics_host" in settings else "127.0.0.1"
    ports = {}
    for service in services:
        with contextlib.suppress(OSError):  # such as an IPv6 address: the service chooses the port itself
            ports[service] = int(reserve_port(host, kept).rpartition(":")[2])
    return ports


def reserve_port(host: str, kept: contextlib.ExitStack) -> str:
    """An address with a free port that no other program can take while `kept` is open.

    The port is bound here without listening; a service that sets SO_REUSEADDR, as gRPC does, can still listen on it. If
    the system does not allow that, the port is free now, but another program may take it.
    """
    holder = _bound(host, 0)
    port = int(holder.getsockname()[1])
    try:
        with _bound(host, port) as service:
            service.listen()
    except OSError:
        holder.close()
    else:
        kept.enter_context(holder)
    return format_address(host, port)


def _bound(host: str, port: int) -> socket.socket:
    """A TCP socket that is bound but not listening; raises OSError."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
