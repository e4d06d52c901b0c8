"""How a client or a scheduler proves who it is to a service, and which services it trusts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields

import grpc

from cadenza_common.wire.tls.files import PemFile, Reread, TlsError, first_expiries, read_authorities, read_pair

VARIABLE_PREFIX = "CADENZA_TLS_"


@dataclass(frozen=True, slots=True)
class TLS:
    """TLS of a connection, by PEM files that are read again when they change.

    `ca`: certificates of the authorities that may have signed the server's; without it, those that come with gRPC.
    `cert` and `key`: the certificate chain and key that this side shows, for servers that require one. `server_name`:
    the name that the server's certificate must have, where that is not the host of the address.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            given, missing = ("cert", "key") if self.key is None else ("key", "cert")
            raise ValueError(f"TLS: {given} needs {missing}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> TLS | None:
        """What CADENZA_TLS_CA, _CERT, _KEY and _SERVER_NAME say; None if none is set. Raises ValueError."""
        environment = os.environ if environment is None else environment
        given = {name: environment.get(VARIABLE_PREFIX + name.upper()) or None for name in _NAMES}
        return cls(**given) if any(given.values()) else None


_NAMES = tuple(field.name for field in fields(TLS))


@contextmanager
def no_tls_variables() -> Iterator[None]:
    """In the body, the environment names no TLS: for connections to services that this process has started."""
    kept = {name: os.environ.pop(name) for name in tls_variables()}
    try:
        yield
    finally:
        os.environ.update(kept)


def tls_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """The variables of the environment that are about TLS."""
    return [name for name in (os.environ if environment is None else environment) if name.startswith(VARIABLE_PREFIX)]


class ChannelFiles:
    """The files of a TLS, and credentials made from what they hold now. `prefix`: that of the options' names."""

    def __init__(self, tls: TLS, prefix: str = "--tls-") -> None:
        """Reads the files; raises TlsError."""
        self.tls = tls
        self._named = {
            name: PemFile(prefix + name, os.fspath(path))
            for name, path in (("ca", tls.ca), ("cert", tls.cert), ("key", tls.key))
            if path is not None
        }
        self._files = Reread(list(self._named.values()), self._read)

    @property
    def version(self) -> int:
        """Grows with each change of the credentials."""
        return self._files.version

    def look(self) -> int:
        """Read the files if they have changed; returns the version."""
        self._files.look()
        return self._files.version

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials made from the files as they were last read."""
        ca, chain, key = self._files.content
        return grpc.ssl_channel_credentials(ca, key, chain)

    def options(self) -> list[tuple[str, str]]:
        """Channel options: the name that the server's certificate must have."""
        name = self.tls.server_name
        return [] if name is None else [("grpc.ssl_target_name_override", name)]

    def expiries(self) -> dict[str, float]:
        """As ExpiringFiles."""
        self.look()
        ca, chain, _ = self._files.content
        contents = {"ca": ca, "cert": chain}
        return first_expiries({self._named[name]: each for name, each in contents.items() if each is not None})

    def _read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        ca = read_authorities(self._named["ca"]) if "ca" in self._named else None
        chain, key = read_pair(self._named["cert"], self._named["key"]) if "cert" in self._named else (None, None)
        return ca, chain, key


__all__ = ["TLS", "ChannelFiles", "TlsError", "no_tls_variables", "tls_variables"]
