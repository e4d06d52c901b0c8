"""Notices within 2 s that the process or the machine at the other end of a connection is gone.

The end of a process closes its connections. A machine that vanishes, or a network that is cut, does not: so both sides
send a byte every HEARTBEAT_S, and the system ends the connection when the other machine has not confirmed one for
UNCONFIRMED_S, in which it sends it again several times. A process that is merely busy, or stopped, is not gone: its
system confirms what it gets. The other connections have no such limit: there, a side that is busy takes nothing.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable

from executor_svc.ranks.links import Link

HEARTBEAT_S = 0.4
UNCONFIRMED_S = 1.5
"""On Linux; elsewhere a machine that vanishes is noticed when the system gives up."""
_BEAT = b"\0"


def watch(link: Link, on_end: Callable[[str], None]) -> None:
    """Call on_end with how the connection ended, once it does, in a thread of its own."""

    def run() -> None:
        try:
            _beat(link)
        except (OSError, ValueError) as error:  # ValueError: a TLS socket that was closed meanwhile
            on_end(str(getattr(error, "strerror", None) or error).lower())

    link.end.settimeout(HEARTBEAT_S)
    if sys.platform == "linux":
        link.end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNCONFIRMED_S * 1000))
    threading.Thread(target=run, name="watch of a rank", daemon=True).start()


def _beat(link: Link) -> None:
    """Send and receive until the end; raises OSError or ValueError. One thread does both, as TLS needs it."""
    sent = 0.0
    while True:
        if time.monotonic() - sent >= HEARTBEAT_S:
            link.end.sendall(_BEAT)
            sent = time.monotonic()
        try:
            if not link.end.recv(64):
                raise ConnectionResetError("its process ended")
        except TimeoutError as error:
            if error.errno is not None:  # of the connection, not of this wait
                raise
