"""The other ranks' way to rank 0."""

from __future__ import annotations

import socket
import ssl
import time

from executor_svc.ranks.hosts.credentials import RankCredentials
from executor_svc.ranks.hosts.handshake import (
    ConnectionPurpose,
    HandshakeError,
    Hello,
    Timed,
    find_address,
    offer,
    pause,
    settle,
)
from executor_svc.ranks.hosts.places import PlaceError, RankPlace
from executor_svc.ranks.links import Frame, Link, LinkClosed

_TRY_S = 10.0


class Connector:
    """Connects a rank to rank 0."""

    def __init__(self, place: RankPlace, credentials: RankCredentials) -> None:
        self._place, self._credentials = place, credentials

    def connect(self, purpose: ConnectionPurpose, timeout_s: float) -> Link:
        """Return a connection that rank 0 has welcomed, as soon as it listens.

        Raises PlaceError or CredentialsError, whose message names the variable or the option.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._try(purpose, deadline)
            except (ssl.SSLCertVerificationError, HandshakeError) as error:
                raise PlaceError(f"no connection to rank 0 at {self._place.target}: {_reason(error)}") from None
            except (OSError, LinkClosed) as error:
                if time.monotonic() > deadline:
                    raise PlaceError(
                        f"no connection to rank 0 at {self._place.target} within {timeout_s:g} s "
                        f"(--rank-connect-timeout-s): {_reason(error)}; MASTER_ADDR, or LWS_LEADER_ADDRESS, and "
                        "--rank-port say where it listens"
                    ) from None
            pause()

    def _try(self, purpose: ConnectionPurpose, deadline: float) -> Link:
        family, address = find_address(self._place.host, self._place.port, deadline)
        self._credentials.check(address[0], f"MASTER_ADDR {self._place.host}")
        end = socket.socket(family, socket.SOCK_STREAM)
        try:
            end.settimeout(_TRY_S)
            end.connect(address)
            if self._credentials.tls is not None:
                end = self._credentials.tls.connect(end)
            offer(Timed(end, _TRY_S), self._credentials.secret, Hello(purpose, self._place.rank, self._place.size))
            end.settimeout(_TRY_S)
            link = Link(end)
            kind, content = link.receive()
            if kind != Frame.WELCOME:
                raise HandshakeError(f"it refuses this rank: {content.decode(errors='replace')}")
            settle(end)
        except BaseException:
            end.close()
            raise
        return link


def _reason(error: Exception) -> str:
    return getattr(error, "verify_message", None) or getattr(error, "strerror", None) or str(error)
