"""Where a client's token comes from, how calls carry it, and where it is never sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cadenza import AsyncClient, OptionError
from cadenza.credentials import (
    Credentials,
    authorized,
    call_metadata,
    chosen_token,
    command_credentials,
    is_loopback,
    read_token,
)


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CADENZA_TOKEN", raising=False)


def test_what_is_given_goes_before_the_command_and_that_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen_token(None) is None
    monkeypatch.setenv("CADENZA_TOKEN", "environment\r\n")
    (tmp_path / "token").write_text("  command\n")
    assert chosen_token(None) == "environment"
    with command_credentials(str(tmp_path / "token"), insecure=False):
        assert chosen_token(None) == "command"
        assert chosen_token("argument") == "argument"
    with command_credentials(None, insecure=False):
        assert chosen_token(None) == "environment"
    assert chosen_token(None) == "environment"


@pytest.mark.parametrize("token", ["", "two words", "a\nb", "é", "x" * 513, b"bytes", 5])
def test_no_token_and_it_is_not_shown(token: Any) -> None:
    with pytest.raises(OptionError, match="must hold one token") as found:
        AsyncClient(token=token)
    assert not token or str(token) not in str(found.value)


def test_a_file_without_a_token_is_named(tmp_path: Path) -> None:
    (tmp_path / "two").write_text("one\ntwo\n")
    with pytest.raises(OptionError, match=r"option token-file: .*two: must hold one token"):
        read_token(str(tmp_path / "two"))
    with pytest.raises(OptionError, match=r"option token-file: .*none: no such file"):
        read_token(str(tmp_path / "none"))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1"])
def test_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.5", "::2", "scheduler", "localhost.example.com", "0.0.0.0"])
def test_a_token_is_not_sent_to_another_machine_in_plain_text(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"[{host}]:1" if ":" in host else f"{host}:1"
    assert not is_loopback(host)
    with pytest.raises(OptionError, match=r"not sent to .* without TLS.*--insecure") as found:
        AsyncClient(target, token="secret-token")
    assert "secret-token" not in str(found.value)
    AsyncClient(target, token="secret-token", insecure=True)
    AsyncClient(target)
    with command_credentials(None, insecure=True):
        AsyncClient(target, token="secret-token")
    monkeypatch.setenv("CADENZA_TOKEN", "secret-token")
    with pytest.raises(OptionError, match="without TLS"):
        AsyncClient(target)


def test_a_token_is_in_no_repr() -> None:
    client = AsyncClient(token="secret-token")
    assert "secret-token" not in repr(client) + repr(Credentials("secret-token"))


def test_every_call_of_a_stub_carries_it_before_its_own_metadata() -> None:
    calls: list[dict[str, Any]] = []

    class Stub:
        def __init__(self) -> None:
            self.Generate = lambda *args, **options: calls.append({"args": args, **options})
            self.Session = self.Generate

    stub = authorized(Stub(), call_metadata("t"))
    stub.Generate("request", timeout=5)
    stub.Session(metadata=(("traceparent", "00"),))
    own = ("authorization", "Bearer t")
    assert calls == [
        {"args": ("request",), "timeout": 5, "metadata": (own,)},
        {"args": (), "metadata": (own, ("traceparent", "00"))},
    ]
    plain = Stub()
    before = plain.Generate
    assert authorized(plain, call_metadata(None)).Generate is before, "without a token calls cost nothing more"
