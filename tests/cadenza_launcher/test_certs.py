"""`cadenza certs`, and the files that it makes: rights, names, renewal, rereading."""

from __future__ import annotations

import datetime
import os
import stat
import subprocess
import sys

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from cadenza_cli.app import run
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.tls.connection import no_tls_variables
from cadenza_common.wire.tls.files import PemFile, Reread, TlsError, read_pair
from cadenza_launcher.certs import main
from tests.helpers.certificates import certificates


def load(path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_ca_and_a_certificate_for_each_party(tmp_path, capsys) -> None:
    folder = tmp_path / "certs"
    assert run(["certs", str(folder), "--host", "gpu1", "--host", "10.0.0.7", "--days", "30"]) == 0
    shown = capsys.readouterr().out
    assert "--tls-client-ca" in shown
    assert str(folder / "ca" / "ca-key.pem") in shown
    ca = load(folder / "ca" / "ca.pem")
    for party in ("scheduler", "executor", "client"):
        own = folder / party
        assert sorted(each.name for each in own.iterdir()) == ["ca.pem", f"{party}-key.pem", f"{party}.pem"]
        assert stat.S_IMODE((own / f"{party}-key.pem").stat().st_mode) == 0o600
        certificate = load(own / f"{party}.pem")
        certificate.verify_directly_issued_by(ca)
        assert isinstance(certificate.public_key().curve, ec.SECP256R1)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert names.get_values_for_type(x509.DNSName)[0] == f"cadenza-{party}"
        hosts = set(map(str, [*names.get_values_for_type(x509.DNSName), *names.get_values_for_type(x509.IPAddress)]))
        is_server = {"localhost", "127.0.0.1", "::1", "gpu1", "10.0.0.7"} <= hosts
        assert is_server == (ExtendedKeyUsageOID.SERVER_AUTH in uses) == (party != "client")
        left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        assert 29 < left.total_seconds() / 86400 < 30.01
    assert stat.S_IMODE((folder / "ca" / "ca-key.pem").stat().st_mode) == 0o600


def test_a_second_run_renews_by_the_same_ca_and_new_ca_keeps_the_old_one_trusted(tmp_path) -> None:
    certs = certificates(tmp_path / "certs")
    path, ca = certs.folder / "client" / "client.pem", certs.folder / "client" / "ca.pem"
    first, authority = load(path), ca.read_bytes()
    certs.renew()
    second = load(path)
    assert second.serial_number != first.serial_number
    assert ca.read_bytes() == authority
    certs.renew(new_ca=True)
    assert load(path) == second, "certificates of the new CA come when it is known everywhere"
    both = x509.load_pem_x509_certificates(ca.read_bytes())
    assert len(both) == 2
    assert ca.read_bytes().endswith(authority)
    certs.renew()
    load(path).verify_directly_issued_by(both[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "a b"], "option host: 'a b' is neither a host name nor an IP address"),
        (["--days", "0"], "option days: must be a number over 0, not 0"),
    ],
)
def test_wrong_options_are_named(tmp_path, capsys, arguments, message) -> None:
    assert run(["certs", str(tmp_path), *arguments]) == 2
    assert capsys.readouterr().err == f"cadenza: {message}\n"


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file" / "certs")]) == 1
    assert f"{tmp_path / 'file' / 'certs' / 'ca'}: not a directory" in capsys.readouterr().err


def test_a_broken_pair_leaves_the_old_one_in_use_and_is_logged_once(tmp_path, caplog) -> None:
    own = certificates(tmp_path / "certs").folder / "client"
    cert, key = PemFile("--tls-cert", str(own / "client.pem")), PemFile("--tls-key", str(own / "client-key.pem"))
    files = Reread([cert, key], lambda: read_pair(cert, key))
    good = files.content
    certificates(tmp_path / "other")
    (tmp_path / "other" / "client" / "client.pem").replace(cert.path)
    assert [files.look(), files.look(), files.look()] == [False] * 3
    assert files.content == good
    assert [record.getMessage() for record in caplog.records] == [
        f"--tls-key {key.path}: this is not the key of --tls-cert {cert.path}; "
        "the files as they were before stay in use"
    ]
    (tmp_path / "other" / "client" / "client-key.pem").replace(key.path)
    assert files.look()
    assert files.content != good
    os.unlink(key.path)
    assert not files.look()
    assert "no such file or directory" in caplog.text


def test_a_key_with_a_password_is_refused_and_nothing_is_asked(tmp_path) -> None:
    own = certificates(tmp_path / "certs").folder / "client"
    key = own / "client-key.pem"
    secret = load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")))
    with pytest.raises(TlsError, match="the key has a password"):
        read_pair(PemFile("--tls-cert", str(own / "client.pem")), PemFile("--tls-key", str(key)))


def test_clients_read_the_environment_and_services_started_here_do_not(monkeypatch) -> None:
    assert TLS.from_environment({}) is None
    monkeypatch.setenv("CADENZA_TLS_CA", "ca.pem")
    assert TLS.from_environment() == TLS("ca.pem")
    with no_tls_variables():
        assert TLS.from_environment() is None
    assert TLS.from_environment() == TLS("ca.pem")
    with pytest.raises(ValueError, match="key needs cert"):
        TLS.from_environment({"CADENZA_TLS_KEY": "key.pem"})


def test_without_cryptography_the_command_names_the_package(tmp_path) -> None:
    code = "import sys; sys.modules['cryptography'] = None; from cadenza_launcher.certs import main; "
    code += f"main([{str(tmp_path)!r}])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "certificates need the package cryptography" in answer.stderr
