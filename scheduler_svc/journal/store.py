"""The database of a journal: SQLite in WAL mode, on a thread of its own. A batch is durable whole or not at all."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from cadenza_common.serving.private_files import make_private, open_private
from scheduler_svc.journal.directory import (
    DATABASE_SUFFIXES,
    JournalDamagedError,
    JournalError,
    sync_folder,
)
from scheduler_svc.journal.log_check import LogDamagedError, check_log
from scheduler_svc.journal.records import (
    EndRecord,
    NewTokens,
    RequestRecord,
    SampleRecord,
    StoredRequest,
    TokensRecord,
    as_bytes,
    pack_step,
    pack_tokens,
    unpack_step,
)
from scheduler_svc.journal.schema import (
    APPLICATION_ID,
    SCHEMA_VERSION,
    add_checksum,
    create_tables,
    find_damage,
    insert,
    update_request,
)

_LOG = logging.getLogger(__name__)

PROBE_BYTES = 65536
"""A journal that could not be written is taken for usable only when this much can be written."""
_LOG_PAGES, _PAGE_BYTES = 256, 4096
"""The log moves into the database when it has so many pages: 1 MiB."""
_T = TypeVar("_T")


@dataclass(slots=True)
class JournalBatch:
    """Changes that are committed together, in this order."""

    deleted: list[int] = field(default_factory=list)
    """Numbers of requests."""
    admitted: list[RequestRecord] = field(default_factory=list)
    started: list[tuple[bytes, int]] = field(default_factory=list)
    """(content hash of the adapter, number); the hash is empty without an adapter."""
    rewritten: list[tuple[bytes, int, int]] = field(default_factory=list)
    """(fingerprint, vocabulary size, number) of requests whose tokens are stored from now on."""
    tokens: list[NewTokens] = field(default_factory=list)
    """Those without logprobs become one row together: a row for each would cost more than all the rest."""
    whole_tokens: list[NewTokens] = field(default_factory=list)
    """All tokens of unfinished samples, in place of what is stored of them."""
    drops_steps: bool = False
    """Whether `whole_tokens` has all unfinished samples without logprobs, so that their earlier rows are not needed."""
    samples: list[SampleRecord] = field(default_factory=list)
    ends: list[EndRecord] = field(default_factory=list)
    adapters: list[Mapping[str, str]] = field(default_factory=list)
    """At most one: the names and paths of operators' adapters, in place of those that are stored."""
    probe: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be committed."""
        return not any(getattr(self, each.name) for each in fields(self))


class JournalStore:
    """Runs all work on the database in one thread, in order. `open` comes first."""

    def __init__(self, path: Path, thread: Executor | None = None) -> None:
        """`thread`: runs the work, one after another; None: a thread of its own."""
        self._path = path
        self._thread = thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._database: sqlite3.Connection | None = None

    @property
    def path(self) -> Path:
        """The database file."""
        return self._path

    def open(self) -> None:
        """Open or create the database; raises JournalError."""
        self._thread.submit(self._open).result()

    def load(self) -> Future[tuple[list[StoredRequest], int]]:
        """Read all requests, in order of arrival, and the largest number that was ever used."""
        return self._thread.submit(self._in_transaction, _load)

    def load_adapters(self) -> Future[list[tuple[str, str]]]:
        """Read the names and paths of operators' adapters, in the order in which they were loaded."""
        return self._thread.submit(self._in_transaction, _load_adapters)

    def commit(self, batch: JournalBatch) -> Future[None]:
        """Make a batch durable; the result is an sqlite3.Error if that failed, and then nothing of it is there."""
        return self._thread.submit(self._commit, batch)

    def close(self) -> None:
        """Finish what was begun, and close the database."""
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    def _open(self) -> None:
        try:
            self._check_log()
            if not self._path.exists():
                self._create()
            for suffix in DATABASE_SUFFIXES:
                make_private(Path(f"{self._path}{suffix}"))
            database = self._database = sqlite3.connect(self._path, isolation_level=None)
            add_checksum(database)
            self._check_file(database)
            # FULL: a commit is on the disk when it returns, so a power failure loses nothing that was shown.
            for setting in (
                "journal_mode = WAL", "synchronous = FULL", "temp_store = MEMORY",
                f"wal_autocheckpoint = {_LOG_PAGES}", f"journal_size_limit = {_LOG_PAGES * _PAGE_BYTES}",
            ):  # fmt: skip
                database.execute(f"PRAGMA {setting}")
        except JournalError:
            self._close()
            raise
        except OSError as exc:
            raise JournalError(f"{self._path}: {exc.strerror}") from exc
        except sqlite3.OperationalError as exc:  # such as a directory that cannot be written
            self._close()
            raise JournalError(f"{self._path}: {exc}") from exc
        except sqlite3.Error as exc:
            self._close()
            raise JournalDamagedError(f"{self._path}: {exc}") from exc

    def _check_log(self) -> None:
        """SQLite would go on without what it cannot read of the log, and delete a log without a database."""
        log, index = (_content(Path(f"{self._path}{suffix}")) for suffix in ("-wal", "-shm"))
        if self._path.exists() and not self._path.stat().st_size:
            raise JournalDamagedError(f"{self._path}: is empty")
        if log and not self._path.exists():
            raise JournalDamagedError(f"{self._path}: is gone, and its log is there")
        try:
            if check_log(log, index):
                _LOG.warning(
                    "the journal %s ends in a commit that was not finished, as a crash leaves it: it is left out, and "
                    "nothing of it was shown", self._path.parent,
                )  # fmt: skip
        except LogDamagedError as exc:
            raise JournalDamagedError(f"{self._path}-wal: is damaged: {exc}") from exc

    def _create(self) -> None:
        """Make the database whole or not at all."""
        draft = Path(f"{self._path}.new")
        for suffix in (*DATABASE_SUFFIXES, "-journal"):
            Path(f"{draft}{suffix}").unlink(missing_ok=True)
        os.close(open_private(str(draft), os.O_RDWR | os.O_CREAT))
        with closing(sqlite3.connect(draft, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            create_tables(database)
        draft.replace(self._path)
        sync_folder(self._path.parent)

    def _check_file(self, database: sqlite3.Connection) -> None:
        version, kind = _number(database, "user_version"), _number(database, "application_id")
        if kind != APPLICATION_ID:
            raise JournalError(f"{self._path}: is a database of another program")
        if version != SCHEMA_VERSION:
            raise JournalError(
                f"{self._path}: has version {version}, and this scheduler reads version {SCHEMA_VERSION}: finish its "
                "requests with the scheduler that wrote it, or name another directory"
            )
        damage = find_damage(database)
        if damage:
            raise JournalDamagedError(f"{self._path}: is damaged: {damage}")

    def _commit(self, batch: JournalBatch) -> None:
        if batch.probe and self._database is not None:
            # The log itself may be what fills the disk: what it holds moves into the database, and it becomes empty.
            with suppress(sqlite3.Error):
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._in_transaction(lambda database: _write(database, batch))

    def _in_transaction(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        database = self._database
        if database is None:
            raise sqlite3.ProgrammingError("the journal is closed")
        database.execute("BEGIN IMMEDIATE")
        try:
            result = work(database)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:  # some errors have rolled back already
                database.execute("ROLLBACK")
            raise
        return result

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _write(database: sqlite3.Connection, batch: JournalBatch) -> None:
    for number in batch.deleted:
        for table in ("requests", "tokens", "samples", "ends"):
            database.execute(f"DELETE FROM {table} WHERE number = ?", (number,))
    _insert(database, "requests", RequestRecord, batch.admitted, started=0, adapter_hash=b"")
    database.executemany(
        update_request(started="1", adapter_hash="?2"), [(number, adapter) for adapter, number in batch.started]
    )
    database.executemany(
        update_request(stores_tokens="1", fingerprint="?2", vocab_size="?3"),
        [(number, fingerprint, size) for fingerprint, size, number in batch.rewritten],
    )
    _write_tokens(database, batch)
    _insert(database, "samples", SampleRecord, batch.samples)
    database.executemany(
        "DELETE FROM tokens WHERE number = ? AND sample_index = ?",
        [(sample.number, sample.sample_index) for sample in batch.samples],
    )
    _insert(database, "ends", EndRecord, batch.ends)
    for adapters in batch.adapters:
        database.execute("DELETE FROM adapters")
        database.executemany(insert("adapters", "name", "path"), adapters.items())
    if batch.probe:
        database.execute("INSERT OR REPLACE INTO probe VALUES (1, zeroblob(?))", (PROBE_BYTES,))
        database.execute("DELETE FROM probe")


def _write_tokens(database: sqlite3.Connection, batch: JournalBatch) -> None:
    plain = [row for row in batch.tokens if row[4] == b""]
    if batch.drops_steps:
        database.execute("DELETE FROM steps")
    elif plain:
        database.execute(insert("steps", "content"), (pack_step(plain),))
    for row in batch.whole_tokens:
        database.execute("DELETE FROM tokens WHERE number = ? AND sample_index = ?", row[:2])
    rows = [*(row for row in batch.tokens if row[4] != b""), *batch.whole_tokens]
    if rows:
        database.executemany(
            insert("tokens", *(each.name for each in fields(TokensRecord))),
            ((*row[:3], pack_tokens(row[3]), as_bytes(row[4])) for row in rows),
        )


def _insert(
    database: sqlite3.Connection, table: str, kind: type[Any], rows: Sequence[Any], **others: int | bytes
) -> None:
    """others: columns that the records do not have, with their values."""
    if rows:
        names = (*(each.name for each in fields(kind)), *others)
        more = tuple(others.values())
        database.executemany(insert(table, *names), (_values(row) + more for row in rows))


def _values(row: Any) -> tuple[Any, ...]:
    values = (getattr(row, name) for name in row.__slots__)
    return tuple(value() if callable(value) else value for value in values)


def _load(database: sqlite3.Connection) -> tuple[list[StoredRequest], int]:
    """All requests in order of arrival, and the largest number that was ever used."""
    found: dict[int, StoredRequest] = {}
    for row in _rows(database, "requests", RequestRecord, "number", more=("started", "adapter_hash")):
        *values, started, adapter_hash = row
        admission = RequestRecord(*values)
        found[admission.number] = StoredRequest(admission, bool(started), adapter_hash)
    for row in _rows(database, "ends", EndRecord, "number"):
        found[row[0]].end = EndRecord(*row)
    for row in _rows(database, "samples", SampleRecord, "number, sample_index"):
        found[row[0]].samples[row[1]] = SampleRecord(*row)
    for row in _rows(database, "tokens", TokensRecord, "number, sample_index, first_token"):
        found[row[0]].tokens.setdefault(row[1], []).append(TokensRecord(*row))
    last = max(found, default=0)
    for (content,) in database.execute("SELECT content FROM steps ORDER BY step"):
        for part in unpack_step(content):
            last = max(last, part.number)
            # What has finished or was deleted since is not in the way.
            request = found.get(part.number)
            if request is not None and part.sample_index not in request.samples:
                request.tokens.setdefault(part.sample_index, []).append(part)
    return list(found.values()), last


def _load_adapters(database: sqlite3.Connection) -> list[tuple[str, str]]:
    return database.execute("SELECT name, path FROM adapters ORDER BY rowid").fetchall()


def _rows(
    database: sqlite3.Connection, table: str, kind: type[Any], order: str, more: tuple[str, ...] = ()
) -> Iterable[tuple[Any, ...]]:
    names = ", ".join((*(each.name for each in fields(kind)), *more))
    return database.execute(f"SELECT {names} FROM {table} ORDER BY {order}")


def _number(database: sqlite3.Connection, pragma: str) -> int:
    return int(database.execute(f"PRAGMA {pragma}").fetchone()[0])


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
