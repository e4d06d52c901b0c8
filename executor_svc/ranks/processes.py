"""The processes of ranks 1 and up: children of rank 0, each with a link to it and the memory of exchanges."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor_svc.ranks.links import Frame, Link
from executor_svc.ranks.members import Members

MODULE = "executor_svc.startup.member"
"""What a child runs; its arguments: its rank, the descriptors of its links and of the memory, and rank 0's process."""

_PR_SET_PDEATHSIG = 1


class RankProcesses(Members):
    """Starts the other ranks and watches them."""

    def __init__(self, size: int, options: dict[str, Any]) -> None:
        """size: of all ranks, this one included; options: those of a child, without its number of the rank."""
        super().__init__()
        self._memory = os.memfd_create("cadenza ranks")
        self.exchanges = self._open_memory
        self._children: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            our_adapters, their_adapters = socket.socketpair()
            with theirs, their_adapters:
                ends = theirs.fileno(), their_adapters.fileno(), self._memory
                child = subprocess.Popen(
                    [sys.executable, "-m", MODULE, *map(str, (rank, *ends, os.getpid()))],
                    pass_fds=ends,
                    stdin=subprocess.DEVNULL,
                )
            link = Link(ours)
            self.adapter_links.append(Link(our_adapters))
            link.send(Frame.CONFIG, json.dumps(options).encode())
            self.links.append(link)
            self._children.append(child)

    def _open_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return the memory of exchanges, of this size, and let the others open it."""
        os.ftruncate(self._memory, num_bytes)
        self.tell(Frame.MEMORY, str(num_bytes).encode())
        return map_memory(self._memory, num_bytes)

    def watch(self, on_death: Callable[[int, str], None]) -> None:
        """As in `Members`."""
        once = threading.Lock()

        def wait(rank: int, child: subprocess.Popen[bytes]) -> None:
            code = child.wait()
            if once.acquire(blocking=False):
                on_death(rank, _how(child.pid, code))

        for rank, child in zip(self.ranks, self._children, strict=True):
            threading.Thread(target=wait, args=(rank, child), name=f"rank {rank}", daemon=True).start()

    def stop(self) -> None:
        """As in `Members`."""
        for link, child in zip(self.links, self._children, strict=True):
            link.close()
            child.kill()

    def how_ended(self, rank: int) -> str:
        """As in `Members`."""
        child = self._children[rank - 1]
        return _how(child.pid, child.wait())


def map_memory(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """Return shared memory, all zeros at first; it lives as long as the array."""
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)


def end_with(parent: int) -> None:
    """Let this process be killed when its parent ends, however that does; Linux. Ends it if that has happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _how(pid: int, code: int) -> str:
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"process {pid}, {ended}"
