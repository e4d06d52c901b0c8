"""The journal's database: batches that are whole or not there, and files that it refuses or recovers."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from scheduler_svc.journal.directory import JournalError
from scheduler_svc.journal.store import JournalBatch, JournalStore
from tests.helpers.scheduler.journals import (
    HeldThread,
    admission,
    end,
    new_tokens,
    opened_store,
    sample,
    stored,
    tokens,
)


def test_what_is_committed_is_there_in_order_of_arrival(tmp_path: Path) -> None:
    store = opened_store(tmp_path)
    store.commit(JournalBatch(admitted=[admission(2), admission(1, stores_tokens=True)], started=[(b"", 1)])).result()
    store.commit(JournalBatch(tokens=[new_tokens(1, 0, [5, 6])])).result()
    store.commit(JournalBatch(tokens=[new_tokens(1, 2, [7])], samples=[sample(2, [8, 9])], ends=[end(2)])).result()
    store.close()
    first, second = stored(tmp_path)
    assert (first.admission, second.admission) == (admission(1, stores_tokens=True), admission(2))
    assert (first.started, second.started) == (True, False)
    assert first.tokens == {0: [tokens(1, 0, [5, 6]), tokens(1, 2, [7])]}
    assert (second.samples, second.end, first.end) == ({0: sample(2, [8, 9])}, end(2), None)


def test_a_finished_sample_replaces_its_tokens_and_a_deleted_request_leaves_nothing(tmp_path: Path) -> None:
    store = opened_store(tmp_path)
    store.commit(
        JournalBatch(admitted=[admission(1), admission(2)], tokens=[new_tokens(1, 0, [5]), new_tokens(1, 0, [6], 1)])
    ).result()
    store.commit(JournalBatch(samples=[sample(1, [5, 7])], ends=[end(2)])).result()
    (first, _) = store.load().result()[0]
    assert first.tokens == {1: [tokens(1, 0, [6], 1)]}
    store.commit(JournalBatch(deleted=[1, 2])).result()
    assert store.load().result()[0] == []
    store.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        for table in ("requests", "tokens", "samples", "ends"):
            assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    database.close()


def test_a_request_that_is_admitted_again_has_shown_nothing(tmp_path: Path) -> None:
    store = opened_store(tmp_path)
    store.commit(JournalBatch(admitted=[admission(1)], started=[(b"", 1)])).result()
    store.commit(JournalBatch(admitted=[admission(1, fingerprint=b"other")])).result()
    (found,) = store.load().result()[0]
    assert (found.admission.fingerprint, found.started) == (b"other", False)
    store.close()


def test_a_torn_tail_loses_only_the_batch_that_was_not_committed(tmp_path: Path) -> None:
    """As after a power failure in the middle of a write: the log is cut at every length from the last batch on."""
    store = opened_store(tmp_path)
    store.commit(JournalBatch(admitted=[admission(1)])).result()
    log = tmp_path / "journal.sqlite-wal"
    whole = log.stat().st_size
    store.commit(JournalBatch(admitted=[admission(2)])).result()
    lengths = [*range(whole, log.stat().st_size, 1031), log.stat().st_size - 1, log.stat().st_size]
    found = []
    for index, length in enumerate(lengths):
        copy = tmp_path / f"copy {index}"
        copy.mkdir()
        shutil.copy(tmp_path / "journal.sqlite", copy)
        (copy / log.name).write_bytes(log.read_bytes()[:length])
        found.append([each.admission.number for each in stored(copy)])
        after = opened_store(copy)
        after.commit(JournalBatch(admitted=[admission(3)])).result()
        after.close()
        assert [each.admission.number for each in stored(copy)] == [*found[-1], 3]
    assert found == [[1]] * (len(lengths) - 1) + [[1, 2]]
    store.close()


def test_a_torn_tail_with_other_bytes_behind_it_is_not_taken_for_a_batch(tmp_path: Path) -> None:
    store = opened_store(tmp_path)
    store.commit(JournalBatch(admitted=[admission(1)])).result()
    log = tmp_path / "journal.sqlite-wal"
    whole = log.stat().st_size
    store.commit(JournalBatch(admitted=[admission(2)])).result()
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(tmp_path / "journal.sqlite", copy)
    content = bytearray(log.read_bytes())
    content[whole + 100] ^= 1
    (copy / log.name).write_bytes(content)
    assert [each.admission.number for each in stored(copy)] == [1]
    store.close()


def test_a_journal_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    opened_store(tmp_path).close()
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 7")
    database.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"journal.sqlite: has version 7, and this scheduler reads version 3: "):
        opened_store(tmp_path)
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        database.execute("CREATE TABLE bookmarks (url TEXT)")
    database.close()
    with pytest.raises(JournalError, match="is a database of another program"):
        opened_store(tmp_path)


def test_a_damaged_file_is_a_clear_error(tmp_path: Path) -> None:
    store = opened_store(tmp_path)
    for number in range(1, 40):
        store.commit(JournalBatch(admitted=[admission(number, body=bytes(3000))])).result()
    store.close()
    path = tmp_path / "journal.sqlite"
    content = bytearray(path.read_bytes())
    content[4096:12288] = b"\xa5" * 8192
    path.write_bytes(content)
    with pytest.raises(JournalError, match=r"journal.sqlite: .+; to start with an empty journal, move its directory"):
        opened_store(tmp_path)
    path.write_bytes(b"no database at all" * 1000)
    with pytest.raises(JournalError, match="file is not a database; to start"):
        opened_store(tmp_path)


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"nowhere/journal.sqlite: No such file or directory$"):
        JournalStore(tmp_path / "nowhere" / "journal.sqlite").open()


def test_a_full_disk_leaves_the_batch_out_and_all_before_it_in(tmp_path: Path) -> None:
    """SQLite reports a full disk by the same error when the database has its maximum number of pages."""
    store = opened_store(tmp_path, HeldThread())
    store.commit(JournalBatch(admitted=[admission(1)])).result()
    assert store._database is not None
    (num_pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {num_pages + 2}")
    with pytest.raises(sqlite3.OperationalError, match="database or disk is full"):
        store.commit(JournalBatch(admitted=[admission(2), admission(3, body=bytes(100_000))])).result()
    assert [each.admission.number for each in store.load().result()[0]] == [1]
    with pytest.raises(sqlite3.OperationalError, match="database or disk is full"):
        store.commit(JournalBatch(probe=True)).result()
    store._database.execute("PRAGMA max_page_count = 1000000")
    store.commit(JournalBatch(admitted=[admission(2)], probe=True)).result()
    store.close()
    assert [each.admission.number for each in stored(tmp_path)] == [1, 2]


def test_a_log_that_fills_the_disk_moves_into_the_database(tmp_path: Path) -> None:
    """What a journal writes after a failure: the log is empty before it."""
    store = opened_store(tmp_path)
    log = tmp_path / "journal.sqlite-wal"
    for number in range(20):
        store.commit(JournalBatch(admitted=[admission(number)])).result()
        store.commit(JournalBatch(deleted=[number])).result()
    grown = log.stat().st_size
    store.commit(JournalBatch(admitted=[admission(20)], probe=True)).result()
    assert log.stat().st_size < grown / 2
    for number in range(21, 1200):
        store.commit(JournalBatch(admitted=[admission(number)], deleted=[number - 1])).result()
    assert log.stat().st_size < 1.3 * 2**20
    store.close()
