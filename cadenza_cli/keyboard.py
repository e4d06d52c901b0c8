"""Keys at the terminal: single ones, for a view that redraws itself, and Ctrl-C that ends one operation only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator

_INPUT_FLAGS, _LOCAL_FLAGS = 0, 3
"""Of what `termios.tcgetattr` returns."""


class Keyboard:
    """While open, passes each typed character to a callback on the running event loop; nothing is echoed.

    Ctrl-C stays a signal. If standard input is no terminal, there are no keys and it is not read.
    """

    def __init__(self, on_key: Callable[[str], None]) -> None:
        self._on_key = on_key
        self._fd = sys.stdin.fileno() if has_keyboard() else None

    def __enter__(self) -> Keyboard:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
            asyncio.get_running_loop().add_reader(self._fd, self._read, self._fd)
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def _read(self, fd: int) -> None:
        try:
            typed = os.read(fd, 64)
        except OSError:  # the terminal is gone
            typed = b""
        if not typed:
            asyncio.get_running_loop().remove_reader(fd)
        for key in typed.decode(errors="ignore"):
            self._on_key(key)


@contextlib.contextmanager
def unechoed() -> Iterator[None]:
    """Keep what is typed meanwhile for the next reader of the terminal, without showing it; Ctrl-C stays a signal."""
    if not has_keyboard():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    quiet = list(before)
    quiet[_INPUT_FLAGS] &= ~termios.ICRNL
    quiet[_LOCAL_FLAGS] = quiet[_LOCAL_FLAGS] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH
    termios.tcsetattr(fd, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)


def has_keyboard() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


class Interrupts:
    """While open, SIGINT raises KeyboardInterrupt only within `listening`, and at most once.

    So a second Ctrl-C cannot interrupt the clean-up after the first one. For the main thread.
    """

    def __init__(self) -> None:
        self._listening = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Let Ctrl-C interrupt the body; catch KeyboardInterrupt around this."""
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def _take(self, number: int, frame: object) -> None:
        if self._listening:
            self._listening = False
            raise KeyboardInterrupt
