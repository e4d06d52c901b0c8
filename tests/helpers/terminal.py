"""A terminal for a command, as a user has it."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time

# Makes the terminal on its standard input its controlling one, as a shell's child has it, then becomes the command.
IN_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """A command in a terminal of its own: what it shows, and a keyboard. What is typed is not shown.

    `kind` goes into TERM; a dumb one is sent no control sequences.
    """

    def __init__(self, *command: str, kind: str = "dumb") -> None:
        self._master, slave = pty.openpty()
        modes = termios.tcgetattr(slave)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        environment = {**os.environ, "TERM": kind, "PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"}
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
