"""Certificates and keys in PEM files: checked when they are read, and read again when they change."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_LOG = logging.getLogger(__name__)
_SOON = datetime.timedelta(days=7)
_TRIES = 3
_Content = TypeVar("_Content")
_Stamp = tuple[tuple[int, int, int], ...]


class TlsError(ValueError):
    """A file or an option of TLS is wrong; the message names both and is for the user."""


@dataclass(frozen=True, slots=True)
class PemFile:
    """A file and the option that names it."""

    option: str
    path: str

    def wrong(self, reason: str) -> TlsError:
        """The error for this file."""
        return TlsError(f"{self.option} {self.path}: {reason}")

    def read(self) -> bytes:
        """The whole file; raises TlsError."""
        try:
            with open(self.path, "rb") as file:
                return file.read()
        except OSError as error:
            raise self.wrong((error.strerror or str(error)).lower()) from None


def read_authorities(file: PemFile) -> bytes:
    """One or several CA certificates; raises TlsError."""
    content = file.read()
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise file.wrong("this is not a certificate in PEM")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise file.wrong(f"a certificate cannot be read: {_reason(error)}") from None
    _warn_of_expiry(file, content)
    return content


def read_pair(certificate: PemFile, key: PemFile) -> tuple[bytes, bytes]:
    """A certificate chain and its key; raises TlsError, also if they do not belong together."""
    for _ in range(_TRIES):
        before = stamp_of((certificate, key))
        chain, secret = certificate.read(), key.read()
        problem = _problem(certificate, chain, key, secret)
        if stamp_of((certificate, key)) == before:
            break  # else the files were replaced meanwhile
    if problem is not None:
        raise problem
    _warn_of_expiry(certificate, chain)
    return chain, secret


def _problem(certificate: PemFile, chain: bytes, key: PemFile, secret: bytes) -> TlsError | None:
    if b"-----BEGIN CERTIFICATE-----" not in chain:
        return certificate.wrong("this is not a certificate in PEM")
    if b"PRIVATE KEY-----" not in secret:
        return key.wrong("this is not a private key in PEM")
    if b"ENCRYPTED" in secret:
        return key.wrong("the key has a password, and a service cannot give one")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate.path, key.path, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            return key.wrong(f"this is not the key of {certificate.option} {certificate.path}")
        return certificate.wrong(f"it cannot be used with {key.option} {key.path}: {_reason(error)}")
    except OSError as error:
        return certificate.wrong(str(error.strerror or error).lower())
    return None


def _reason(error: Exception) -> str:
    return (getattr(error, "reason", None) or str(error) or "invalid").replace("_", " ").lower()


def _warn_of_expiry(file: PemFile, content: bytes) -> None:
    """Log a warning for a certificate that has expired or soon will; nothing where `cryptography` is not installed."""
    try:
        from cryptography import x509
    except ImportError:
        return
    with contextlib.suppress(ValueError):
        now = datetime.datetime.now(datetime.UTC)
        for certificate in x509.load_pem_x509_certificates(content):
            ends, name = certificate.not_valid_after_utc, certificate.subject.rfc4514_string()
            if ends < now:
                _LOG.warning("%s %s: the certificate of %s has expired, at %s", file.option, file.path, name, ends)
            elif ends < now + _SOON:
                _LOG.warning("%s %s: the certificate of %s expires soon, at %s", file.option, file.path, name, ends)


def first_expiries(contents: Mapping[PemFile, bytes | None]) -> dict[str, float]:
    """When each content stops being of use, as a unix time, by the option that names the file.

    A chain ends with its first certificate. Of authorities (--executor-ca, --tls-client-ca) the last one counts: while
    a new one replaces another, a file holds both. Empty where `cryptography` is not installed.
    """
    try:
        from cryptography import x509
    except ImportError:
        return {}
    found = {}
    for file, content in contents.items():
        with contextlib.suppress(ValueError):
            certificates = x509.load_pem_x509_certificates(content or b"")
            ends = [each.not_valid_after_utc.timestamp() for each in certificates]
            found[file.option] = max(ends) if file.option.endswith("-ca") else min(ends)
    return found


class ExpiringFiles(Protocol):
    """The files of a link."""

    def expiries(self) -> Mapping[str, float]:
        """When each file in use stops being of use (`first_expiries`), by option. Reads changed files."""


def is_expired(file: PemFile) -> bool:
    """Whether a certificate has expired; False where `cryptography` is not installed, or the file cannot be read."""
    try:
        from cryptography import x509
    except ImportError:
        return False
    try:
        ends = x509.load_pem_x509_certificate(file.read()).not_valid_after_utc
    except ValueError:  # TlsError is one
        return False
    return ends < datetime.datetime.now(datetime.UTC)


def first_name(file: PemFile) -> str | None:
    """A name that a certificate is for, such as a host; None if it has none. Raises TlsError."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificates(file.read())[0]
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    except ValueError as error:
        raise file.wrong(f"the certificate cannot be read: {error}") from None
    return next(iter(names.get_values_for_type(x509.DNSName)), None)


def stamp_of(files: Sequence[PemFile]) -> _Stamp:
    """What changes when a file does; a file that cannot be read has a stamp too."""
    stamps = []
    for file in files:
        try:
            status = os.stat(file.path)
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            stamps.append((0, 0, 0))
    return tuple(stamps)


class Reread(Generic[_Content]):
    """The content of files, read again after they have changed. Broken files leave the last good content in use.

    A certificate is often replaced before its key, so a pair that does not match is not an error for long: it is logged
    once for each state of the files.
    """

    def __init__(self, files: Sequence[PemFile], read: Callable[[], _Content]) -> None:
        """Reads the files; raises TlsError."""
        self._files = files
        self._read = read
        self._stamp = stamp_of(files)
        self.content = read()
        self.version = 0
        """Grows whenever the content is replaced."""
        self._looking = threading.Lock()
        """Handshakes, the event loop and the metrics server look."""

    def look(self) -> bool:
        """Read the files if they have changed; returns whether the content was replaced. Any thread may look."""
        with self._looking:
            return self._look()

    def _look(self) -> bool:
        stamp = stamp_of(self._files)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.content = self._read()
        except TlsError as error:
            _LOG.warning("%s; the files as they were before stay in use", error)
            return False
        self.version += 1
        _LOG.info("read again: %s", ", ".join(file.path for file in self._files))
        return True
