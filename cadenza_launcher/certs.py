"""A development certificate authority: `cadenza certs DIR`, or `python -m cadenza_launcher.certs DIR`.

It writes one folder for each party, so that a machine or a container gets its own key and no other:

    DIR/ca/ca.pem, ca-key.pem                        the authority; its key stays where certificates are made
    DIR/scheduler/ca.pem, scheduler.pem, scheduler-key.pem
    DIR/executor/ca.pem, executor.pem, executor-key.pem
    DIR/client/ca.pem, client.pem, client-key.pem

Run again, it renews the three certificates with the same authority. Files are replaced in one step each, so a service
that rereads them never sees half a file.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

PARTIES = ("scheduler", "executor", "client")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
DAYS = 90.0
CA_DAYS = 3650.0
_EARLIER = datetime.timedelta(minutes=5)
"""Certificates are valid from a little before now: clocks of machines differ."""


class CertsError(Exception):
    """Certificates cannot be made; the message is for the user."""


def make_certs(
    folder: Path,
    *,
    hosts: Sequence[str] = (),
    days: float = DAYS,
    new_ca: bool = False,
    now: datetime.datetime | None = None,
) -> list[Path]:
    """Make the authority if there is none, and new certificates for all parties; returns the files written.

    `hosts`: names and addresses of the services besides localhost. `days` may be negative, for a certificate that has
    expired. With `new_ca` a new authority is made, which ca.pem names beside the old one, and the parties keep their
    certificates until the next call: so both are trusted before the first certificate of the new one is used. Raises
    CertsError.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        from cadenza_common.settings.extras import install_command

        raise CertsError(f"certificates need the package cryptography ({error}): {install_command('cli')}") from None
    now = now or datetime.datetime.now(datetime.UTC)
    try:
        (folder / "ca").mkdir(parents=True, exist_ok=True)
        has_ca = (folder / "ca" / "ca-key.pem").exists()
        written = [] if has_ca and not new_ca else _make_ca(folder / "ca", now)
        return written + _hand_out(folder, _names(hosts), days, now, renew=not (has_ca and new_ca))
    except OSError as error:
        raise CertsError(f"{error.filename}: {(error.strerror or str(error)).lower()}") from None


def _make_ca(folder: Path, now: datetime.datetime) -> list[Path]:
    """Write a new authority; certificates of older ones stay in ca.pem, behind it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    key = _new_key()
    # A name of its own: of two authorities with one name, verifiers would try the wrong key.
    name = _name(f"Cadenza development CA {x509.random_serial_number() % 16**8:08x}")
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "ca.pem"
    older = path.read_bytes() if path.exists() else b""
    return [_write(folder / "ca-key.pem", _key_pem(key), 0o600), _write(path, _pem(certificate) + older, 0o644)]


def _hand_out(
    folder: Path, hosts: Sequence[x509.GeneralName], days: float, now: datetime.datetime, *, renew: bool
) -> list[Path]:
    """Write ca.pem into each party's folder, and its new certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    authorities = (folder / "ca" / "ca.pem").read_bytes()
    written: list[Path] = []
    try:
        issuer = x509.load_pem_x509_certificates(authorities)[0]
        issuer_key = load_pem_private_key((folder / "ca" / "ca-key.pem").read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise CertsError(f"{folder / 'ca'}: the authority cannot be read: {error}") from None
    for party in PARTIES:
        own = folder / party
        own.mkdir(mode=0o755, exist_ok=True)
        written.append(_write(own / "ca.pem", authorities, 0o644))
        if renew:
            key = _new_key()
            certificate = _leaf(party, key, issuer, issuer_key, hosts, days, now)
            # The key first: a service that sees the pair between the two writes keeps its old one.
            written.append(_write(own / f"{party}-key.pem", _key_pem(key), 0o600))
            written.append(_write(own / f"{party}.pem", _pem(certificate), 0o644))
    return written


def _leaf(
    party: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate,
    issuer_key: object,
    hosts: Sequence[x509.GeneralName],
    days: float,
    now: datetime.datetime,
) -> x509.Certificate:
    """A party's certificate. A client's is no server's: it names no host and may only be shown to a server.

    A service may show its own as a client too: its health check does, and the scheduler to executors.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID as Use

    assert isinstance(issuer_key, _key_type())
    name = f"cadenza-{party}"
    uses = [Use.CLIENT_AUTH] if party == "client" else [Use.SERVER_AUTH, Use.CLIENT_AUTH]
    names = [x509.DNSName(name), *(() if party == "client" else hosts)]
    expires = min(now + datetime.timedelta(days=days), issuer.not_valid_after_utc)
    begins = min(now, expires) - _EARLIER
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(expires)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    from cryptography import x509

    names: list[x509.GeneralName] = []
    for host in dict.fromkeys((*LOCAL_HOSTS, *hosts)):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
            continue
        except ValueError:
            pass
        try:
            if not host or "/" in host or ":" in host or " " in host:
                raise ValueError
            names.append(x509.DNSName(host))
        except ValueError:
            raise CertsError(f"option host: {host!r} is neither a host name nor an IP address") from None
    return names


def _key_type() -> type[ec.EllipticCurvePrivateKey]:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.EllipticCurvePrivateKey


def _new_key() -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _name(common_name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> Path:
    """Replace a file in one step. A key is never readable by others, not even for a moment."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask is
        file.write(content)
    temporary.replace(path)
    return path


def how_to_use(folder: Path) -> str:
    """What to do with the files, as text."""
    return f"""The authority's key, {folder / "ca" / "ca-key.pem"}, stays here. Each party needs its own folder alone.

  python -m executor_svc --listen 0.0.0.0:50052 --tls-cert {folder}/executor/executor.pem \\
    --tls-key {folder}/executor/executor-key.pem --tls-client-ca {folder}/executor/ca.pem --model MODEL
  python -m scheduler_svc --listen 0.0.0.0:50051 --tls-cert {folder}/scheduler/scheduler.pem \\
    --tls-key {folder}/scheduler/scheduler-key.pem --tls-client-ca {folder}/scheduler/ca.pem \\
    --executor HOST:50052 --executor-ca {folder}/scheduler/ca.pem \\
    --executor-cert {folder}/scheduler/scheduler.pem --executor-key {folder}/scheduler/scheduler-key.pem
  cadenza generate --target HOST:50051 --tls-ca {folder}/client/ca.pem \\
    --tls-cert {folder}/client/client.pem --tls-key {folder}/client/client-key.pem "Hello"

HOST must be one of --host. For any other, give --executor-server-name cadenza-executor and
--tls-server-name cadenza-scheduler. The same command renews the certificates; services and clients reread them.
"""


def run(folder: Path, hosts: Sequence[str], days: float, *, new_ca: bool) -> str:
    """Make certificates; returns what was done, as text for the user. Raises CertsError."""
    if not 0 < days < math.inf:
        raise CertsError(f"option days: must be a number over 0, not {days:g}")
    written = make_certs(folder, hosts=hosts, days=days, new_ca=new_ca)
    return "".join(f"{path}\n" for path in written) + "\n" + how_to_use(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a file cannot be written, 2 wrong options."""
    parser = argparse.ArgumentParser("python -m cadenza_launcher.certs", description="A development CA for Cadenza.")
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--host", action="append", default=[], help="name or address of a service; several times")
    parser.add_argument("--days", type=float, default=DAYS, help="how long certificates are valid (default: 90)")
    parser.add_argument("--new-ca", action="store_true", help="make a new authority beside the old one")
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(run(options.folder, options.host, options.days, new_ca=options.new_ca))
    except CertsError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
