"""Damaged journals: each byte of each file is flipped once, each length cut once. None is taken without a word."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from scheduler_svc.journal.directory import DATABASE_SUFFIXES, JournalDamagedError, JournalDirectory, JournalError
from scheduler_svc.journal.journal import SchedulerJournal
from scheduler_svc.journal.log_check import LogDamagedError, check_log
from scheduler_svc.journal.schema import APPLICATION_ID, SCHEMA_VERSION, add_checksum, find_damage
from scheduler_svc.journal.store import JournalBatch, JournalStore, _load, _load_adapters
from scheduler_svc.plan_loop.clock import SystemClock
from tests.helpers.scheduler.journals import admission, end, new_tokens, opened_store, sample, stored

pytestmark = pytest.mark.slow

_PAGE_BYTES = 512
"""The smallest of SQLite, so that there are few bytes to flip."""
_LOG_HEADER, _FRAME = 32, 24 + _PAGE_BYTES


def _batches() -> list[JournalBatch]:
    return [
        JournalBatch(admitted=[admission(1), admission(2, stores_tokens=True)], started=[(b"", 1), (b"hash", 2)]),
        JournalBatch(tokens=[new_tokens(2, 0, [5, 6])], samples=[sample(1, [8, 9])], ends=[end(1)]),
        JournalBatch(tokens=[new_tokens(2, 2, [7])], adapters=[{"red": "/adapters/red"}]),
    ]


def _empty(folder: Path) -> None:
    """A journal with small pages."""
    opened_store(folder).close()
    with closing(sqlite3.connect(folder / "journal.sqlite", isolation_level=None)) as database:
        for statement in (
            "PRAGMA journal_mode = DELETE", f"PRAGMA page_size = {_PAGE_BYTES}", "VACUUM", "PRAGMA journal_mode = WAL"
        ):  # fmt: skip
            database.execute(statement)


def _files(folder: Path) -> list[bytes]:
    paths = [folder / f"journal.sqlite{suffix}" for suffix in DATABASE_SUFFIXES]
    return [path.read_bytes() if path.exists() else b"" for path in paths]


def _put(folder: Path, database: bytes, log: bytes = b"", index: bytes = b"") -> Path:
    """Files of a journal, in place of others."""
    for suffix, content in zip(DATABASE_SUFFIXES, (database, log, index), strict=True):
        path = folder / f"journal.sqlite{suffix}"
        path.unlink(missing_ok=True)
        if content:
            path.write_bytes(content)
    return folder


def _flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes((content[at] ^ (1 << at % 8),)) + content[at + 1 :]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Database, log and index as a killed process leaves them; the log has three commits."""
    folder = tmp_path_factory.mktemp("killed")
    _empty(folder)
    store = opened_store(folder)
    for batch in _batches():
        store.commit(batch).result()
    files = _files(folder)
    store.close()
    return files


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory, killed: list[bytes]) -> bytes:
    """The database after a clean end, with all that the log had."""
    folder = _put(tmp_path_factory.mktemp("closed"), *killed)
    opened_store(folder).close()
    database, log, index = _files(folder)
    assert (log, index) == (b"", b"")
    return database


def _verdict(log: bytes, index: bytes) -> str:
    try:
        return "unfinished" if check_log(log, index) else "whole"
    except LogDamagedError:
        return "damaged"


def _commits(log: bytes) -> list[int]:
    """The lengths of the log after each commit."""
    frames = range(_LOG_HEADER, len(log), _FRAME)
    return [at + _FRAME for at in frames if log[at + 4 : at + 8] != bytes(4)]


def test_every_flipped_byte_of_a_log_is_damage(killed: list[bytes]) -> None:
    """With the index that its process left; without it, the last page may also be a commit that was not finished."""
    _, log, index = killed
    assert _verdict(log, index) == _verdict(log, b"") == "whole"
    last = len(log) - _FRAME
    for at in range(len(log)):
        flipped = _flipped(log, at)
        assert _verdict(flipped, index) == "damaged", at
        assert _verdict(flipped, b"") == ("unfinished" if at >= last else "damaged"), at


def test_every_cut_length_of_a_log_is_damage(killed: list[bytes]) -> None:
    _, log, index = killed
    first, second, third = _commits(log)
    assert third == len(log)
    for length in range(len(log)):
        assert _verdict(log[:length], index) == "damaged", length
        if 0 < length < _LOG_HEADER + _FRAME:
            assert _verdict(log[:length], b"") == "damaged", length
        elif length not in (0, first, second):
            assert _verdict(log[:length], b"") == "unfinished", length


