"""Ctrl-C that interrupts one operation and not the program."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


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
