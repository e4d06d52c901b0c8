"""An interactive shell in an emulated terminal: what a person types into, and what that person sees."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.machine.terminal import CTRL_C, Terminal

_PS1 = r"[\#:$?]$ "  # the command's number, and the exit code of the one before
_CONTROL = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")


class Shell:
    """A bash in a terminal of `size` (columns, lines)."""

    def __init__(self, folder: Path, size: tuple[int, int], environment: Mapping[str, str]) -> None:
        self.size = size
        self._number = 1
        unset = [part for name in os.environ if name.startswith(("PYTHON", "CADENZA_")) for part in ("-u", name)]
        assigned = [f"{name}={value}" for name, value in environment.items()]
        begin = ["bash", "-c", 'cd "$0" && PS1="$1" exec bash --noprofile --norc -i', str(folder), _PS1]
        self.terminal = Terminal("/usr/bin/env", *unset, *assigned, *begin, kind="xterm-256color", size=size, echo=True)
        self.wait_prompt(10)

    def type(self, text: str) -> None:
        """Type characters; a newline is the return key."""
        self.terminal.type(text.encode())

    def run(self, line: str, timeout_s: float) -> int:
        """Run a command to its end; returns its exit code."""
        self.begin(line)
        return self.wait_prompt(timeout_s)

    def begin(self, line: str) -> None:
        """Type a command."""
        self._number += 1
        self.terminal.forget()
        self.type(f"{line}\n")

    def clear(self) -> None:
        """Empty the screen."""
        self.run("clear", 10)

    def interrupt(self, timeout_s: float = 20) -> int:
        """Press Ctrl-C; returns the exit code of what ran."""
        self.terminal.type(CTRL_C)
        return self.wait_prompt(timeout_s)

    def wait_screen(self, pattern: str, timeout_s: float = 30) -> None:
        """Wait until the pattern is on the screen; the end of the command before that is an AssertionError."""
        shown = "\n".join(self.terminal.wait_for_screen(f"{pattern}|{self._prompt}", timeout_s))
        assert not re.search(self._prompt, shown), f"it has ended: {self.output[-2000:]}"

    def wait_prompt(self, timeout_s: float) -> int:
        """Wait for the end of the command; returns its exit code."""
        shown = "\n".join(self.terminal.wait_for_screen(self._prompt, timeout_s))
        return int(re.findall(self._prompt, shown)[-1])

    @property
    def _prompt(self) -> str:
        """The prompt after the command that runs."""
        return rf"\[{self._number}:(\d+)\]\$(?=\n*\Z)"

    @property
    def output(self) -> str:
        """All that was shown since the command began, without control sequences."""
        return _CONTROL.sub("", self.terminal.text)

    def close(self) -> None:
        """Close the terminal."""
        self.terminal.close()
