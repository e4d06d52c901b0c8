"""What `LLM()` shows on stderr while it starts: one live line in a terminal, two plain lines elsewhere."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from cadenza_launcher.services.options import EXECUTOR

_REDRAW_S = 0.2
_COLUMNS = 80  # of a terminal that does not state its width


class LoadProgress:
    """Shows that the services start, for how long, the last message of an executor, and when they are ready.

    Use it with `with`, around the start. `start` and `log` are hooks of LocalServices; if `shown` is false, nothing is
    written.
    """

    def __init__(self, model: str, *, shown: bool) -> None:
        self._model = model
        self._stream: TextIO | None = sys.stderr if shown else None
        self._started = time.monotonic()
        self._message = ""  # the last one of an executor
        self._services = "executor and scheduler"
        self._drawn = 0  # columns of the live line that is on the screen
        self._running = threading.Lock()  # held until the end; KeyboardInterrupt cannot break a bare lock
        self._running.acquire()
        self._redrawing: threading.Thread | None = None

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.release()
        if self._redrawing is not None:
            self._redrawing.join()
        if error is None:
            self._write(f"{self._model} is ready in {self._elapsed_s():.1f} s", end="\n")
        elif self._drawn:
            self._write(self._live_text(), end="\n")

    def start(self, executors: Sequence[str] = (EXECUTOR,)) -> None:
        """The options are right, and the services start: executors with these names, and a scheduler."""
        if len(executors) > 1:
            self._services = f"{len(executors)} executors and scheduler"
        if self._stream is None:
            return
        if not self._stream.isatty():
            self._write(self._status(), end="\n")
            return
        self._redrawing = threading.Thread(target=self._redraw, name="cadenza-load-progress", daemon=True)
        self._redrawing.start()

    def log(self, service: str, line: str) -> None:
        """A line of a service's log: `DATE TIME LEVEL MODULE: MESSAGE`; shown if it is from the one that loads."""
        if service.startswith(EXECUTOR):
            message = line.partition(": ")[2] or line
            self._message = f"; {''.join(each for each in message if each.isprintable())}"

    def _redraw(self) -> None:
        shown = ""
        while True:
            if (text := self._live_text()) != shown:
                self._write(text)
                shown = text
            if self._running.acquire(timeout=_REDRAW_S):
                return

    def _status(self) -> str:
        return f"starting {self._services}, loading {self._model}"

    def _live_text(self) -> str:
        return f"{self._status()}, {self._elapsed_s():.0f} s{self._message}"

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _write(self, text: str, end: str = "") -> None:
        """Write a line over the live one."""
        if self._stream is None:
            return
        line = f"cadenza: {text}"
        if self._redrawing is not None:  # a longer line would wrap, and could not be drawn over
            line = _cut(line, _columns(self._stream) - 1)
        over, rest = ("\r", " " * (self._drawn - _width(line))) if self._drawn else ("", "")
        self._stream.write(f"{over}{line}{rest}{end}")
        self._stream.flush()
        self._drawn = 0 if end else _width(line)


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except OSError:
        return _COLUMNS


def _cut(text: str, columns: int) -> str:
    ends = itertools.accumulate(map(_width, text))
    return text[: sum(end <= columns for end in ends)]


def _width(text: str) -> int:
    """Columns of a text: East Asian characters have two."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)
