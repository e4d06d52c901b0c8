"""`cadenza lora` and `generate --adapter` against a real scheduler with the simulated executor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from cadenza.calls.loop_thread import LoopThread
from cadenza_cli.app import run
from tests.helpers.executor.simulated_adapters import content_hash, greedy_tokens, make_adapter
from tests.helpers.services import cadenza_services


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Runs `cadenza` with these arguments on a server with the adapter a, which may load others below tmp_path."""
    stack, loop = AsyncExitStack(), LoopThread.shared()
    options = {"lora": [f"a={make_adapter(tmp_path / 'a', b'a')}"], "lora_root": [str(tmp_path)]}
    services = cadenza_services("simulated", simulate="instant", scheduler=options)
    target = loop.run(stack.enter_async_context(services)).target
    yield lambda *arguments: run([*arguments, "--target", target])
    loop.run(stack.aclose())


def test_adapters_are_loaded_listed_used_and_unloaded(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = make_adapter(tmp_path / "b", b"b")
    assert command("lora", "load", "b", str(folder)) == 0
    assert capsys.readouterr().out == f"b is loaded: content {content_hash(folder).hex()[:12]}\n"
    assert command("generate", "--ids", "5,6,7", "--temperature", "0", "--max-tokens", "5", "--adapter", "b") == 0
    expected = " ".join(map(str, greedy_tokens([5, 6, 7], 5, folder)))
    assert capsys.readouterr().out.strip() == expected
    assert command("lora", "list", "--json") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["name"], second["name"], second["path"]) == ("a", "b", str(folder))
    assert second["content_hash"] == content_hash(folder).hex()
    assert command("lora", "unload", "b") == 0
    assert capsys.readouterr().out == "b takes no new requests\n"
    assert command("lora", "list") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("a  ")
    assert line.endswith(str(tmp_path / "a"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["lora", "load", "b", "/nowhere"], 1, "/nowhere is not below "),
        (["lora", "load", "a", "."], 1, " is not below "),
        (["lora", "unload", "b"], 1, "there is no adapter 'b'"),
        (["lora", "unload", "x" * 129], 2, "name must be a name of 1 to 128 characters"),
        (["generate", "--ids", "5", "--adapter", "b"], 1, "there is no adapter 'b'"),
    ],
)
def test_refusals_are_one_line(
    command: Callable[..., int], capsys: pytest.CaptureFixture, arguments: list[str], code: int, message: str
) -> None:
    assert command(*arguments) == code
    out, err = capsys.readouterr()
    assert not out.strip(), "generate ends the line of an answer that is empty"
    assert message in err
    assert err.count("\n") == 1
