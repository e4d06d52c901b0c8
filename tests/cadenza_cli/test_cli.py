"""`cadenza generate` and `cadenza chat` against the scripted server."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys

import pytest

import cadenza
from cadenza.calls.loop_thread import LoopThread
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_cli.app import run
from cadenza_cli.keyboard import Interrupts
from tests.helpers.client.scripted_server import Script, interrupt_when, start


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def target(script):
    loop = LoopThread.shared()
    server, address = loop.run(start(script))
    yield address
    loop.run(server.stop(0))


def test_generate_prints_the_answer(target, script, capsys):
    assert run(["generate", "--target", target, "--max-tokens", "7", "--temperature", "0", "two words"]) == 0
    assert capsys.readouterr().out == "two words \n"
    (params,) = script.params
    assert (params.max_tokens, params.temperature) == (7, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--raw"], ["--json"], ["--ids", "5"]])
def test_generate_limits_drafts(target, script, arguments):
    prompt = [] if "--ids" in arguments else ["a"]
    for option in ([], ["--speculation", "0"], ["--speculation", "3"]):
        assert run(["generate", "--target", target, *arguments, *option, *prompt]) == 0
    assert script.drafts == [None, 0, 3]


def test_the_package_is_the_command():
    answer = subprocess.run([sys.executable, "-m", "cadenza_cli", "--version"], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, f"cadenza {cadenza.__version__}\n", "")


def test_chat_limits_drafts(target, script, monkeypatch):
    for option in ([], ["--speculation", "0"], ["--speculation", "64"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
        assert run(["chat", "--target", target, *option]) == 0
    assert script.drafts == [None, None, 0, 0, 64, 64]


def test_generate_prints_several_in_order(target, capsys):
    assert run(["generate", "--target", target, "--raw", "a b", "c"]) == 0
    assert capsys.readouterr().out == "── a b\na b \n\n── c\nc \n"


def test_generate_as_json(target, capsys):
    assert run(["generate", "--target", target, "--json", "a", "b c"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["prompt"], first["text"], first["finish_reason"]) == ("a", "a ", "stop")
    assert (second["token_ids"], second["metrics"]["num_completion_tokens"]) == ([0, 1], 2)


def test_generate_reads_stdin(target, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))
    assert run(["generate", "--target", target]) == 0
    assert capsys.readouterr().out == "from stdin \n"


def test_generate_with_nothing_on_stdin(target, script, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert run(["generate", "--target", target]) == 2
    assert capsys.readouterr().err == "cadenza: no prompt: stdin is empty\n"
    assert not script.params


def test_bytes_that_are_no_text_are_replaced(target, capsys, monkeypatch):
    assert run(["generate", "--target", target, "a\udcff b"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("\udcfec\n"))
    assert run(["chat", "--target", target]) == 0
    assert capsys.readouterr().out == "a\ufffd b \n\ufffdc \n"


def test_a_terminal_without_the_characters(target, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert run(["generate", "--target", target, "你好"]) == 0
    assert run(["generate", "--target", target, "你好", "--json"]) == 0
    out.flush()
    text, data = out.buffer.getvalue().decode("ascii").splitlines()
    assert text == "?? "
    assert json.loads(data)["text"] == "你好 "


def test_the_reader_of_the_output_has_gone(target, script, capsys, monkeypatch):
    def write(text):
        raise BrokenPipeError

    monkeypatch.setattr("cadenza_cli.generate.write", write)
    assert run(["generate", "--target", target, "hang on"]) == 1
    assert capsys.readouterr().err == ""
    assert script.was_cancelled.wait(20)


def test_generate_falls_back_to_raw(capsys):
    class Plain(Script):
        async def GetModelInfo(self, request, context):
            return pb.GetModelInfoResponse(has_tokenizer=True)

    loop = LoopThread.shared()
    server, address = loop.run(start(Plain()))
    assert run(["generate", "--target", address, "a"]) == 0
    loop.run(server.stop(0))
    captured = capsys.readouterr()
    assert captured.out == "a \n"
    assert "no chat template" in captured.err


def test_generate_from_token_ids(target, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # it is not read
    assert run(["generate", "--target", target, "--ids", "5,6 4", "--ids", " 3, 2,"]) == 0
    assert capsys.readouterr().out == "── 5 6 4\n5 6 4 \n\n── 3 2\n3 2 \n", "no chat template: the ids are echoed"
    assert run(["generate", "--target", target, "--json", "--ids", "5"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["prompt_token_ids"], line["token_ids"], "prompt" in line) == ([5], [0], False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "5,x"], "option ids: 'x' is not a token id"),
        (["--ids", "-5"], "option ids: '-5' is not a token id"),
        (["--ids", ""], "option ids: '' is not a token id"),
        (["--ids", "1.5"], "option ids: '1.5' is not a token id"),
        (["--ids", "5 7"], "option ids: '7' is not a token id of this model: the last is 6"),
        (["--ids", "5", "a text"], "give prompts as texts or as --ids, not both"),
    ],
)
def test_wrong_token_ids(target, script, capsys, arguments, message):
    assert run(["generate", "--target", target, *arguments]) == 2
    assert capsys.readouterr().err == f"cadenza: {message}\n"
    assert not script.params


@pytest.fixture
def bare():
    """The address of a server whose model has no tokenizer."""

    class Bare(Script):
        async def GetModelInfo(self, request, context):
            return pb.GetModelInfoResponse(model="m", vocab_size=7)

        async def Generate(self, request, context):
            async for response in super().Generate(request, context):
                for output in response.outputs:
                    output.text = ""
                yield response

    loop = LoopThread.shared()
    server, address = loop.run(start(Bare()))
    yield address
    loop.run(server.stop(0))


def test_answers_without_a_tokenizer_are_token_ids(bare, capsys):
    assert run(["generate", "--target", bare, "--ids", "5,6,4"]) == 0
    assert capsys.readouterr().out == "0 1 2 \n"


@pytest.mark.parametrize("command", [["generate", "Hello"], ["generate", "--raw", "Hello"], ["chat"]])
def test_a_model_without_a_tokenizer_says_so(bare, capsys, command, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert run([*command, "--target", bare]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "cadenza: the model has no tokenizer: send token ids (cadenza generate --ids 5,6,7; prompt_token_ids in "
        "Python), or start the server with --tokenizer\n"
    )


def test_one_failing_prompt_does_not_stop_the_others(target, capsys):
    assert run(["generate", "--target", target, "bad", "fine"]) == 1
    captured = capsys.readouterr()
    assert "── fine\nfine \n" in captured.out
    assert captured.err.startswith("cadenza: the prompt is too long")


def test_one_failing_prompt_leaves_the_others_json(target, capsys):
    assert run(["generate", "--target", target, "--json", "bad", "fine", "bad"]) == 1
    captured = capsys.readouterr()
    assert [json.loads(line)["prompt"] for line in captured.out.splitlines()] == ["fine"]
    other, first = captured.err.splitlines()
    assert other.startswith("cadenza: 'bad': the prompt is too long")
    assert first.startswith("cadenza: prompt 0: the prompt is too long")


def test_a_full_disk(target, capsys, monkeypatch):
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        assert run(["generate", "--target", target, "a"]) == 1
    assert capsys.readouterr().err == "cadenza: [Errno 28] No space left on device\n"


def test_closed_streams(target, script, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert run(["generate", "--target", target, "a"]) == 0
    assert run(["generate", "--target", target, "bad"]) == 1
    monkeypatch.setattr("sys.stdin", None)
    assert run(["chat", "--target", target]) == 0
    assert run(["generate", "--target", target]) == 2


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "x", "--target", "127.0.0.1:1"], 1, "cadenza: no service at 127.0.0.1:1"),
        (["generate", "x", "--target", "host:port"], 2, "cadenza: option target: 'host:port' is not HOST:PORT"),
        (["generate", "x", "--temperature", "-1"], 2, "cadenza: option temperature must be"),
        (["generate", "x", "--speculation", "65"], 2, "cadenza: option speculation must be 0 (off) to 64 draft tokens"),
        (["chat", "--speculation", "-1"], 2, "cadenza: option speculation must be 0 (off) to 64 draft tokens"),
        (["generate", "x", "--max-tokens", "many"], 2, "cadenza: Invalid value for '--max-tokens'"),
        (["generate", "x", "--block-size", "8"], 2, "cadenza: option block_size is for a service started here"),
        (["generate", "x", "--target", "a:1", "--model", "m"], 2, "cadenza: give --target or --model, not both"),
        (
            ["frobnicate"],
            2,
            "cadenza: there is no command 'frobnicate'; commands are demo, up, serve, gateway, generate,",
        ),
        (["serv", "m"], 2, "cadenza: there is no command 'serv'; did you mean serve?\n"),
        (["generat", "x"], 2, "cadenza: there is no command 'generat'; did you mean generate?\n"),
        (["stop", "m"], 2, "cadenza: there is no command 'stop'; Ctrl-C stops cadenza up; cadenza drain lets its "),
        (["rm"], 2, "cadenza: Missing argument 'MODEL...'.\n"),
        (["run", "m"], 2, "cadenza: there is no command 'run'; cadenza up MODEL serves a model, and cadenza chat "),
        (["up", "--modle", "m"], 2, "cadenza: there is no option --modle; did you mean --model?\n"),
        (["serve", "m", "--prot", "1"], 2, "cadenza: there is no option --prot; did you mean --port"),
        (["chat", "--temprature", "0"], 2, "cadenza: there is no option --temprature; did you mean --temperature"),
        (
            ["generate", "--port", "1", "x"],
            2,
            "cadenza: there is no option --port: --target HOST:PORT names the serve",
        ),
        (["up", "m", "--model", "other"], 2, "cadenza: option model: it is given twice: m and --model other\n"),
        (["up"], 2, "cadenza: option model: it is missing: cadenza up MODEL; or --model, CADENZA_MODEL, or model in a"),
        (["up", "--model", "m", "--port", "x"], 2, "cadenza: option port: must be an integer from 0 to 65535, not 'x'"),
        (["up", "--config", "/no/such"], 2, "cadenza: /no/such: no such file or directory"),
        (["chat", "--config", "/no/such"], 2, "cadenza: /no/such: no such file or directory"),
        (["demo", "--model", "/no/such"], 2, "cadenza: option model: there is no folder '/no/such'"),
    ],
)
def test_errors_are_one_line(arguments, code, message, capsys):
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert len(captured.err.splitlines()) == 1


def test_no_arguments_is_help(capsys):
    assert run([]) == 0
    assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["up", "generate", "chat", "top", "demo", "drain", "executors", "executors list", "executors drain"]
)
def test_help_fits_a_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*command.split(), "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_help_has_the_options_under_headings(capsys):
    assert run(["up", "--help"]) == 0
    out = capsys.readouterr().out
    headings = ["Common options", "Model", "Memory", "Batching", "Scheduling", "Logging", "Simulation"]
    places = [out.index(f"\n{heading}:\n") for heading in headings] + [out.index("Exit codes:")]
    assert places == sorted(places)
    common = re.findall("^  (--[a-z-]+)", out[places[0] : places[1]], re.MULTILINE)
    assert common == [
        "--model", "--host", "--port", "--config", "--http", "--executors", "--device", "--dtype", "--max-model-len",
        "--max-num-seqs", "--gpu-memory-utilization", "--log-requests",
    ]  # fmt: skip
    assert out.index("Examples:") < places[0] < out.index("--model MODEL") < out.index("--device") < places[1]
    assert places[2] < out.index("  --num-gpu-blocks") < out.index("--watermark") < places[3]
    for flag in ("--gpu-memory-utilization", "--no-enable-prefix-caching", "--config"):
        assert flag in out
    assert "--listen" not in out
    assert "Plans sent ahead of their results. [default: 2]" in " ".join(out.split())
    assert run(["generate", "--help"]) == 0
    assert "\nServer started by --model: Memory:\n" in capsys.readouterr().out


def test_serve_is_up_by_another_name(capsys):
    assert run(["up", "--help"]) == 0
    up = capsys.readouterr().out
    assert run(["serve", "--help"]) == 0
    assert capsys.readouterr().out == up.replace("Usage: cadenza up", "Usage: cadenza serve")
    assert run(["--help"]) == 0
    assert "\n  serve " not in capsys.readouterr().out, "one command is listed once"


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"cadenza {cadenza.__version__}\n"


def test_chat_keeps_the_history(target, script, capsys, monkeypatch):
    chats = []
    generate = Script.Generate

    async def noting(self, request, context):
        chats.append([(turn.role, turn.content) for turn in request.prompt[0].chat.messages])
        async for response in generate(self, request, context):
            yield response

    monkeypatch.setattr(Script, "Generate", noting)
    server, address = LoopThread.shared().run(start(script))
    monkeypatch.setattr("sys.stdin", io.StringIO("hi there\nagain\n/reset\n\n/what\nbad\nnew\n/quit\nunread\n"))
    assert run(["chat", "--target", address]) == 0
    LoopThread.shared().run(server.stop(0))
    user, assistant = ("user", "hi there"), ("assistant", "hi there ")
    assert chats == [[user], [user, assistant, ("user", "again")], [("user", "bad")], [("user", "new")]]
    captured = capsys.readouterr()
    assert captured.out == "hi there \nagain \nnew \n"
    assert "no command '/what': /help lists them" in captured.err
    assert "too long" in captured.err


def test_ctrl_c_stops_the_answer_and_not_the_chat(target, script, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hang on\nbye\n"))
    interrupt_when(script.hanging)
    assert run(["chat", "--target", target]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hang \nbye \n"
    assert "stopped" in captured.err
    assert len(script.cancelled) == 1


def interrupted_twice(interrupts: Interrupts) -> None:
    with interrupts.listening():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)  # while the first one's clean-up runs


def test_a_pipe_is_not_read_on_when_the_server_is_gone(target, script, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("vanish\nunread\n"))
    assert run(["chat", "--target", target]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "unfinished" in captured.err
    assert len(script.params) == 1


def test_interrupts_are_raised_once_and_only_where_they_may_be():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                interrupted_twice(interrupts)
        with interrupts.listening():
            pass
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_that_is_cut_says_so(target, capsys, monkeypatch):
    cut = types_pb2.Finish(reason=types_pb2.FINISH_REASON_LENGTH, detail=types_pb2.FINISH_DETAIL_MAX_TOKENS)
    monkeypatch.setattr("tests.helpers.client.scripted_server.STOPPED", cut)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert run(["chat", "--target", target]) == 0
    assert capsys.readouterr().err == "cadenza: the answer ended early: max_tokens\n"
