"""Counts of what a listener refuses before a request is known, for the metrics; and the log lines about it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Protocol

_LOG = logging.getLogger(__name__)
LOG_INTERVAL_S = 60.0
"""Each reason has one log line in this time: whoever is refused could fill the disk otherwise."""


class RefusalReason(StrEnum):
    """Why a call was refused before its message was read."""

    NO_TOKEN = "no_token"
    """It has no bearer token, and there is a tenants file."""
    UNKNOWN_TOKEN = "unknown_token"
    """Its token is not in the tenants file."""
    REVOKED_TOKEN = "revoked_token"
    """Its token was in the tenants file since the scheduler started, and was taken out."""
    NO_ADMIN = "no_admin"
    """It is a call of AdminService, and its tenant is no admin."""
    WRONG_CERTIFICATE = "wrong_certificate"
    """The client's certificate does not have the scheduler's name (executors)."""
    METADATA_SIZE = "metadata_size"
    """It has more metadata than is allowed."""
    CALLS_OF_PEER = "calls_of_peer"
    """Its address has as many calls with one message as one may have."""
    STREAMS_OF_PEER = "streams_of_peer"
    """Its address has as many streams of messages, sessions for instance, as one may have."""
    LATE_MESSAGE = "late_message"
    """Its message did not arrive in time."""
    NO_MESSAGE = "no_message"
    """It ended without a message."""


_OF_LIMITS = (
    RefusalReason.METADATA_SIZE,
    RefusalReason.CALLS_OF_PEER,
    RefusalReason.STREAMS_OF_PEER,
    RefusalReason.LATE_MESSAGE,
    RefusalReason.NO_MESSAGE,
)
SCHEDULER_REFUSALS = (
    RefusalReason.NO_TOKEN,
    RefusalReason.UNKNOWN_TOKEN,
    RefusalReason.REVOKED_TOKEN,
    RefusalReason.NO_ADMIN,
    *_OF_LIMITS,
)
EXECUTOR_REFUSALS = (RefusalReason.WRONG_CERTIFICATE, *_OF_LIMITS)


class PeerContext(Protocol):
    """The part of a gRPC servicer context that names the client."""

    def peer(self) -> str:
        """`ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`."""


class ListenerCounts:
    """Counts since the start; those of connections are set by the thread that counts them."""

    def __init__(self, refusals: Iterable[RefusalReason] = ()) -> None:
        """refusals: every kind that can occur; each is counted from 0."""
        self._refused = Counter(dict.fromkeys(refusals, 0))
        self._unlogged: dict[RefusalReason, int] = {}
        """By refusals that were logged less than LOG_INTERVAL_S ago: how many there were since."""
        self._last_peer: dict[RefusalReason, str] = {}
        self.num_connections: int | None = None
        """Open connections; None where they cannot be counted."""
        self.num_closed = 0
        """Connections that were closed since their address had too many."""

    @property
    def refused(self) -> Mapping[str, int]:
        """Refused calls by reason; a copy."""
        return {str(reason): count for reason, count in self._refused.items()}

    def copy(self) -> ListenerCounts:
        """The numbers as they are now."""
        other = ListenerCounts()
        other._refused = self._refused.copy()
        other.num_connections, other.num_closed = self.num_connections, self.num_closed
        return other

    def refuse(self, reason: RefusalReason, context: PeerContext) -> None:
        """Count a refused call, and log it unless its reason was logged shortly before. No metadata is logged."""
        self._refused[reason] += 1
        peer = context.peer()
        self._last_peer[reason] = peer.rpartition(":")[0] or peer or "an address that is gone"
        if reason in self._unlogged:
            self._unlogged[reason] += 1
            return
        _LOG.warning("refused a call of %s: %s", self._last_peer[reason], reason)
        self._wait(reason)

    def _wait(self, reason: RefusalReason) -> None:
        self._unlogged[reason] = 0
        asyncio.get_running_loop().call_later(LOG_INTERVAL_S, self._log_more, reason)

    def _log_more(self, reason: RefusalReason) -> None:
        count = self._unlogged.pop(reason)
        if count:
            text = "refused %d more calls within %g s: %s; the last of %s"
            _LOG.warning(text, count, LOG_INTERVAL_S, reason, self._last_peer[reason])
            self._wait(reason)
