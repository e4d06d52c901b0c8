"""gRPC and fork: if a process has used gRPC and its forked child uses it, too, both processes abort.

They share the kernel's poll set, and gRPC aborts on events that it does not know (observed with grpcio 1.76).
"""

from __future__ import annotations

import os

_user: int | None = None  # the process that began to use gRPC: this one, or the parent that it was forked from


def claim_grpc() -> None:
    """Record that this process uses gRPC; raises RuntimeError if it was forked from a process that used it."""
    global _user
    if _user is None:
        _user = os.getpid()
    elif _user != os.getpid():
        raise forked(_user)


def forked(parent: int) -> RuntimeError:
    """The error for a forked child that uses its parent's gRPC."""
    return RuntimeError(
        f"this process was forked from process {parent} after that had begun to use Cadenza's client, and gRPC does "
        'not outlive a fork: make clients after the fork only, or start processes with the method "spawn"'
    )
