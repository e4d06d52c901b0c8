"""The connections over which ranks of several machines exchange rows: one between rank 0 and each other rank.

They are made anew for each session: so a rank that fails closes them, which releases whoever waits, and nothing of a
failed step is left in them.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Protocol

from executor_svc.errors import StartError
from executor_svc.ranks.hosts.connecting import Connector
from executor_svc.ranks.hosts.handshake import ConnectionPurpose
from executor_svc.ranks.hosts.listener import Listener
from executor_svc.ranks.links import Link, LinkClosed

_RENEWAL_S = 10.0


class ExchangeLinks(Protocol):
    """Those of one rank."""

    def link(self, rank: int) -> Link:
        """Return the connection to another rank; raises LinkClosed if there is none."""
        ...

    def close(self) -> None:
        """Close all of this session; any thread may."""
        ...

    def renew(self) -> None:
        """Begin a session; raises LinkClosed."""
        ...


class LeaderExchanges:
    """Implements `ExchangeLinks` for rank 0. A rank connects when it begins a session, so before the first exchange."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._open = False

    def link(self, rank: int) -> Link:
        """As in `ExchangeLinks`."""
        found = self._links.get(rank)
        if found is None:
            with suppress(TimeoutError):
                found, _ = self._listener.take(rank, ConnectionPurpose.EXCHANGES, time.monotonic() + _RENEWAL_S)
        if found is None:
            raise LinkClosed("there is no connection for exchanges")
        with self._lock:
            if not self._open:
                found.close()
                raise LinkClosed("the exchanges of this session have ended")
            self._links[rank] = found
        return found

    def close(self) -> None:
        """As in `ExchangeLinks`."""
        self._close_taken()
        # Ranks that are ahead may wait in an exchange that this rank has not reached.
        self._listener.drop(ConnectionPurpose.EXCHANGES)

    def renew(self) -> None:
        """As in `ExchangeLinks`; after `close`, as no other rank has connected since."""
        self._close_taken()
        self._open = True

    def _close_taken(self) -> None:
        with self._lock:
            self._open = False
            for link in self._links.values():
                link.close()
            self._links.clear()


class MemberExchanges:
    """Implements `ExchangeLinks` for another rank."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._link: Link | None = None

    def link(self, rank: int) -> Link:
        """As in `ExchangeLinks`; rank: 0."""
        found = self._link
        if found is None:
            raise LinkClosed("there is no connection for exchanges")
        return found

    def close(self) -> None:
        """As in `ExchangeLinks`."""
        if self._link is not None:
            self._link.close()

    def renew(self) -> None:
        """As in `ExchangeLinks`."""
        self.close()
        try:
            self._link = self._connector.connect(ConnectionPurpose.EXCHANGES, _RENEWAL_S)
        except StartError as error:
            raise LinkClosed(str(error)) from error