def test_every_flipped_byte_and_cut_length_of_an_index_changes_nothing(killed: list[bytes]) -> None:
    """SQLite makes it anew from the log; here it is a witness, which may be absent."""
    _, log, index = killed
    for at in range(200):
        assert _verdict(log, _flipped(index, at)) == _verdict(log, index[:at]) == "whole"


def test_what_a_crash_leaves_is_no_damage(killed: list[bytes], tmp_path: Path) -> None:
    """The log in the middle of a commit, whose end its process has not seen: the index is of the commit before."""
    store = opened_store(_put(tmp_path, *killed[:1]))
    fresh = _files(tmp_path)[2]
    logs = []
    for batch in _batches():
        store.commit(batch).result()
        logs.append(_files(tmp_path)[1:])
    store.close()
    log = logs[-1][0]
    for length in range(1, len(logs[0][0])):  # nothing was committed before: a header, or not even that
        assert _verdict(log[:length], fresh) in ("unfinished", "whole"), length
    for (earlier, index), (later, _) in pairwise(logs):
        for length in range(len(earlier) + 1, len(later), 7):
            assert _verdict(later[:length], index) == "unfinished", length
            assert _verdict(later[:length] + bytes(len(later) - length), b"") == "unfinished", length


def test_pages_of_an_earlier_log_behind_a_new_one_are_no_damage(tmp_path: Path) -> None:
    store = opened_store(tmp_path)
    log = tmp_path / "journal.sqlite-wal"
    for number in range(300):  # more than the log may have: it begins anew in the same file
        store.commit(JournalBatch(admitted=[admission(number, body=bytes(4000))])).result()
        content, index = _files(tmp_path)[1:]
        assert _verdict(content, index) == "whole"
        if int.from_bytes(content[12:16]) >= 1:
            break
    assert log.stat().st_size > _LOG_HEADER + 4 * 4120
    assert _verdict(content, b"") == "whole"
    assert _verdict(_flipped(content, 100), index) == "damaged"
    store.close()


def test_pages_of_a_commit_that_failed_behind_a_later_one_are_no_damage(tmp_path: Path) -> None:
    """They are of the same log, each follows the one before, and none is the last of a commit."""
    store = opened_store(tmp_path)
    store.commit(JournalBatch(admitted=[admission(1)])).result()
    whole = (tmp_path / "journal.sqlite-wal").stat().st_size
    store.commit(JournalBatch(admitted=[admission(number, body=bytes(9000)) for number in range(2, 9)])).result()
    database, log, _ = _files(tmp_path)
    store.close()
    cut = log[: len(log) - 4120]  # without the last page of the second commit
    again = tmp_path / "again"
    again.mkdir()
    store = opened_store(_put(again, database, cut))
    store.commit(JournalBatch(admitted=[admission(2)])).result()
    later, index = _files(again)[1:]
    assert whole < len(later) == len(cut)
    assert _verdict(later, index) == _verdict(later, b"") == "unfinished"
    store.close()


def _content(database: sqlite3.Connection) -> object:
    return _load(database), _load_adapters(database)


