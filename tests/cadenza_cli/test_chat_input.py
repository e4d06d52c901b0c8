"""Messages of `cadenza chat` from a pipe, its commands, and what it says when it cannot chat."""

from __future__ import annotations

import io
import itertools
import json
import queue
from types import SimpleNamespace

import pytest

from cadenza.calls.loop_thread import LoopThread
from cadenza.errors import UnavailableError
from cadenza.sampling_params import SamplingParams
from cadenza.v1 import generation_pb2 as pb
from cadenza_cli.app import run
from cadenza_cli.chat.commands import HELP_TEXT, ChatCommand, command_of, run_command
from cadenza_cli.chat.conversation import Conversation
from cadenza_cli.chat.input import is_open_block, without_block
from cadenza_cli.chat.silence import SilenceWatch
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
        return pb.GetModelInfoResponse(model="m", vocab_size=7, max_model_len=1000, **self._info)


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


def conversation(**own) -> Conversation:
    return Conversation(None, SamplingParams(temperature=0.5), 100, **own)


@pytest.mark.parametrize(("message", "near"), [("/rest", "/reset"), ("/qiut now", "/quit"), ("/halp", "/help")])
def test_an_unknown_command_suggests_the_nearest(message, near):
    command = command_of(message)
    assert f"did you mean {near}?" in run_command(command, conversation())


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("/set temperature 0.2", "temperature 0.2, top_p 1, max_tokens 16"),
        ("/set top_k 5", "temperature 0.5, top_p 1, top_k 5, max_tokens 16"),
        ("/set max_tokens none", "temperature 0.5, top_p 1, max_tokens None"),
        ("/set", "temperature 0.5, top_p 1, max_tokens 16"),
        ("/set temperature -1", "temperature must be a finite number of at least 0, not -1"),
        ("/set top_p high", "top_p must be over 0 and at most 1, not 'high'"),
        ("/set parameter temperature 0.2", "temperature 0.2, top_p 1, max_tokens 16"),
        ("/set temperature=0.2", "temperature 0.2, top_p 1, max_tokens 16"),
        ("/set system Be brief.", "a new conversation, with this system message"),
        ("/set temperatur 1", "'temperatur' cannot be set; did you mean temperature?"),
        ("/set num_predict 1", "'num_predict' cannot be set; here it is max_tokens"),
        ("/set num_ctx 1", "'num_ctx' cannot be set; these can: temperature, top_p, top_k, min_p, "
         "repetition_penalty, max_tokens, seed"),
    ],
)  # fmt: skip
def test_sampling_is_set(typed, answer):
    assert run_command(command_of(typed), conversation()) == answer


def test_a_system_message_begins_a_new_conversation():
    talk = conversation()
    talk.messages = [{"role": "user", "content": "one"}]
    assert run_command(ChatCommand("/system", ""), talk) == "there is no system message"
    run_command(command_of("/system Be brief."), talk)
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    assert run_command(ChatCommand("/system", ""), talk) == "the system message: Be brief."


def test_a_conversation_is_saved_once(tmp_path):
    talk, path = conversation(), tmp_path / "talk.json"
    talk.messages = [{"role": "user", "content": "Zoë"}]
    assert run_command(ChatCommand("/save", str(path)), talk) == f"written to {path}"
    assert json.loads(path.read_text(encoding="utf-8")) == {"messages": talk.messages}
    assert "is there already" in run_command(ChatCommand("/save", str(path)), talk)
    assert run_command(ChatCommand("/save", str(tmp_path / "no" / "x")), talk).endswith("No such file or directory")
    assert run_command(ChatCommand("/save", ""), talk) == "/save needs the name of a file"


class _Counting:
    """A client for which each word is a token."""

    def tokenize(self, messages):
        return [0] * sum(len(message["content"].split()) for message in messages)


def turns(*texts: str) -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def test_the_oldest_turns_leave_when_the_context_is_full():
    system = {"role": "system", "content": "s " * 20}
    messages = [system, *turns("a " * 20, "b " * 10, "c " * 20, "d " * 10, "e " * 10)]
    talk = Conversation(_Counting(), SamplingParams(max_tokens=None), 100, messages=list(messages))
    assert talk.make_room() == 1, "90 tokens, and 25 for the answer"
    assert talk.messages == [system, *messages[3:]]
    assert talk.make_room() == 0
    talk.params, talk.messages = SamplingParams(max_tokens=10), list(messages)
    assert talk.make_room() == 0, "the answer is short"
    talk.messages = turns("x " * 200)
    assert talk.make_room() == 0, "the last message stays"


class _Away:
    """A client whose server has these executors; None: it does not answer."""

    def __init__(self, connected: list[bool] | None) -> None:
        self.connected = connected

    def server_info(self):
        if self.connected is None:
            raise UnavailableError("away")
        return SimpleNamespace(executors=[SimpleNamespace(connected=each) for each in self.connected])


@pytest.mark.parametrize(
    ("connected", "told"),
    [([False], "the executor restarts"), (None, "the server does not answer"), ([False, True], None), ([], None)],
)
def test_silence_is_explained(connected, told):
    said: queue.Queue[str] = queue.Queue()
    with SilenceWatch(_Away(connected), said.put, quiet_s=0.01) as watch:
        if told:
            assert told in said.get(timeout=10)
            watch.heard()
            assert told in said.get(timeout=10), "a second silence is another one"
    assert said.empty()


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
        "start the server with --chat-template\n"
    )
