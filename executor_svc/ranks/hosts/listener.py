"""Rank 0's port: takes connections of other ranks, and drops all others. A stranger holds up nobody."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import OrderedDict
from contextlib import suppress

from executor_svc.ranks.hosts.credentials import RankCredentials
from executor_svc.ranks.hosts.handshake import (
    ConnectionPurpose,
    HandshakeError,
    Hello,
    Timed,
    answer,
    find_address,
    settle,
)
from executor_svc.ranks.hosts.places import PlaceError, RankPlace
from executor_svc.ranks.links import Frame, Link, LinkClosed

_log = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
_MAX_UNKNOWN = 64
"""Connections that have not proved who they are; the oldest makes room for another."""
_BETWEEN_WARNINGS_S = 1.0
_Key = tuple[int, ConnectionPurpose]


class Listener:
    """Listens at a place; for use by rank 0."""

    def __init__(self, place: RankPlace, credentials: RankCredentials, deadline: float) -> None:
        """Raise PlaceError or CredentialsError; deadline: until when the name of the place may be unknown."""
        self._place, self._credentials = place, credentials
        family, address = find_address(place.host, place.port, deadline)
        credentials.check(address[0], f"MASTER_ADDR {place.host}")
        self._socket = _bound(family, address, place)
        self._changed = threading.Condition()
        self._arrived: dict[_Key, tuple[Link, str]] = {}
        """Connections that nobody has taken yet, and where they came from."""
        self._taken: dict[_Key, str] = {}
        self._unknown: OrderedDict[socket.socket, None] = OrderedDict()
        self._warned = 0.0
        self._is_closed = False
        self.target = f"{address[0]}:{address[1]}"
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()

    def take(self, rank: int, purpose: ConnectionPurpose, deadline: float) -> tuple[Link, str]:
        """Wait for a rank's connection; returns it, and where it came from. Raises TimeoutError."""
        key = rank, purpose
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._arrived, max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            link, peer = self._arrived.pop(key)
            self._taken[key] = peer
            return link, peer

    def drop(self, purpose: ConnectionPurpose) -> None:
        """End the connections for this purpose that nobody has taken."""
        with self._changed:
            for key in [each for each in self._arrived if each[1] is purpose]:
                self._arrived.pop(key)[0].close()

    def close(self) -> None:
        """Stop listening, and close the connections that nobody has taken."""
        _end(self._socket)
        with self._changed:
            self._is_closed = True
            for link, _ in self._arrived.values():
                link.close()
            for end in self._unknown:
                _end(end)

    def _accept(self) -> None:
        while True:
            try:
                end, address = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    time.sleep(0.1)  # until some descriptor is free
                    continue
                return
            end.settimeout(_HANDSHAKE_S)
            try:
                if self._credentials.tls is not None:
                    end = self._credentials.tls.accept(end)
            except (OSError, ValueError) as error:
                self._warn("--tls-cert, --tls-key or --tls-client-ca cannot be used: %s", error)
                _end(end)
                continue
            with self._changed:
                if self._is_closed:
                    _end(end)
                    return
                self._unknown[end] = None
                if len(self._unknown) > _MAX_UNKNOWN:
                    _end(self._unknown.popitem(last=False)[0])
            threading.Thread(target=self._meet, args=(end, str(address[0])), name="new rank", daemon=True).start()

    def _meet(self, end: socket.socket, peer: str) -> None:
        """Take a connection, or drop it."""
        try:
            self._admit(end, peer)
        except (OSError, HandshakeError, LinkClosed) as error:
            self._warn("dropped a connection from %s to the port of ranks: %s", peer, error)
            _end(end)

    def _admit(self, end: socket.socket, peer: str) -> None:
        tls, stream = self._credentials.tls, Timed(end, _HANDSHAKE_S)
        try:
            if tls is not None:
                tls.verify(end)
            hello = answer(stream, self._credentials.secret)
        finally:
            with self._changed:
                self._unknown.pop(end, None)
        settle(end)
        link = Link(end)
        refusal = self._keep(hello, link, peer)
        if refusal:
            _log.warning("refused rank %d at %s: %s", hello.rank, peer, refusal)
            link.send(Frame.REFUSED, refusal.encode())
            link.close()

    def _keep(self, hello: Hello, link: Link, peer: str) -> str:
        """Keep a connection for `take`, and welcome it; returns why not."""
        key = hello.rank, hello.purpose
        if hello.size != self._place.size:
            return f"there WORLD_SIZE is {hello.size}, and at rank 0 {self._place.size}"
        if not 0 < hello.rank < self._place.size:
            return f"there RANK is {hello.rank}, and ranks 1 to {self._place.size - 1} are awaited"
        with self._changed:
            if self._is_closed:  # meanwhile: nobody would close it
                raise LinkClosed("rank 0 has closed its port")
            before = self._arrived.get(key)
            if hello.purpose is not ConnectionPurpose.EXCHANGES:
                taken = self._taken.get(key, None if before is None else before[1])
                if taken is not None:
                    return f"RANK={hello.rank} is there already, from {taken}: each rank needs a number of its own"
            elif before is not None:
                before[0].close()
            link.send(Frame.WELCOME)
            self._arrived[key] = link, peer
            self._changed.notify_all()
        return ""

    def _warn(self, text: str, *arguments: object) -> None:
        """Log a warning, unless there was one within the last second: strangers must not fill the log."""
        with self._changed:
            now = time.monotonic()
            if now - self._warned < _BETWEEN_WARNINGS_S:
                return
            self._warned = now
        _log.warning(text, *arguments)


def _bound(family: int, address: tuple[str, int], place: RankPlace) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except OSError as error:
        found.close()
        where = f"rank 0 cannot listen at MASTER_ADDR {place.host} ({address[0]}), port {place.port}"
        if error.errno == errno.EADDRINUSE:
            raise PlaceError(f"{where}: the port is in use; --rank-port chooses another one") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise PlaceError(f"{where}: this machine does not have the address") from None
        raise PlaceError(f"{where}: {error.strerror or error}") from None
    return found


def _end(end: socket.socket) -> None:
    with suppress(OSError):
        # Not the method of a TLS socket, which would send in plain text meanwhile.
        socket.socket.shutdown(end, socket.SHUT_RDWR)
    end.close()