def _read(content: bytes) -> object:
    """What a database in memory holds, or "damaged" if the scheduler refuses it."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        add_checksum(database)
        try:
            database.deserialize(content)
            about = [database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
            if about != [APPLICATION_ID, SCHEMA_VERSION] or find_damage(database):
                return "damaged"
        except sqlite3.Error:
            return "damaged"
        return _content(database)


def test_every_flipped_byte_of_a_database_is_damage_or_changes_nothing(closed: bytes) -> None:
    plain = closed[:18] + b"\1\1" + closed[20:]  # SQLite reads no log for a database in memory
    whole = _read(plain)
    assert whole != "damaged"
    found = [_read(_flipped(plain, at)) for at in range(len(plain))]
    assert {at for at, content in enumerate(found) if content not in ("damaged", whole)} == set()
    assert sum(content == "damaged" for content in found) > len(plain) / 4


def test_every_cut_length_of_a_database_is_damage_or_changes_nothing(closed: bytes) -> None:
    plain = closed[:18] + b"\1\1" + closed[20:]
    whole = _read(plain)
    for length in range(1, len(plain), 31):
        assert _read(plain[:length]) in ("damaged", whole), length


@pytest.mark.parametrize("with_log", [False, True])
def test_every_flipped_byte_of_a_databases_header_is_refused_or_changes_nothing(
    killed: list[bytes], closed: bytes, tmp_path: Path, with_log: bool
) -> None:
    """From the files, as the scheduler opens them: the header says whether there is a log, and how large pages are."""
    database, log, index = killed if with_log else (closed, b"", b"")
    whole = [each.admission.number for each in stored(_put(tmp_path, database, log, index))]
    assert whole == [1, 2]
    for at in range(100):
        _put(tmp_path, _flipped(database, at), log, index)
        with suppress(JournalError):
            assert [each.admission.number for each in stored(tmp_path)] == whole, at


@pytest.mark.parametrize("gone", [(0,), (1,), (0, 1)])
def test_an_empty_or_missing_file_is_damage(killed: list[bytes], tmp_path: Path, gone: tuple[int, ...]) -> None:
    files = [b"" if index in gone else content for index, content in enumerate(killed)]
    with pytest.raises(JournalDamagedError, match=r"journal.sqlite(-wal: is damaged: is empty or|: is) gone"):
        opened_store(_put(tmp_path, *files))
    for index in gone:
        (tmp_path / f"journal.sqlite{DATABASE_SUFFIXES[index]}").write_bytes(b"")
    with pytest.raises(JournalDamagedError, match=r"is empty"):
        opened_store(tmp_path)


def test_an_unfinished_commit_is_said(killed: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database, log, _ = killed
    with caplog.at_level(logging.WARNING):
        assert len(stored(_put(tmp_path, database, log[:-1]))) == 2
    (record,) = caplog.records
    assert f"the journal {tmp_path} ends in a commit that was not finished" in record.message


def test_a_damaged_journal_is_refused_or_set_aside(
    killed: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice: the second one goes to a folder of its own. What is there next is an empty journal that can be used."""
    clock = SystemClock()
    for number in (1, 2):
        damaged = [killed[0], _flipped(killed[1], 17), killed[2]]
        _put(tmp_path, *damaged)
        with pytest.raises(JournalError, match=r"-wal: is damaged: its header is not valid; to start with an empty "):
            SchedulerJournal(str(tmp_path), clock, restart_grace_s=1)
        assert _files(tmp_path) == damaged
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            journal = SchedulerJournal(str(tmp_path), clock, restart_grace_s=1, sets_aside=True)
        assert journal._store.load().result() == ([], 0)
        journal._store.close()
        journal.unlock()
        folder = tmp_path / f"damaged-{number}"
        assert _files(folder) == damaged
        assert folder.stat().st_mode & 0o777 == 0o700
        (record,) = caplog.records
        assert record.message.endswith(f"-wal: is damaged: its header is not valid: moved to {folder}, and begun anew")


def test_every_flipped_byte_and_cut_length_of_an_id_is_refused_or_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "scheduler-id"
    JournalDirectory(str(tmp_path)).close()
    whole = path.read_bytes()
    spoiled = [*(_flipped(whole, at) for at in range(len(whole))), *(whole[:length] for length in range(len(whole)))]
    for content in spoiled:
        path.write_bytes(content)
        with pytest.raises(JournalDamagedError, match="not a scheduler's id; delete this file to draw a new one; "):
            JournalDirectory(str(tmp_path))
    opened_store(tmp_path).close()
    again = JournalDirectory(str(tmp_path), sets_aside=True)
    again.close()
    assert (tmp_path / "damaged-1" / "scheduler-id").read_bytes() == spoiled[-1]
    assert path.read_text().split()[0] == again.scheduler_id
    assert (tmp_path / "journal.sqlite").exists()


def test_files_of_a_folder_made_beforehand_are_the_owners_alone(killed: list[bytes], tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for name, content in zip(("", "-wal", "-shm"), killed, strict=True):
        (tmp_path / f"journal.sqlite{name}").write_bytes(content)
    (tmp_path / "lock").write_text("")
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    journal = SchedulerJournal(str(tmp_path), SystemClock(), restart_grace_s=1)
    journal._store.commit(JournalBatch(admitted=[admission(5)])).result()
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(
        ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm", "lock", "scheduler-id"), 0o600
    )
    journal._store.close()
    journal.unlock()


def test_a_database_that_cannot_be_made_leaves_no_half_of_one(tmp_path: Path) -> None:
    """What a crash left of its draft is not in the way."""
    for suffix in DATABASE_SUFFIXES:
        (tmp_path / f"journal.sqlite.new{suffix}").write_bytes(b"half of a database")
    store = JournalStore(tmp_path / "journal.sqlite")
    store.open()
    assert store.load().result() == ([], 0)
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["journal.sqlite"]
