"""`cadenza chat` in a real terminal: typing, Ctrl-C, Ctrl-D, and what the server sees of it."""

from __future__ import annotations

import contextlib
import shlex
import sys

import pytest

from cadenza.calls.loop_thread import LoopThread
from tests.helpers.client.scripted_server import Script, start
from tests.helpers.machine.terminal import CTRL_C, CTRL_D, Terminal

pytestmark = pytest.mark.slow
ALT_ENTER, UP = b"\x1b\r", b"\x1b[A"
PASTE = b"\x1b[200~%s\x1b[201~"


class NotingScript(Script):
    """Keeps every chat that it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.chats: list[list[tuple[str, str]]] = []

    async def Generate(self, request, context):
        self.chats.append([(turn.role, turn.content) for turn in request.prompt[0].chat.messages])
        async for response in super().Generate(request, context):
            yield response


@pytest.fixture
def script():
    return NotingScript()


@pytest.fixture
def target(script):
    loop = LoopThread.shared()
    server, address = loop.run(start(script))
    yield address
    loop.run(server.stop(0))


@contextlib.contextmanager
def chatting(target: str, *options: str, **terminal_options):
    """A chat that waits for its first message."""
    command = (sys.executable, "-m", "cadenza", "chat", "--target", target, *options)
    terminal = Terminal(*command, **{"kind": "xterm-256color"} | terminal_options)
    try:
        yield terminal
    finally:
        terminal.close()


def messages_of(script: NotingScript) -> list[str]:
    return [chat[-1][1] for chat in script.chats]


def test_ctrl_c_stops_an_answer_and_the_talk_goes_on(target, script):
    with chatting(target, "--system", "Be brief. 简短。") as terminal:
        terminal.wait_for_screen("exits\n>\n")
        terminal.type(b"hang on\r")
        assert script.hanging.wait(10)
        terminal.wait_for_screen("\nhang\n")  # the first streamed word
        terminal.type(CTRL_C)
        terminal.wait_for_screen("cadenza: stopped\n>\n")
        assert script.was_cancelled.wait(20), "the request is aborted on the server"
        assert terminal.process.poll() is None

        terminal.type(b"never mind")
        terminal.wait_for_screen("> never mind")
        terminal.type(CTRL_C)
        terminal.wait_for_screen("never mind\ncadenza: /help lists commands, Ctrl-D exits\n>\n")
        terminal.type("你好 👨‍👩‍👧‍👦 cafe\u0301\r".encode())
        terminal.wait_for("你好 👨‍👩‍👧‍👦 cafe\u0301 \r\n")
        terminal.type(b"bad\r")
        terminal.wait_for_screen("the prompt is too long.*\n?.*removed\\)\n>\n")
        terminal.type(CTRL_D)
        assert terminal.process.wait(10) == 0

    first = [("system", "Be brief. 简短。"), ("user", "hang on")]
    second = [*first, ("assistant", "hang "), ("user", "你好 👨‍👩‍👧‍👦 cafe\u0301")]
    third = [*second, ("assistant", "你好 👨‍👩‍👧‍👦 cafe\u0301 "), ("user", "bad")]
    assert script.chats == [first, second, third]


def test_what_is_typed_during_an_answer_waits_and_is_not_shown_in_it(target, script):
    with chatting(target) as terminal:
        terminal.wait_for_screen("exits\n>\n")
        terminal.type(b"hang on\r")
        assert script.hanging.wait(10)
        terminal.wait_for_screen("\nhang\n")
        terminal.type(b"typed ahead\rand more")
        terminal.type(CTRL_C)
        terminal.wait_for_screen("> hang on\nhang\n+cadenza: stopped\n> typed ahead\ntyped ahead\n> and more")
    assert messages_of(script) == ["hang on", "typed ahead"]


def test_a_broken_connection_and_a_new_conversation(target, script):
    with chatting(target) as terminal:
        terminal.wait_for_screen("\n>\n")
        terminal.type(b"vanish\r")
        terminal.wait_for_screen("unfinished \\(your message is\n?.*removed\\)\n>\n")
        terminal.type(b"one\r")
        terminal.wait_for_screen("\none\n>\n")
        terminal.type(b"/rest\r")
        terminal.wait_for_screen("did you mean /reset\\?(.*\n)+>\n")
        terminal.type(b"/reset\r")
        terminal.wait_for_screen("a new conversation\n>\n")
        terminal.type(b"two\r")
        terminal.wait_for_screen("\ntwo\n>\n")
        terminal.type(b"/quit\r")
        assert terminal.process.wait(10) == 0
    assert script.chats[1:] == [[("user", "one")], [("user", "two")]]


def test_messages_of_several_lines(target, script):
    with chatting(target) as terminal:
        terminal.wait_for_screen("\n>\n")
        terminal.type(b'"""first\rsecond\r\r"""\r')
        terminal.wait_for_screen('"""\nfirst second\n>\n')
        terminal.type(b"third" + ALT_ENTER + b"fourth\r")
        terminal.wait_for_screen("\nthird fourth\n>\n")
        terminal.type(PASTE % b"fifth\r\nsixth\r" + b"end\r")
        terminal.wait_for_screen("\nfifth sixth end\n>\n")
        terminal.type(UP + UP)
        terminal.wait_for_screen("> fifth\n  sixth\n  end\n")
    assert messages_of(script) == ["first\nsecond", "third\nfourth", "fifth\nsixth\nend"]


