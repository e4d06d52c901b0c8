"""Ports of this machine for the services that Cadenza starts itself; nobody else gets them while a service is down."""

from __future__ import annotations

import contextlib
import socket

from cadenza.transport import format_address


def scheduler_address(host: str, port: int, kept: contextlib.ExitStack) -> str:
    """Where the scheduler listens: a port that is free is chosen here, so that a restarted scheduler has it too."""
    if port == 0:
        with contextlib.suppress(OSError):  # such as an IPv6 address: the scheduler chooses the port itself
            return reserve_port(host, kept)
    return format_address(host, port)


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
