"""The directory of a journal: locked by one process at a time, and the place of the scheduler's id."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import uuid
from itertools import count
from pathlib import Path
from zlib import crc32

from cadenza_common.serving.private_files import make_private, open_private

_LOG = logging.getLogger(__name__)
_LOCK, _ID, DATABASE = "lock", "scheduler-id", "journal.sqlite"
_ID_FORMAT = re.compile(r"([0-9a-f]{32}) ([0-9a-f]{8})\n")
"""The id, and its CRC."""
DATABASE_SUFFIXES = ("", "-wal", "-shm")


class JournalError(Exception):
    """A journal cannot be used; the message names its directory and the reason."""


class JournalDamagedError(JournalError):
    """The files of a journal do not hold what was written to them; `args` has the reason alone."""

    def __str__(self) -> str:
        return (
            f"{self.args[0]}; to start with an empty journal, move its directory away, or let --journal-damage "
            "set-aside move what is damaged to a folder in it"
        )


class JournalDirectory:
    """An open, locked directory. The lock ends with the process at the latest, however that ends."""

    def __init__(self, path: str, *, sets_aside: bool = False) -> None:
        """Create the directory if need be, and lock it; raises JournalError.

        sets_aside: draw a new id if the file of the old one is damaged.
        """
        self._sets_aside = sets_aside
        self.path = Path(path).expanduser().absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as exc:
            raise JournalError(f"{self.path}: {exc.strerror}") from exc
        make_private(self.path / _LOCK)
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

    def set_aside(self, damage: JournalDamagedError, *names: str) -> None:
        """Move files to a new folder in the directory, which keeps them; raises JournalError."""
        folder = next(path for number in count(1) if not (path := self.path / f"damaged-{number}").exists())
        try:
            folder.mkdir(mode=0o700)
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    (self.path / name).rename(folder / name)
            sync_folder(folder)
            sync_folder(self.path)
        except OSError as exc:
            raise JournalError(f"{folder}: {exc.strerror}") from exc
        _LOG.error("the journal %s: moved to %s, and begun anew", damage.args[0], folder)

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
            if path.exists():
                known = _ID_FORMAT.fullmatch(path.read_text(encoding="ascii", errors="replace"))
                if known is not None and _sum(known[1]) == known[2]:
                    make_private(path)
                    return known[1]
                damage = JournalDamagedError(f"{path}: not a scheduler's id; delete this file to draw a new one")
                if not self._sets_aside:
                    raise damage
                self.set_aside(damage, _ID)
            drawn = uuid.uuid4().hex
            self._write_durably(path, f"{drawn} {_sum(drawn)}\n")
        except OSError as exc:
            raise JournalError(f"{path}: {exc.strerror}") from exc
        return drawn

    def _write_durably(self, path: Path, text: str) -> None:
        """Write a file whole or not at all."""
        draft = path.with_suffix(".new")
        with open(draft, "w", encoding="ascii", opener=open_private) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(self.path)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _sum(text: str) -> str:
    return f"{crc32(text.encode()):08x}"
