"""Messages of `cadenza chat` from a pipe, its commands, and what it says when it cannot chat."""

from __future__ import annotations

import io

import pytest

from cadenza.calls.loop_thread import LoopThread
from cadenza.v1 import generation_pb2 as pb
from cadenza_cli.app import run
from cadenza_cli.chat.chat import HELP_TEXT, command_of, unknown
from cadenza_cli.chat.input import is_open_block, without_block
from tests.helpers.client.scripted_server import Script, start


class NotingScript(Script):
    """Keeps the last message of every chat."""

    def __init__(self, **info) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._info = info

    async def Generate(self, request, context):
        self.messages.append(request.prompt[0].chat.messages[-1].content)
        async for response in super().Generate(request, context):
            yield response

    async def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(model="m", vocab_size=7, **self._info)


def chat(lines: str, capsys, monkeypatch, **info) -> tuple[int, list[str], str]:
    """The exit code, the messages that the server got, and what was written to stderr."""
    script = NotingScript(**{"has_tokenizer": True, "has_chat_template": True} | info)
    server, address = LoopThread.shared().run(start(script))
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code = run(["chat", "--target", address])
    LoopThread.shared().run(server.stop(0))
    return code, script.messages, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("no line end", ["no line end"]),
        ('"""one\ntwo\n"""\nthree\n', ["one\ntwo", "three"]),
        ('"""\n\n  one\n\ntwo"""\n', ["  one\n\ntwo"]),
        ('"""all in one line"""\n', ["all in one line"]),
        ('"""\nnever closed\n', ["never closed"]),
        ('say """ twice\nmore\n', ['say """ twice', "more"]),
        ('"""/help\n"""\n', ["/help"]),
    ],
)
def test_messages_from_a_pipe(lines, messages, capsys, monkeypatch):
    assert chat(lines, capsys, monkeypatch) == (0, messages, "")


def test_commands(capsys, monkeypatch):
    code, messages, said = chat("/hlep\n/help\n/frobnicate\n /etc/hosts?\n/bye\nunread\n", capsys, monkeypatch)
    assert (code, messages) == (0, [" /etc/hosts?"])
    assert "no command '/hlep': did you mean /help?" in said
    assert HELP_TEXT in said
    assert "no command '/frobnicate': /help lists them" in said
    assert "/reset " in HELP_TEXT
    assert "/quit " in HELP_TEXT
    assert max(map(len, HELP_TEXT.splitlines())) <= 50


@pytest.mark.parametrize(("message", "near"), [("/rest", "/reset"), ("/qiut now", "/quit"), ("/halp", "/help")])
def test_an_unknown_command_suggests_the_nearest(message, near):
    command = command_of(message)
    assert command == message
    assert f"did you mean {near}?" in unknown(command)


def test_blocks():
    assert [is_open_block(text) for text in ('"""', '"""a', '""""', '"""a"""', '"""a\n"""\n', 'a"""', "")] == [
        True, True, True, False, False, False, False
    ]  # fmt: skip
    assert [without_block(text) for text in ('"""a"""', '"""\na\n', " a ", '""""""')] == ["a", "a", " a ", ""]


def test_a_model_without_a_chat_template(capsys, monkeypatch):
    code, messages, said = chat("hello\n", capsys, monkeypatch, has_chat_template=False)
    assert (code, messages) == (1, [])
    assert said == (
        "cadenza: the model has no chat template, which a chat needs: continue texts with cadenza generate --raw, or "
        "start the server with --tokenizer and one that has a template\n"
    )
