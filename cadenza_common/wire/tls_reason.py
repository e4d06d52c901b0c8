"""Why no connection comes about, where TLS is the reason: gRPC says "Socket closed" for most of it (measured).

A connection of Python's own finds the reason.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl

from cadenza_common.wire.tls import TLS
from cadenza_common.wire.tls.files import PemFile, is_expired
from cadenza_common.wire.tls.sockets import ResetSafeSocket
from cadenza_common.wire.transport import parse_address

_TIMEOUT_S = 2.0
_ANSWER_S = 1.0
_ALERT = "ALERT"
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNEXPECTED_MESSAGE")


def tls_reason(
    target: str, tls: TLS | None, *, default_port: int, prefix: str = "--tls-", timeout_s: float = _TIMEOUT_S
) -> str:
    """Why TLS keeps us from a service, as a clause about it; empty: TLS is not the reason. Blocks for a short time.

    `prefix`: that of the options which name the files.
    """
    host, port = parse_address(target, default_port=default_port)
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            if tls is not None:
                return _refusal(connection, tls, host, prefix)
            return f"it speaks TLS: {prefix}ca FILE names the CA of its certificate" if _speaks_tls(connection) else ""
    except (OSError, ValueError):
        return ""


async def find_tls_reason(target: str, tls: TLS | None, *, default_port: int, prefix: str = "--tls-") -> str:
    """As `tls_reason`, without blocking the event loop."""
    return await asyncio.to_thread(tls_reason, target, tls, default_port=default_port, prefix=prefix)


def _speaks_tls(connection: socket.socket) -> bool:
    """Whether the other side answers a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = ResetSafeSocket
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with context.wrap_socket(connection):
            return True
    except ssl.SSLError as error:
        return _ALERT in (error.reason or "")


def _refusal(connection: socket.socket, tls: TLS, host: str, prefix: str) -> str:
    """The reason why a connection over TLS fails."""
    # Without `ca` gRPC trusts authorities of its own, which Python's default ones stand for here.
    context = ssl.create_default_context(cafile=None if tls.ca is None else os.fspath(tls.ca))
    context.sslsocket_class = ResetSafeSocket
    context.set_alpn_protocols(["h2"])
    try:
        if tls.cert is not None and tls.key is not None:
            context.load_cert_chain(tls.cert, tls.key)
        with context.wrap_socket(connection, server_hostname=tls.server_name or host) as secure:
            # In TLS 1.3 the server checks our certificate after our side of the handshake is done. One that takes it
            # sends its settings; a gRPC server that does not closes the connection without an alert (measured).
            secure.settimeout(_ANSWER_S)
            return "" if secure.recv(1) else _no_proof(tls, prefix)
    except TimeoutError:
        return ""
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not valid here: {error.verify_message.rstrip('.')}"
    except ssl.SSLError as error:
        reason = error.reason or ""
        if reason in _NOT_TLS:
            return "it does not speak TLS"
        return f"it refuses the TLS handshake: {reason.lower().replace('_', ' ')}" if reason else ""


def _no_proof(tls: TLS, prefix: str) -> str:
    """Why a server closes the connection after our side of the handshake."""
    if tls.cert is None:
        return f"it requires a certificate of its clients: {prefix}cert and {prefix}key name one"
    if is_expired(PemFile(f"{prefix}cert", os.fspath(tls.cert))):
        return f"it refuses our certificate, {tls.cert}, which has expired"
    return f"it refuses our certificate, {tls.cert}, which is not of a CA that it trusts"
