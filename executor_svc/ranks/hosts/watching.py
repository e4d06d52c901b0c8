"""Notices within 2 s that the process or the machine at the other end of a connection is gone.

The end of a process closes its connections. A machine that vanishes, or a network that is cut, does not: so both sides
send a byte every HEARTBEAT_S, and the system ends the connection when the other machine has not confirmed one for
`sockets.UNANSWERED_S`, in which it sends it again several times. A process that is merely busy, or stopped, is not
gone: its system confirms what it gets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from executor_svc.ranks.links import Link

HEARTBEAT_S = 0.4
_BEAT = b"\0"


def watch(link: Link, on_end: Callable[[str], None]) -> None:
    """Call on_end with how the connection ended, once it does, in a thread of its own."""

    def run() -> None:
        try:
            _beat(link)
        except (OSError, ValueError) as error:  # ValueError: a TLS socket that was closed meanwhile
            on_end(str(getattr(error, "strerror", None) or error).lower())

    link.end.settimeout(HEARTBEAT_S)
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
