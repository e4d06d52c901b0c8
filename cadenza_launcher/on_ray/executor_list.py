"""The list of executors as a file, which the scheduler follows (`--executor file:PATH`)."""

from __future__ import annotations

import os
import threading
from pathlib import Path


class ExecutorList:
    """Addresses by executor. For several threads."""

    def __init__(self, path: Path) -> None:
        """Begin an empty list in a file."""
        self._path = path
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        self._write()

    @property
    def entry(self) -> str:
        """The value of --executor."""
        return f"file:{self._path}"

    def join(self, name: str, address: str) -> None:
        """Put an executor on the list, or change its address."""
        with self._lock:
            if self._addresses.get(name) != address:
                self._addresses[name] = address
                self._write()

    def leave(self, name: str) -> None:
        """Take an executor off the list, if it is there."""
        with self._lock:
            if self._addresses.pop(name, None) is not None:
                self._write()

    def _write(self) -> None:
        """Replace the file in one step: the scheduler never reads half of it."""
        lines = (f"{address}  # {name}\n" for name, address in sorted(self._addresses.items()))
        made = self._path.with_suffix(".new")
        made.write_text("".join(lines))
        os.replace(made, self._path)