def test_earlier_messages_can_be_edited_and_sent_again(target, script):
    with chatting(target) as terminal:
        terminal.wait_for_screen("\n>\n")
        terminal.type(b"one\r")
        terminal.wait_for_screen("\none\n>\n")
        terminal.type(UP + b" more\r")
        terminal.wait_for_screen("\none more\n>\n")
    assert messages_of(script) == ["one", "one more"]


@pytest.mark.parametrize("width", [50, 80])
def test_words_are_whole_at_the_right_edge(target, script, width):
    text = " ".join(f"{'w' * (1 + 7 * number % 13)}{number}" for number in range(60)) + " 你好" * 20
    with chatting(target, size=(width, 60)) as terminal:
        terminal.wait_for_screen("exits\n>\n")
        terminal.type(text.encode() + b"\r")
        lines = terminal.wait_for_screen("你好\n>\n")
    end = lines.index(">")
    start = next(index for index, line in enumerate(lines) if line.startswith("w0 ") or line == "w0")
    answer = [line for line in lines[start:end] if not line.startswith("> ")]
    words = " ".join(answer).split()
    assert [word for word in words if word.isascii()] == text.split()[:60], "every word is whole"
    assert "".join(words) == text.replace(" ", ""), "nothing is lost"
    assert max(map(len, answer)) > width - 20, "lines are full"


def test_a_terminal_that_can_do_nothing(target, script):
    with chatting(target, kind="dumb") as terminal:
        terminal.wait_for("exits\r\n.*> ")
        terminal.type(b"one two\n")
        terminal.wait_for("one two \r\n.*> ")
        terminal.type(b"/quit\n")
        assert terminal.process.wait(10) == 0
    assert messages_of(script) == ["one two"]


def test_answers_go_into_a_file_while_messages_are_typed(target, script, tmp_path):
    command = shlex.join([sys.executable, "-m", "cadenza", "chat", "--target", target])
    terminal = Terminal("/bin/sh", "-c", f"exec {command} > {tmp_path}/answers", kind="xterm-256color", size=(50, 24))
    text = " ".join(["word"] * 30)
    try:
        terminal.wait_for_screen("exits\n>\n")
        terminal.type(text.encode() + b"\r")
        terminal.wait_for_screen("word\n>\n")
        terminal.type(CTRL_D)
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()
    assert (tmp_path / "answers").read_text() == f"{text} \n", "without line breaks of a terminal"
