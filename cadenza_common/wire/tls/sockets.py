"""TLS sockets of Python's own that do not stay open where the other side resets the connection first."""

from __future__ import annotations

import ssl


class ResetSafeSocket(ssl.SSLSocket):
    """What contexts make (`sslsocket_class`): `wrap_socket` of Python 3.11 raises ConnectionResetError before its
    caller has the socket, and leaves it open with a ResourceWarning."""

    def __del__(self) -> None:
        self.close()
