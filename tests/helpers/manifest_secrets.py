"""The secrets of an overlay's certificates: issued as cert-manager does by the manifests, mounted as a kubelet does."""

from __future__ import annotations

import datetime
import itertools
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.helpers.manifests import Manifest, of_kind

_PURPOSES = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH, "client auth": ExtendedKeyUsageOID.CLIENT_AUTH}
_KEY = {"algorithm": "ECDSA", "size": 256}
_VERSIONS = itertools.count(1)


class ManifestSecrets:
    """The secrets of the Certificates of an overlay, whose CA is made here; none in one without TLS."""

    def __init__(self, overlay: str, folder: Path) -> None:
        made = {each["spec"]["secretName"]: each["spec"] for each in of_kind(overlay, "Certificate")}
        self._folder = folder
        self._specs = {name: spec for name, spec in made.items() if not spec.get("isCA")}
        self._files: dict[str, dict[str, bytes]] = {}
        if made:
            folder.mkdir()
            (authority,) = (spec for spec in made.values() if spec.get("isCA"))
            self._ca = _Authority(authority)
            self.renew()

    @property
    def names(self) -> list[str]:
        """Of all secrets that pods or clients use."""
        return list(self._specs)

    def files(self, secret: str) -> dict[str, bytes]:
        """What a secret has, by the names that cert-manager gives its keys."""
        return self._files[secret]

    def renew(self) -> None:
        """Issue new certificates and keys, as cert-manager does before the old ones expire."""
        for name, spec in self._specs.items():
            self._files[name] = self._ca.issue(spec)

    @property
    def client_environment(self) -> dict[str, str]:
        """The variables of a client that has the secret for clients; none without TLS."""
        if not self._specs:
            return {}
        folder = mount(self._folder / "client", self.files("cadenza-client-tls"))
        files = {"CADENZA_TLS_CA": "ca.crt", "CADENZA_TLS_CERT": "tls.crt", "CADENZA_TLS_KEY": "tls.key"}
        paths = {name: str(folder / file) for name, file in files.items()}
        return {**paths, "CADENZA_TLS_SERVER_NAME": "cadenza-scheduler"}


class _Authority:
    def __init__(self, spec: Manifest) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, spec["commonName"])])
        public = self._key.public_key()
        basics = _builder(self._name, self._name, public, spec)
        certificate = basics.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        certificate = certificate.add_extension(_usage(for_certificates=True), critical=True)
        certificate = certificate.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        self._pem = certificate.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue(self, spec: Manifest) -> dict[str, bytes]:
        """The files of the secret of a Certificate: with its names and usages, and no subject."""
        assert not spec.get("commonName")
        assert {name: spec["privateKey"][name] for name in _KEY} == _KEY
        purposes = [_PURPOSES[usage] for usage in spec["usages"] if usage != "digital signature"]
        names = x509.SubjectAlternativeName([x509.DNSName(name) for name in spec["dnsNames"]])
        key = ec.generate_private_key(ec.SECP256R1())
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(x509.Name([]), self._name, key.public_key(), spec)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(for_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(names, critical=True)
            .add_extension(signer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return {
            "ca.crt": self._pem,
            "tls.crt": certificate.public_bytes(Encoding.PEM),
            "tls.key": key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()),
        }


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, spec: Manifest
) -> x509.CertificateBuilder:
    lasts = datetime.timedelta(hours=int(spec["duration"].removesuffix("h")))
    now = datetime.datetime.now(datetime.UTC)
    named = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return named.serial_number(x509.random_serial_number()).not_valid_before(now).not_valid_after(now + lasts)


def _usage(*, for_certificates: bool) -> x509.KeyUsage:
    others = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(
        digital_signature=not for_certificates, key_cert_sign=for_certificates, crl_sign=for_certificates, **others
    )


def mount(folder: Path, files: dict[str, bytes], group: int = -1, mode: int = 0o644) -> Path:
    """Write a secret as a kubelet does, the first time or anew; returns the folder.

    Each name is a link into `..data`, a link to a folder with all files of one version. So all change at once, and old
    files vanish (https://kubernetes.io/docs/concepts/configuration/secret/#using-secrets-as-files-from-a-pod).
    group: that of the files, the pod's fsGroup; -1: unchanged. mode: of the files, the volume's defaultMode.
    """
    folder.mkdir(exist_ok=True)
    data, new = folder / "..data", folder / f"..version_{next(_VERSIONS)}"
    old = data.resolve() if data.exists() else None
    new.mkdir()
    for name, content in files.items():
        (new / name).write_bytes(content)
        os.chown(new / name, -1, group)
        (new / name).chmod(mode)
        if old is None:
            (folder / name).symlink_to(f"..data/{name}")
    link = folder / "..data_tmp"
    link.symlink_to(new.name)
    link.replace(data)
    if old is not None:
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    return folder
