"""gRPC and fork: in a child of a process that has used gRPC, using it again ends both processes.

They share the kernel's poll set, and gRPC aborts when it finds events that it does not know (seen with grpcio 1.76).
"""

from __future__ import annotations

import os

_user: int | None = None  # the process whose use of gRPC this one has, its own or inherited


def claim_grpc() -> None:
    """Say that this process uses gRPC from now on; raises RuntimeError if it was forked from one that did."""
    global _user
    if _user is None:
        _user = os.getpid()
    elif _user != os.getpid():
        raise forked(_user)


def forked(parent: int) -> RuntimeError:
    """The error for a child that uses what its parent began."""
    return RuntimeError(
        f"this process was forked from process {parent} after that had begun to use Cadenza's client, and gRPC does "
        'not outlive a fork: make clients after the fork only, or start processes with the method "spawn"'
    )
