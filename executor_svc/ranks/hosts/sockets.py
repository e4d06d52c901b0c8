"""Sockets between ranks: how a name is found, and what a connection has once both sides know each other."""

from __future__ import annotations

import socket
import time
from typing import Any

from executor_svc.ranks.hosts.places import PlaceError

_RETRY_S = 0.2
_Address = tuple[int, Any]
"""A family, and what `connect` and `bind` take."""


def find_address(host: str, port: int, deadline: float) -> _Address:
    """Return the first address of a name, which may become known only later; raises PlaceError at the deadline."""
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return int(found[0][0]), found[0][4]
        except OSError as error:
            if time.monotonic() > deadline:
                raise PlaceError(f"the address of rank 0, {host}, is not known: {error.strerror or error}") from None
        pause()


def pause() -> None:
    """Wait before the next try."""
    time.sleep(_RETRY_S)


def settle(end: socket.socket) -> None:
    """Let a connection wait as long as it takes, and send at once."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
