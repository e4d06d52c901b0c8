"""Readers of workload files: JSON lines, a JSON list, ShareGPT's conversations, and traces as CSV; record by record.

Every reader yields (place, record); the place is a line or a list entry, counted from 1.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.workloads.records import FIELDS, Record, problem_of

Records = Iterator[tuple[str, Record]]
_TRACES: tuple[dict[str, str], ...] = (
    # https://github.com/Azure/AzurePublicDataset/blob/master/AzureLLMInferenceDataset2023.md
    {"TIMESTAMP": "timestamp", "ContextTokens": "prompt_tokens", "GeneratedTokens": "output_len"},
    # https://github.com/HPMLL/BurstGPT
    {"Timestamp": "timestamp", "Request tokens": "prompt_tokens", "Response tokens": "output_len", "Model": "kind"},
)
"""Public traces, identified by these columns; their other columns are not read."""
_MOONCAKE = {"input_length": "prompt_tokens", "output_length": "output_len", "hash_ids": "block_ids"}
"""Fields of Mooncake's traces beside `timestamp`, in milliseconds:
https://github.com/kvcache-ai/Mooncake/blob/main/FAST25-release/README.md"""


def read_records(path: Path) -> Records:
    """All records of a file, whose format is detected from its beginning; only a JSON list is held in memory.

    Raises, when the record is read, a LoadTestError that names file, line or entry, and field.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _records(path, file)
    except OSError as error:
        raise LoadTestError(f"workload {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise LoadTestError(f"workload {path}: this is not UTF-8 text: {error}") from None


def _records(path: Path, file: TextIO) -> Records:
    first = _first_line(file)
    if first.startswith("["):
        return _list_records(path, file)
    if first.startswith("{"):
        if _has(first, "conversations"):
            return _conversation_lines(path, file)
        return _mooncake_lines(path, file) if _has(first, "input_length") else _line_records(path, file)
    if not first:
        raise LoadTestError(f"workload {path}: the file is empty")
    return _csv_records(path, file)


def _first_line(file: TextIO) -> str:
    """The first non-blank line; the file is rewound afterwards."""
    for line in iter(file.readline, ""):
        if line.strip():
            file.seek(0)
            return line.strip()
    return ""


def _line_records(path: Path, file: TextIO) -> Records:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            yield place, Record.model_validate_json(line, strict=True)
        except ValidationError as error:
            raise _error(path, place, problem_of(error)) from None


def _mooncake_lines(path: Path, file: TextIO) -> Records:
    """A request without output has failed, and is left out as in the other traces."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        place = f"line {number}"
        entry = _json_object(path, place, line)
        missing = next((name for name in ("timestamp", "input_length", "output_length") if name not in entry), None)
        if missing is not None:
            raise _error(path, place, f"{missing} is missing")
        values = {_MOONCAKE.get(name, name): value for name, value in entry.items() if name in _MOONCAKE}
        if 0 in (values["prompt_tokens"], values["output_len"]):
            continue
        stamp = entry["timestamp"]
        if isinstance(stamp, bool) or not isinstance(stamp, int | float):
            raise _error(path, place, f"timestamp: must be milliseconds, not {stamp!r:.40}")
        try:
            yield place, Record.model_validate(values | {"timestamp": stamp / 1000}, strict=True)
        except ValidationError as error:
            raise _error(path, place, problem_of(error)) from None


def _list_records(path: Path, file: TextIO) -> Records:
    try:
        entries = json.load(file)
    except (ValueError, RecursionError) as error:
        raise LoadTestError(f"workload {path}: this is not JSON: {error}") from None
    if not entries:
        raise LoadTestError(f"workload {path}: the list must have at least one request")
    for number, entry in enumerate(entries, 1):
        place = f"entry {number}"
        if not isinstance(entry, dict):
            raise _error(path, place, f"must be an object, not {type(entry).__name__}")
        if "conversations" in entry:
            yield from _conversation(place, entry)
            continue
        try:
            yield place, Record.model_validate(entry, strict=True)
        except ValidationError as error:
            raise _error(path, place, problem_of(error)) from None


def _conversation_lines(path: Path, file: TextIO) -> Records:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        place = f"line {number}"
        entry = _json_object(path, place, line)
        if "conversations" not in entry:
            raise _error(path, place, "conversations is missing")
        yield from _conversation(place, entry)


def _json_object(path: Path, place: str, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _error(path, place, f"this is not JSON: {error}") from None
    return entry if isinstance(entry, dict) else {}


def _conversation(place: str, entry: dict[str, Any]) -> Records:
    """The first human message, as in {"conversations": [{"from": "human", "value": …}, …]}.

    The published data has conversations that are empty or begin in the middle: those are left out.
    """
    turns = entry["conversations"]
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict) and first.get("from") in ("human", "user") and isinstance(first.get("value"), str):
        text = first["value"]
        if text.strip():
            yield place, Record(prompt=text)


def _has(line: str, name: str) -> bool:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and name in entry


def _csv_records(path: Path, file: TextIO) -> Records:
    rows = csv.reader(file)
    try:
        header = next(row for row in rows if row)
        names, is_trace = _columns(path, header)
        for row in rows:
            if not row:
                continue
            place = f"line {rows.line_num}"
            if len(row) != len(header):
                raise _error(path, place, f"has {len(row)} columns, the header {len(header)}")
            values = {name: value for name, value in zip(names, row, strict=True) if name and value}
            if is_trace and "0" in (values.get("prompt_tokens"), values.get("output_len")):
                continue  # a request that failed
            yield place, _csv_record(path, place, values)
    except csv.Error as error:
        raise _error(path, f"line {rows.line_num}", str(error)) from None


def _columns(path: Path, header: list[str]) -> tuple[list[str], bool]:
    """The field of each column ("": not read), and whether it is one of the known traces."""
    header = [name.strip() for name in header]
    for trace in _TRACES:
        if set(trace) <= set(header):
            return [trace.get(name, "") for name in header], True
    unknown = [name for name in header if name not in FIELDS]
    if unknown:
        known = "; ".join(", ".join(trace) for trace in _TRACES)
        named = f"{unknown[0]!r:.60} is not a column of a workload"
        raise _error(path, "line 1", f"{named}; a trace's header has {known}; others have {', '.join(FIELDS)}")
    return header, False


def _csv_record(path: Path, place: str, values: dict[str, str]) -> Record:
    if "-" in (stamp := values.get("timestamp", ""))[1:5]:
        try:
            moment = datetime.fromisoformat(stamp)
            # Without a zone, assume UTC: local time would have the last hour of summer time twice.
            values["timestamp"] = repr((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
        except ValueError:
            raise _error(path, place, f"timestamp: must be seconds, or a date and time, not {stamp!r}") from None
    try:
        return Record.model_validate_strings(values)
    except ValidationError as error:
        raise _error(path, place, problem_of(error)) from None


def _error(path: Path, place: str, problem: str) -> LoadTestError:
    return LoadTestError(f"workload {path}, {place}: {problem}")
