"""A model's folder without a tokenizer: what each command and client says, and prompts of token ids."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from cadenza import Client, SamplingParams
from cadenza.calls.loop_thread import LoopThread
from cadenza.errors import FailedPreconditionError
from cadenza_cli.app import run
from tests.helpers.services import executor_service, scheduler_service

SAID = (
    "the model has no tokenizer: send token ids (cadenza generate --ids 5,6,7; prompt_token_ids in Python), or start "
    "the server with --tokenizer"
)
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def target(checkpoint):
    stack = contextlib.AsyncExitStack()

    async def start() -> str:
        executor = await stack.enter_async_context(executor_service(checkpoint))
        return (await stack.enter_async_context(scheduler_service(executor))).target

    yield LoopThread.shared().run(start())
    LoopThread.shared().run(stack.aclose())


@pytest.mark.parametrize("command", [["generate", "Hello"], ["generate", "--raw", "Hello"], ["chat"]])
def test_commands_say_what_to_send(target, command, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert run([*command, "--target", target]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"cadenza: {SAID}\n")


def test_clients_say_what_to_send(target):
    with Client(target) as client:
        for call, path in (
            (lambda: client.generate("Hello"), "prompt[0].text"),
            (lambda: client.chat(CHAT), "prompt[0].chat"),
            (lambda: client.tokenize("Hello"), "prompt[0].text"),
        ):
            with pytest.raises(FailedPreconditionError) as caught:
                call()
            assert str(caught.value) == f"{path}: {SAID}"


def test_token_ids_are_answered_with_token_ids(target, capsys):
    arguments = ["generate", "--target", target, "--temperature", "0", "--max-tokens", "4", "--ids", "5,6,7"]
    assert run(arguments) == 0
    assert run([*arguments, "--json"]) == 0
    shown, line = capsys.readouterr().out.splitlines()
    with Client(target) as client:
        (expected,) = client.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=4))
    token_ids = list(expected.outputs[0].token_ids)
    assert [int(word) for word in shown.split()] == token_ids
    assert (json.loads(line)["token_ids"], json.loads(line)["text"]) == (token_ids, "")


def test_a_load_test_sends_token_ids(target):
    options = ["--num-requests", "2", "--request-rate", "100", "--input-len", "5", "--output-len", "3"]
    assert run(["loadtest", "--target", target, *options]) == 0


def test_a_load_test_with_texts_says_what_to_send(target, tmp_path, capsys):
    workload = tmp_path / "texts.jsonl"
    workload.write_text('{"prompt": "hello there", "max_tokens": 3}\n')
    assert run(["loadtest", "--target", target, "--workload", str(workload), "--request-rate", "100"]) == 1
    captured = capsys.readouterr()
    assert "the model has no tokenizer: send token ids" in " ".join((captured.out + captured.err).split())
