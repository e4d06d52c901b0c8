"""By what ranks on several machines know each other: a secret, mutual TLS, or both."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza_common.wire.tls.files import PemFile, TlsError, first_name, read_authorities, read_pair
from cadenza_common.wire.tls.sockets import ResetSafeSocket
from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.ranks.hosts.handshake import HandshakeError

_LEAST_BYTES = 16


class CredentialsError(StartError):
    """What an option names cannot be used, or is missing; the message names the option."""


@dataclass(frozen=True, slots=True)
class RankTls:
    """The certificate that all ranks of a replica show, or certificates with one name, and the CA that signs them.

    The files are read for every connection, so that new ones are used.
    """

    certificate: PemFile
    key: PemFile
    authorities: PemFile
    name: str
    """That of this rank's certificate, which the other side's must have."""

    def accept(self, end: socket.socket) -> ssl.SSLSocket:
        """Return rank 0's end of a connection, before `verify`; raises OSError."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0
        return context.wrap_socket(end, server_side=True, do_handshake_on_connect=False)

    def verify(self, end: socket.socket) -> None:
        """Let the other side show its certificate; raises OSError or HandshakeError."""
        assert isinstance(end, ssl.SSLSocket)
        end.do_handshake()
        shown: Any = end.getpeercert() or {}
        names = [value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"]
        if self.name not in names:
            raise HandshakeError(f"its certificate is for {', '.join(names)}, not for {self.name}")

    def connect(self, end: socket.socket) -> ssl.SSLSocket:
        """Return another rank's end, after the handshake; raises OSError."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(end, server_hostname=self.name)

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.sslsocket_class = ResetSafeSocket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate.path, self.key.path)
        context.load_verify_locations(self.authorities.path)
        return context


@dataclass(frozen=True, slots=True)
class RankCredentials:
    """What a rank shows, and asks for."""

    secret: bytes = b""
    """Empty: none."""
    tls: RankTls | None = None

    def check(self, address: str, where: str) -> None:
        """Raise CredentialsError if connections to this IP address, of a variable, need credentials and have none."""
        if self.secret or self.tls is not None or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return
        raise CredentialsError(
            f"{where} is {address}, beyond loopback: ranks need --rank-secret-file, or --tls-cert, --tls-key and "
            "--tls-client-ca, so that nobody else joins them"
        )


def read_credentials(config: ExecutorConfig) -> RankCredentials:
    """Return those of the options; raises CredentialsError."""
    return RankCredentials(_secret(config.rank_secret_file), _tls(config))


def _secret(path: str | None) -> bytes:
    if path is None:
        return b""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise CredentialsError(f"--rank-secret-file {path}: {(error.strerror or str(error)).lower()}") from None
    if len(secret) < _LEAST_BYTES:
        raise CredentialsError(f"--rank-secret-file {path}: {len(secret)} bytes are too few, it needs {_LEAST_BYTES}")
    return secret


def _tls(config: ExecutorConfig) -> RankTls | None:
    if config.tls_cert is None or config.tls_key is None or config.tls_client_ca is None:
        return None
    files = (
        PemFile("--tls-cert", config.tls_cert),
        PemFile("--tls-key", config.tls_key),
        PemFile("--tls-client-ca", config.tls_client_ca),
    )
    try:
        read_pair(files[0], files[1])
        read_authorities(files[2])
        name = first_name(files[0])
    except TlsError as error:
        raise CredentialsError(str(error)) from None
    if name is None:
        raise CredentialsError(
            f"--tls-cert {config.tls_cert}: it names no host, and ranks know each other by that name"
        )
    return RankTls(*files, name)
