"""The tables of a journal. Each row has a checksum, for SQLite has none: a flipped bit of a blob reads as well."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache
from zlib import crc32

APPLICATION_ID = 0x43414A4E
"""Identifies the file as a journal of this service; SQLite keeps it in the file's header."""
SCHEMA_VERSION = 3
_SCHEMA = """
CREATE TABLE requests (
  number INTEGER PRIMARY KEY, tenant TEXT NOT NULL, request_id TEXT NOT NULL, body BLOB NOT NULL,
  body_digest BLOB NOT NULL, prompt_token_ids BLOB NOT NULL, seed BLOB NOT NULL, end_token_ids BLOB NOT NULL,
  fingerprint BLOB NOT NULL, vocab_size INTEGER NOT NULL, stores_tokens INTEGER NOT NULL, arrived_ns INTEGER NOT NULL,
  deadline_ns INTEGER, resume_grace_s REAL NOT NULL, started INTEGER NOT NULL, adapter_hash BLOB NOT NULL,
  checksum INTEGER NOT NULL);
CREATE TABLE tokens (
  number INTEGER, sample_index INTEGER, first_token INTEGER, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
  checksum INTEGER NOT NULL, PRIMARY KEY (number, sample_index, first_token)) WITHOUT ROWID;
CREATE TABLE steps (step INTEGER PRIMARY KEY, content BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE samples (
  number INTEGER, sample_index INTEGER, finish_detail INTEGER NOT NULL, stop_token_id INTEGER, stop_string TEXT,
  num_tokens INTEGER NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL, cumulative_logprob REAL NOT NULL,
  checksum INTEGER NOT NULL, PRIMARY KEY (number, sample_index));
CREATE TABLE ends (
  number INTEGER PRIMARY KEY, ended_ns INTEGER NOT NULL, error TEXT NOT NULL, stats BLOB NOT NULL,
  prompt_logprobs BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE adapters (name TEXT PRIMARY KEY, path TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE probe (number INTEGER PRIMARY KEY, content BLOB NOT NULL);
"""
_UNSUMMED = ("checksum", "step")
"""The number of a step is drawn as its row is written, and only its order counts: SQLite's own check looks at it."""
_SCHEMA_ROWS = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"


def create_tables(database: sqlite3.Connection) -> None:
    """Make an empty database a journal."""
    database.executescript(
        f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA application_id = {APPLICATION_ID}; "
        f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )


def add_checksum(database: sqlite3.Connection) -> None:
    """Give the connection the SQL function `checksum`."""
    database.create_function("checksum", -1, _checksum, deterministic=True)


def insert(table: str, *columns: str) -> str:
    """The statement that inserts a row, or replaces it; columns: all but its checksum, in their order."""
    places = ", ".join(f"?{index + 1}" for index in range(len(columns)))
    return f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}, checksum) VALUES ({places}, checksum({places}))"


def update_request(**changes: str) -> str:
    """The statement that changes columns of requests to SQL values, where the number is ?1."""
    settings = ", ".join(f"{column} = {value}" for column, value in changes.items())
    values = ", ".join(changes.get(column, column) for column in _summed_columns()["requests"])
    return f"UPDATE requests SET {settings}, checksum = checksum({values}) WHERE number = ?1"


def find_damage(database: sqlite3.Connection) -> str:
    """What is wrong with a journal's content; empty: nothing. Reads all of it."""
    try:
        return _find_damage(database)
    except (sqlite3.Error, UnicodeDecodeError) as exc:  # names and messages of SQLite may quote what is damaged
        return str(exc)


def _find_damage(database: sqlite3.Connection) -> str:
    (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        return " ".join(found.split())
    if database.execute(_SCHEMA_ROWS).fetchall() != _expected_schema()[0]:
        return "its tables are not those of a journal"
    for table, columns in _summed_columns().items():
        wrong = f"SELECT count(*) FROM {table} WHERE checksum IS NOT checksum({', '.join(columns)})"
        (number,) = database.execute(wrong).fetchone()
        if number:
            return f"rows of the table {table} with a wrong checksum: {number}"
    return ""


def _summed_columns() -> dict[str, list[str]]:
    """The columns that the checksum of each table is made of, in their order."""
    return _expected_schema()[1]


@cache
def _expected_schema() -> tuple[list[tuple[str, ...]], dict[str, list[str]]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        create_tables(database)
        rows = database.execute(_SCHEMA_ROWS).fetchall()
        columns: dict[str, list[str]] = {}
        for kind, table, *_ in rows:
            names = [name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")]
            if kind == "table" and "checksum" in names:
                columns[table] = [name for name in names if name not in _UNSUMMED]
        return rows, columns


def _checksum(*values: bytes | str | float | None) -> int:
    """A CRC of a row's values, each with its type and length: it sees every change of 32 bits in a row or fewer."""
    total = 0
    for value in values:
        if isinstance(value, bytes):
            total = crc32(value, crc32(b"blob %d," % len(value), total))
        else:
            # SQLite may return 5 where 5.0 was stored, and the other way around.
            whole = int(value) if isinstance(value, float) and value.is_integer() else value
            total = crc32(b"%a," % (whole,), total)
    return total
