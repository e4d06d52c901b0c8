"""`cadenza chat` in a real terminal: typing, Ctrl-C, Ctrl-D, and what the server sees of it."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time

import pytest

from cadenza.loop_thread import LoopThread
from tests.helpers.scripted_server import Script, start

pytestmark = pytest.mark.slow

# Makes the terminal on its standard input its controlling one, as a shell's child has it, then becomes the command.
IN_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """A command in a terminal of its own: what it shows, and a keyboard. What is typed is not shown."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        modes = termios.tcgetattr(slave)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        environment = {**os.environ, "TERM": "dumb", "PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_A_TERMINAL, *command], stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        self._shown = b""

    def type(self, data: bytes) -> None:
        os.write(self._master, data)

    def wait_for(self, pattern: str, timeout_s: float = 30.0) -> str:
        """Return what is shown up to the end of the first match; what comes behind it is kept for the next call."""
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.text)) is None:
            readable, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"{pattern!r} was not shown: {self.text!r}"
            try:
                self._shown += os.read(self._master, 4096)
            except OSError:  # the command has ended
                raise AssertionError(f"{pattern!r} was not shown before the end: {self.text!r}") from None
        shown = self.text[: found.end()]
        self._shown = self._shown[len(shown.encode()) :]
        return shown

    @property
    def text(self) -> str:
        return self._shown.decode(errors="ignore")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


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
    terminal.wait_for("leaves\r\n.*> ")
    terminal.type(b"hang on\n")
    assert script.hanging.wait(10)
    terminal.wait_for("hang ")  # the first streamed word
    terminal.type(CTRL_C)
    terminal.wait_for("stopped\r\n.*> ")
    assert script.was_cancelled.wait(5), "the request is aborted on the server"
    assert terminal.process.poll() is None

    # At the prompt the line is dropped; at once, or, if readline is busy with it just then, when it is complete.
    terminal.type(b"never mind" + CTRL_C + b"\n")
    terminal.wait_for("leaves\r\n.*> ")
    terminal.type("你好 👨‍👩‍👧‍👦 cafe\u0301\n".encode())
    terminal.wait_for("你好 👨‍👩‍👧‍👦 cafe\u0301 \r\n")
    terminal.wait_for("> ")
    terminal.type(b"bad\n")
    terminal.wait_for("the prompt is too long.*taken back.*\r\n.*> ")
    terminal.type(CTRL_D)
    assert terminal.process.wait(10) == 0

    first = [("system", "Be brief. 简短。"), ("user", "hang on")]
    second = [*first, ("assistant", "hang "), ("user", "你好 👨‍👩‍👧‍👦 cafe\u0301")]
    third = [*second, ("assistant", "你好 👨‍👩‍👧‍👦 cafe\u0301 "), ("user", "bad")]
    assert script.chats == [first, second, third]


def test_a_broken_connection_and_a_new_conversation(terminal, script):
    terminal.wait_for("> ")
    terminal.type(b"vanish\n")
    terminal.wait_for("ended the stream of request .* unfinished .*taken back.*\r\n.*> ")
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
