"""`cadenza chat` in a real terminal: typing, Ctrl-C, Ctrl-D, and what the server sees of it."""

from __future__ import annotations

import sys

import pytest

from cadenza.loop_thread import LoopThread
from tests.helpers.scripted_server import Script, start
from tests.helpers.terminal import CTRL_C, CTRL_D, Terminal

pytestmark = pytest.mark.slow


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
def terminal(script):
    loop = LoopThread.shared()
    server, address = loop.run(start(script))
    terminal = Terminal(sys.executable, "-m", "cadenza", "chat", "--target", address, "--system", "Be brief. 简短。")
    yield terminal
    terminal.close()
    loop.run(server.stop(0))


def test_ctrl_c_stops_an_answer_and_the_talk_goes_on(terminal, script):
    terminal.wait_for("exits\r\n.*> ")
    terminal.type(b"hang on\n")
    assert script.hanging.wait(10)
    terminal.wait_for("hang ")  # the first streamed word
    terminal.type(CTRL_C)
    terminal.wait_for("stopped\r\n.*> ")
    assert script.was_cancelled.wait(5), "the request is aborted on the server"
    assert terminal.process.poll() is None

    # At the prompt the line is dropped; at once, or, if readline is busy with it just then, when it is complete.
    terminal.type(b"never mind" + CTRL_C + b"\n")
    terminal.wait_for("exits\r\n.*> ")
    terminal.type("你好 👨‍👩‍👧‍👦 cafe\u0301\n".encode())
    terminal.wait_for("你好 👨‍👩‍👧‍👦 cafe\u0301 \r\n")
    terminal.wait_for("> ")
    terminal.type(b"bad\n")
    terminal.wait_for("the prompt is too long.*removed.*\r\n.*> ")
    terminal.type(CTRL_D)
    assert terminal.process.wait(10) == 0

    first = [("system", "Be brief. 简短。"), ("user", "hang on")]
    second = [*first, ("assistant", "hang "), ("user", "你好 👨‍👩‍👧‍👦 cafe\u0301")]
    third = [*second, ("assistant", "你好 👨‍👩‍👧‍👦 cafe\u0301 "), ("user", "bad")]
    assert script.chats == [first, second, third]


def test_a_broken_connection_and_a_new_conversation(terminal, script):
    terminal.wait_for("> ")
    terminal.type(b"vanish\n")
    terminal.wait_for("ended the stream of request .* unfinished .*removed.*\r\n.*> ")
    terminal.type(b"one\n")
    terminal.wait_for("one \r\n.*> ")
    terminal.type(b"/reset\n")
    terminal.wait_for("a new conversation\r\n.*> ")
    terminal.type(b"two\n")
    terminal.wait_for("two \r\n.*> ")
    terminal.type(b"/quit\n")
    assert terminal.process.wait(10) == 0
    system = ("system", "Be brief. 简短。")
    assert script.chats[1:] == [[system, ("user", "one")], [system, ("user", "two")]]
