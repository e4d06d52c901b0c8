"""A limit of connections for each peer, which gRPC does not have: it knows one for all of them together.

The process looks at its own sockets, through /proc/self/fd (Linux; elsewhere there is no such limit). Connections of an
address beyond its limit are shut down, the newest first, whatever state their handshake is in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections import Counter, defaultdict

from cadenza_common.metrics.listener_counts import ListenerCounts

_LOG = logging.getLogger(__name__)
_FOLDER = "/proc/self/fd"
LOOK_S = 1.0
_SPARE_FILES = 512
"""File descriptors besides those of connections."""


class PeerLimit:
    """Holds the connections of each address to one listener of this process within a limit."""

    def __init__(self, port: int, max_per_peer: int, counts: ListenerCounts | None = None) -> None:
        """counts: gets the numbers of connections."""
        self._port = port
        self._max_per_peer = max_per_peer
        self._counts = counts or ListenerCounts()
        self._peers: dict[int, str] = {}
        """The peer's address by inode of the socket, oldest first; empty for sockets that are not of the listener."""
        self._shut_down: set[int] = set()
        """The inodes of sockets that were shut down and are not closed yet."""
        self._reported: set[str] = set()

    def look(self) -> int:
        """Shut down what is over the limit; returns the number of those connections."""
        found: dict[int, int] = {}  # file descriptor by inode
        for name in os.listdir(_FOLDER):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(name)
        self._peers = {inode: peer for inode, peer in self._peers.items() if inode in found}
        for inode in sorted(found.keys() - self._peers.keys()):  # roughly in the order of their beginning
            self._peers[inode] = _peer_of(found[inode], inode, self._port)
        connections: defaultdict[str, list[int]] = defaultdict(list)
        for inode, peer in self._peers.items():
            if peer:
                connections[peer].append(inode)
        over = {peer: each[self._max_per_peer :] for peer, each in connections.items()}
        for inodes in over.values():
            for inode in inodes:
                _shut_down(found[inode], inode)
        self._report(Counter({peer: len(each) for peer, each in over.items() if each}))
        ended = {inode for inodes in over.values() for inode in inodes}
        self._counts.num_connections = sum(map(len, connections.values())) - len(ended)
        self._counts.num_closed += len(ended - self._shut_down)
        self._shut_down = ended
        return len(ended)

    async def run(self) -> None:
        """Look once a second, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)

    def _report(self, over: Counter[str]) -> None:
        for peer in over.keys() - self._reported:
            _LOG.warning("%s has over %d connections; further ones are closed", peer, self._max_per_peer)
        self._reported = set(over)


def start_peer_limit(address: str, max_per_peer: int, counts: ListenerCounts) -> asyncio.Task[None] | None:
    """Hold the peers of the listener at `HOST:PORT` to a limit, and count connections; None: there is no /proc."""
    if not os.path.isdir(_FOLDER):
        _LOG.info("--max-connections-per-peer has no effect here: it needs Linux's /proc")
        return None
    limit = PeerLimit(int(address.rpartition(":")[2]), max_per_peer, counts)
    return asyncio.create_task(limit.run(), name="peer-limit")


def allow_connections(max_connections: int, option: str = "--max-connections") -> None:
    """Raise this process's limit of open files, if it may, so that so many connections can be there."""
    try:
        import resource
    except ImportError:  # not Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < wanted:
            _LOG.warning("%s %d: only %d files may be open (ulimit -n)", option, max_connections, most)


def _peer_of(number: int, inode: int, port: int) -> str:
    """The peer of a connection to the port; empty for another socket."""
    with contextlib.suppress(OSError), _copy(number, inode) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == port:
            return str(connection.getpeername()[0]).removeprefix("::ffff:")
    return ""


def _shut_down(number: int, inode: int) -> None:
    """End a connection; gRPC, whose socket it is, sees that its peer has left."""
    with contextlib.suppress(OSError), _copy(number, inode) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _copy(number: int, inode: int) -> socket.socket:
    """A descriptor of our own for a socket; raises OSError if the number belongs to another one meanwhile."""
    copy = socket.socket(fileno=os.dup(number))
    if os.fstat(copy.fileno()).st_ino != inode:
        copy.close()
        raise OSError("another socket")
    return copy
