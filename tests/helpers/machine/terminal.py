"""A terminal for a command, as a user has it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pyte

# Makes the terminal on its standard input its controlling one, as a shell's child has it, then becomes the command.
IN_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
CTRL_C, CTRL_D = b"\x03", b"\x04"


class _Emulator(pyte.Screen):
    """A screen that answers the questions of programs, such as where the cursor is."""

    def __init__(self, columns: int, lines: int, answer) -> None:
        super().__init__(columns, lines)
        self.write_process_input = answer


class Terminal:
    """A command in a terminal of its own: what it shows, and a keyboard. What is typed is shown only with `echo`.

    `kind` goes into TERM; a dumb one is sent no control sequences. Any other is emulated: `screen` is what one would
    see. With `keyboard` False standard input is empty and no terminal.
    """

    def __init__(
        self,
        *command: str,
        kind: str = "dumb",
        size: tuple[int, int] = (80, 24),
        keyboard: bool = True,
        echo: bool = False,
    ) -> None:
        self._master, slave = pty.openpty()
        self._emulator = _Emulator(*size, lambda data: os.write(self._master, data.encode()))
        self._stream = pyte.ByteStream(self._emulator)
        self.resize(*size)
        modes = termios.tcgetattr(slave)
        if not echo:
            modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        environment = {**os.environ, "TERM": kind, "PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"}
        for name in ("COLUMNS", "LINES"):  # pytest-xdist sets them for its workers; rich believes them
            environment.pop(name, None)
        inside = [sys.executable, "-c", IN_A_TERMINAL, *command] if keyboard else command
        stdin = slave if keyboard else subprocess.DEVNULL
        self.process = subprocess.Popen(inside, stdin=stdin, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self._shown = b""

    def type(self, data: bytes) -> None:
        os.write(self._master, data)

    def resize(self, width: int, height: int) -> None:
        """As if the user dragged the window's corner."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self._emulator.resize(lines=height, columns=width)

    def wait_for(self, pattern: str, timeout_s: float = 30.0) -> str:
        """Return what is shown up to the end of the first match; what comes behind it is kept for the next call."""
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.text)) is None:
            self._read(deadline, pattern, self.text)
        shown = self.text[: found.end()]
        self._shown = self._shown[len(shown.encode()) :]
        return shown

    def wait_for_screen(self, pattern: str, timeout_s: float = 30.0) -> list[str]:
        """Return the screen's lines, without spaces at their ends, once the pattern is on it."""
        deadline = time.monotonic() + timeout_s
        while re.search(pattern, "\n".join(self.screen)) is None:
            self._read(deadline, pattern, "\n".join(self.screen))
        return self.screen

    def _read(self, deadline: float, pattern: str, seen: str) -> None:
        readable, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"{pattern!r} was not shown: {seen!r}"
        try:
            data = os.read(self._master, 4096)
        except OSError:  # the command has ended
            raise AssertionError(f"{pattern!r} was not shown before the end: {seen!r}") from None
        self._shown += data
        self._stream.feed(data)

    def rest(self, timeout_s: float = 30.0) -> str:
        """Return what is shown until the command ends; lines end as they do in a file."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(AssertionError):
            while True:
                self._read(deadline, "the end", self.text)
        self.process.wait(max(0.1, deadline - time.monotonic()))
        return self.text.replace("\r\n", "\n")

    def forget(self) -> None:
        """Drop what was shown so far; the screen stays as it is."""
        self._shown = b""

    @property
    def cells(self) -> list[list[pyte.screens.Char]]:
        """The characters on the screen with their colours, line by line; the second half of a wide one is empty."""
        lines = (self._emulator.buffer[number] for number in range(self._emulator.lines))
        return [[line[column] for column in range(self.columns)] for line in lines]

    @property
    def columns(self) -> int:
        """The screen's width in cells."""
        return self._emulator.columns

    @property
    def screen(self) -> list[str]:
        """The lines on the screen now; a wide character is one character."""
        return [line.rstrip() for line in self._emulator.display]

    @property
    def reads_lines(self) -> bool:
        """Whether typed characters are passed on as whole lines, as a shell leaves it."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ICANON)

    @property
    def text(self) -> str:
        return self._shown.decode(errors="ignore")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
