"""`cadenza tenants`, and what commands say about a missing or wrong token."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from cadenza_cli.app import run
from scheduler_svc.tenants.file import read_tenants
from scheduler_svc.tenants.tenant import Tenant, digest_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.toml"


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The token that a command prints: the only line on stdout."""
    capsys.readouterr()
    assert run(["tenants", *arguments]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return line


def test_a_tenant_from_its_first_token_to_its_last(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ("--file", str(path))
    limits = "--weight 4 --max-requests 8 --max-queued-tokens 900 --tokens-per-minute 60 --max-priority -1".split()
    first = made(capsys, "add", "gold", *file, *limits, "--shared-prefixes", "team")
    ops = made(capsys, "add", "ops", *file, "--admin", "--adapters", "")
    made(capsys, "add", "loader", *file, "--may-load-adapters", "--adapters", 'sql, "*')
    assert read_tenants(str(path)).by_name == {
        "gold": Tenant("gold", 4.0, 8, 900, 60, -1, "team"),
        "ops": Tenant("ops", admin=True, adapters=()),
        "loader": Tenant("loader", adapters=("sql", '"*'), may_load_adapters=True),
    }
    assert run(["tenants", "revoke", "loader", next(iter(_digests(path, "loader"))), *file]) == 0
    second = made(capsys, "token", "gold", *file)
    assert len({first, second, ops}) == 3
    assert all(re.fullmatch(r"cadenza_[\w-]{43}", each) for each in (first, second, ops)), "256 random bits"
    assert not any(each in path.read_text() for each in (first, second, ops))
    digest = digest_of(first)
    assert read_tenants(str(path)).by_digest[digest] == "gold"
    assert run(["tenants", "list", *file]) == 0
    assert digest.hex()[:8] in capsys.readouterr().out
    assert run(["tenants", "revoke", "gold", digest.hex()[:8], *file]) == 0
    assert set(read_tenants(str(path)).by_digest) == {digest_of(second), digest_of(ops)}
    assert run(["tenants", "revoke", "gold", "sha256:" + digest_of(second).hex(), *file]) == 0
    assert set(read_tenants(str(path)).by_digest) == {digest_of(ops)}
    again = made(capsys, "token", "gold", *file)
    assert read_tenants(str(path)).by_digest[digest_of(again)] == "gold"


def _digests(path: Path, name: str) -> list[str]:
    return [digest.hex() for digest, owner in read_tenants(str(path)).by_digest.items() if owner == name]


def test_what_people_wrote_stays(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = '# ours\n[tenants.a]  # the first\nweight = 2 # two\n\n[tenants."b.c"]\ntokens = []\n# the end\n'
    path.write_text(before)
    path.chmod(0o640)
    made(capsys, "token", "a", "--file", str(path))
    made(capsys, "token", "b.c", "--file", str(path))
    text = re.sub(r'\[\n  "sha256:[0-9a-f]{64}",\n\]', "[]", path.read_text())
    assert (
        re.sub(r'\[\n  "sha256:[0-9a-f]{64}",\n\]', "[]", text).replace("\ntokens = []\nweight", "\nweight") == before
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.name for each in path.parent.iterdir()] == ["tenants.toml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("token nobody", "has no tenant 'nobody'; it has gold"),
        ("add gold", "has a tenant 'gold' already"),
        ("revoke gold ffff", "0 tokens of gold have a hash that begins with 'ffff'; it must be one"),
        ("add with+sign", "this is no name of a tenant"),
        ("add free --weight -1", "[tenants.free] weight: Input should be greater than 0"),
        ("list --file none.toml", "option file: none.toml: there is no such file"),
    ],
)
def test_refusals(path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    made(capsys, "add", "gold", "--file", str(path))
    before = path.read_text()
    words = arguments.split()
    assert run(["tenants", *words, *([] if "--file" in words else ["--file", str(path)])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert path.read_text() == before


def test_a_prefix_of_several_tokens_revokes_none(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(capsys, "add", "gold", "--file", str(path))
    assert run(["tenants", "revoke", "gold", "sha256:", "--file", str(path)]) == 2
    assert "it must be one" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["top --once", "drain", "executors list", "generate hi", "loadtest"])
def test_a_token_is_not_sent_far_away_by_a_command(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CADENZA_TOKEN", "secret-token")
    assert run([*command.split(), "--target", "192.0.2.1:1"]) == 2
    error = capsys.readouterr().err
    assert "not sent to 192.0.2.1 without TLS" in error
    assert "secret-token" not in error


def test_a_token_is_no_option_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Other users of the machine see command lines."""
    assert run(["drain", "--token", "x"]) == 2
    assert "there is no option --token; did you mean --token-file" in capsys.readouterr().err
