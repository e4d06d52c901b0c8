"""What one address may take of HTTP before its requests are known: connections, and time for half a request."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

from aiohttp import web

from gateway_svc.http.unreadable import ApiConnection

HEAD_S = 10.0
"""How long a request's head may take: from the connection's beginning, or from the first byte of a later one."""
_LOG = logging.getLogger(__name__)


class Connections:
    """The connections of one listener."""

    def __init__(self, max_per_peer: int, head_s: float = HEAD_S) -> None:
        self._max_per_peer = max_per_peer
        self.head_s = head_s
        self._open: Counter[str] = Counter()
        """By address."""
        self._reported: set[str] = set()

    @property
    def num_open(self) -> int:
        """Of all addresses."""
        return self._open.total()

    def take(self, address: str) -> bool:
        """Count a connection; returns whether its address may have another one."""
        if self._open[address] >= self._max_per_peer:
            if address not in self._reported:
                self._reported.add(address)
                _LOG.warning("%s has %d connections; further ones are closed", address, self._max_per_peer)
            return False
        self._open[address] += 1
        return True

    def free(self, address: str) -> None:
        """Take an ended connection off the count."""
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]
            self._reported.discard(address)


class Connection(ApiConnection):
    """aiohttp's handler of one connection, which alone closes nothing before its time for keep-alive."""

    __slots__ = ("_address", "_connections", "_has_more", "_request", "_timer")

    def __init__(self, connections: Connections, manager: web.Server, **options: Any) -> None:
        """manager, options: of aiohttp's."""
        super().__init__(manager, loop=asyncio.get_running_loop(), **options)
        self._connections = connections
        self._address: str | None = None
        """None: it is not counted."""
        self._request: web.Request | None = None
        """The one that is being answered."""
        self._has_more = False
        """Whether something has come behind its body."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, or end at once if its address has too many."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]).removeprefix("::ffff:") if isinstance(peer, tuple) else ""
        if not self._connections.take(address):
            if isinstance(transport, asyncio.Transport):
                transport.abort()
            return
        self._address = address
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End."""
        if self._address is None:
            return
        self._connections.free(self._address)
        self._address = None
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        if self._address is None:
            return
        if self._request is None:
            self._wait_for_head()
        elif self._request.content.is_eof():
            self._has_more = True
        super().data_received(data)

    def begins(self, request: web.Request) -> None:
        """A head is there, and is being answered."""
        self._stop_waiting()
        self._request, self._has_more = request, False

    def ends(self) -> None:
        """It has been answered."""
        self._request = None
        if self._has_more and self._address is not None:
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._connections.head_s, self.force_close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
