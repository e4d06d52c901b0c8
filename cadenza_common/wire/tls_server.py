"""TLS of a listening service, and the rule that nothing listens beyond this machine without credentials."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any, Protocol

import grpc

from cadenza_common.wire.tls.files import PemFile, Reread, TlsError, first_expiries, read_authorities, read_pair
from cadenza_common.wire.transport import parse_address

_Files = tuple[bytes, bytes, bytes | None]


class ListenOptions(Protocol):
    """The options of a service that are about its listener."""

    @property
    def listen(self) -> str: ...
    @property
    def insecure(self) -> bool: ...
    @property
    def tls_cert(self) -> str | None: ...
    @property
    def tls_key(self) -> str | None: ...
    @property
    def tls_client_ca(self) -> str | None: ...


class ListenerFiles:
    """The files of a listener, which are read again before a handshake if they have changed."""

    def __init__(self, certificate: PemFile, key: PemFile, client_ca: PemFile | None) -> None:
        """With `client_ca`, clients must show a certificate that it has signed. Reads the files; raises TlsError."""
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        named = [each for each in (certificate, key, client_ca) if each is not None]
        self._files = Reread(named, self._read)
        self._served = self._files.version

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that follow the files."""
        return grpc.dynamic_ssl_server_credentials(self._configuration(), self._changed, self._client_ca is not None)

    def expiries(self) -> dict[str, float]:
        """As ExpiringFiles."""
        self._files.look()
        chain, _, authorities = self._files.content
        contents: dict[PemFile, bytes | None] = {self._certificate: chain}
        if self._client_ca is not None:
            contents[self._client_ca] = authorities
        return first_expiries(contents)

    def _read(self) -> _Files:
        chain, secret = read_pair(self._certificate, self._key)
        return chain, secret, None if self._client_ca is None else read_authorities(self._client_ca)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        chain, secret, authorities = self._files.content
        return grpc.ssl_server_certificate_configuration([(secret, chain)], root_certificates=authorities)

    def _changed(self) -> Any:
        """The new configuration, None for the old one; grpcio calls it before each handshake."""
        self._files.look()
        # By the version, since a scrape of the metrics may have read the files before.
        if self._files.version == self._served:
            return None
        self._served = self._files.version
        return self._configuration()


def listener_files(
    options: ListenOptions, *, default_port: int, other_proof: str = "", has_other_proof: bool = False
) -> ListenerFiles | None:
    """The files of a service's listener; None: it speaks plain text, on loopback or since --insecure says so.

    `other_proof`: the option by which clients may prove who they are without a certificate; `has_other_proof`: whether
    it is given. Raises TlsError.
    """
    if (options.tls_cert is None) != (options.tls_key is None):
        given, missing = ("--tls-cert", "--tls-key") if options.tls_key is None else ("--tls-key", "--tls-cert")
        raise TlsError(f"{given} needs {missing}")
    if options.tls_client_ca is not None and options.tls_cert is None:
        raise TlsError("--tls-client-ca needs --tls-cert and --tls-key")
    host, _ = parse_address(options.listen, default_port=default_port)
    is_trusted = options.tls_cert is not None and (options.tls_client_ca is not None or has_other_proof)
    if not (is_trusted or options.insecure or is_loopback(host)):
        proof = f" and --tls-client-ca{f' or {other_proof}' if other_proof else ''}"
        raise TlsError(
            f"--listen {options.listen}: other machines could reach this service without credentials: give --tls-cert, "
            f"--tls-key{proof} (`cadenza certs` makes the files), or --insecure to allow it"
        )
    if options.tls_cert is None or options.tls_key is None:
        return None
    client_ca = None if options.tls_client_ca is None else PemFile("--tls-client-ca", options.tls_client_ca)
    return ListenerFiles(PemFile("--tls-cert", options.tls_cert), PemFile("--tls-key", options.tls_key), client_ca)


def credentials_of(files: ListenerFiles | None) -> grpc.ServerCredentials | None:
    """The credentials of a listener; None: plain text."""
    return None if files is None else files.credentials()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener there. A name counts if all of its addresses are loopback ones."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)
