"""The directory of a journal: locked by one process at a time, and the place of the scheduler's id."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
from pathlib import Path

_LOCK, _ID, DATABASE = "lock", "scheduler-id", "journal.sqlite"
_ID_FORMAT = re.compile(r"[0-9a-f]{32}")


class JournalError(Exception):
    """A journal cannot be used; the message names its directory and the reason."""


class JournalDirectory:
    """An open, locked directory. The lock ends with the process at the latest, however that ends."""

    def __init__(self, path: str) -> None:
        """Create the directory if need be, and lock it; raises JournalError."""
        self.path = Path(path).expanduser().absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as exc:
            raise JournalError(f"{self.path}: {exc.strerror}") from exc
        try:
            self._take_lock()
            self.scheduler_id = self._read_or_draw_id()
            """The id of the scheduler that this directory belongs to; 32 hexadecimal digits."""
        except BaseException:
            self.close()
            raise

    @property
    def database(self) -> Path:
        """The database file."""
        return self.path / DATABASE

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._lock)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            raise JournalError(
                f"{self.path}: process {holder or '(unknown)'} uses this journal; each scheduler needs its own"
            ) from None
        except OSError as exc:
            raise JournalError(f"{self.path}: cannot be locked: {exc.strerror}") from exc
        with contextlib.suppress(OSError):  # only the error of another process shows the number
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _read_or_draw_id(self) -> str:
        path = self.path / _ID
        try:
            with contextlib.suppress(FileNotFoundError):
                known = path.read_text(encoding="ascii", errors="replace").strip()
                if not _ID_FORMAT.fullmatch(known):
                    raise JournalError(f"{path}: not a scheduler's id; delete this file to draw a new one")
                return known
            drawn = uuid.uuid4().hex
            self._write_durably(path, drawn + "\n")
        except OSError as exc:
            raise JournalError(f"{path}: {exc.strerror}") from exc
        return drawn

    def _write_durably(self, path: Path, text: str) -> None:
        """Write a file whole or not at all."""
        draft = path.with_suffix(".new")
        with draft.open("w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
