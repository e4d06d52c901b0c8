"""The processes of ranks 1 and up: children of rank 0, each with a link to it and the memory of exchanges."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from executor_svc.cpu_memory import FAMILY, family
from executor_svc.ranks.links import Frame, Link
from executor_svc.ranks.members import Members, SharedMemory

MODULE = "executor_svc.startup.member"
"""What a child runs; its arguments: its rank, the descriptors of its links and of the memory, and rank 0's process."""

_PR_SET_PDEATHSIG = 1


class RankProcesses(Members):
    """Starts the other ranks and watches them."""

    exchanges: SharedMemory

    def __init__(
        self, size: int, options: dict[str, Any], environment: Callable[[int], Mapping[str, str]] = lambda _: {}
    ) -> None:
        """size: of all ranks, this one included; options: those of a child, without its number of the rank;
        environment: further variables of the child that is this rank.
        """
        super().__init__()
        memory = os.memfd_create("cadenza ranks")
        self.exchanges = SharedMemory(memory)
        self._children: list[ChildProcess] = []
        self._stopped = threading.Event()
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            our_adapters, their_adapters = socket.socketpair()
            with theirs, their_adapters:
                ends = theirs.fileno(), their_adapters.fileno(), memory
                command = [sys.executable, "-m", MODULE, *map(str, (rank, *ends, os.getpid()))]
                child = ChildProcess(f"rank {rank}", command, ends, environment(rank))
            link = Link(ours)
            self.adapter_links.append(Link(our_adapters))
            link.send(Frame.CONFIG, json.dumps(options).encode())
            self.links.append(link)
            self._children.append(child)

    def meet(self, num_bytes: int) -> None:
        """As in `Members`: gives the memory its size."""
        os.ftruncate(self.exchanges.descriptor, num_bytes)
        self.tell(Frame.MEMORY, str(num_bytes).encode())

    def watch(self, on_death: Callable[[int, str], None]) -> None:
        """As in `Members`. A process that ends with code 0 has seen this one close its link: it has not failed."""
        # Not this object, which keeps the links: the others end once nothing keeps them.
        once, stopped = threading.Lock(), self._stopped

        def ended(rank: int, child: ChildProcess) -> None:
            if child.ended.result() and not stopped.is_set() and once.acquire(blocking=False):
                on_death(rank, child.how())

        for rank, child in zip(self.ranks, self._children, strict=True):
            child.ended.add_done_callback(lambda _, rank=rank, child=child: ended(rank, child))  # type: ignore[misc]

    def stop(self) -> None:
        """As in `Members`. Their end is no failure then."""
        self._stopped.set()
        for link in (*self.links, *self.adapter_links):
            link.close()
        for child in self._children:
            child.kill()

    def how_ended(self, rank: int) -> str:
        """As in `Members`."""
        child = self._children[rank - 1]
        return child.how()


class ChildProcess:
    """A process that is killed when this one ends. It has a thread, which waits for its end.

    The thread starts it, too: the system kills it when the thread that started it ends, and a thread that stops in
    order, such as the device's, is no reason for that.
    """

    def __init__(
        self, name: str, command: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        """Start it with these descriptors, besides its output, and variables, besides ours. Raises OSError."""
        self.ended: Future[int] = Future()
        """Its exit code, below 0 the number of the signal that ended it."""
        started: Future[subprocess.Popen[bytes]] = Future()

        def run() -> None:
            try:
                process = subprocess.Popen(
                    command,
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **environment, FAMILY: family()},
                )
            except OSError as error:
                started.set_exception(error)
                return
            started.set_result(process)
            self.ended.set_result(process.wait())

        threading.Thread(target=run, name=name, daemon=True).start()
        self._process = started.result()

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    def how(self) -> str:
        """Wait for its end, and say how that was."""
        code = self.ended.result()
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"process {self._process.pid}, {ended}"


def end_with(parent: int) -> None:
    """Let this process be killed when its parent ends, however that does; Linux. Ends it if that has happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
