"""The result file: one JSON with all measurements and everything that a rerun needs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

import cadenza
from cadenza_loadtest.measures.columns import RequestColumns, StepColumns
from cadenza_loadtest.measures.latencies import Window, end_of
from cadenza_loadtest.measures.metric_names import values_of
from cadenza_loadtest.measures.metrics import Metrics, Slo, measure
from cadenza_loadtest.measures.uncertainty import Estimate, summarise
from cadenza_loadtest.requests import LoadTestError, Truncations
from cadenza_loadtest.results.column_json import RequestLists, StepLists
from cadenza_loadtest.results.facts import ClientFacts
from cadenza_loadtest.results.facts import client_facts as client_facts

KIND = "cadenza.loadtest"
SCHEMA_VERSION: Final = 1
CTRL_C: Final = "Ctrl-C"
"""Value of `cut_short` after Ctrl-C."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _plain(value: Any) -> Any:
    """The value with numbers that JSON lacks as text: "inf", "-inf", "nan"; float() restores them."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


PlainJson = Annotated[dict[str, Any], BeforeValidator(_plain)]


class Run(_Model):
    """One run: its seed, the outcome of each request, and the metrics."""

    seed: int
    started_unix_s: float
    """By the client's wall clock; for virtual time, when the simulation began."""
    duration_s: float
    """From the start to the end of the last request."""
    window_s: Window | None
    metrics: Metrics
    requests: RequestLists
    steps: StepLists | None = None
    messages: dict[str, str] = Field(default_factory=dict)
    """First message by error code, if there was any."""


class Point(_Model):
    """Runs with the same settings and different seeds."""

    swept: Annotated[dict[str, float | str], BeforeValidator(_plain)] = Field(default_factory=dict)
    """The settings in which the file's points differ, by name, with underscores."""
    runs: list[Run] = Field(min_length=1)
    summary: dict[str, Estimate]
    """Estimates by flat name (`metric_names`): over the runs, or by a bootstrap of a single run."""

    @model_validator(mode="after")
    def _has_what_was_measured(self) -> Self:
        names = (name for run in self.runs for name in values_of(run.metrics))
        if (missing := next((name for name in names if name not in self.summary), None)) is not None:
            raise ValueError(f"summary: {missing} is missing, but a run has it")
        return self


class MaxRate(_Model):
    """The result of `--find-max-rate`; the tried rates are the file's points."""

    held: float | None
    """Highest rate that held, in requests per second; None: none did."""
    failed: float | None
    """Lowest rate that failed; None: none did."""
    slo: Slo
    slo_share: float
    """The share of the requests that must keep the limits for a rate to hold."""
    tolerance: float
    """The search ends when `failed` is at most this share above `held`."""
    complete: bool = True
    """Whether the search ended by itself, with trials of full length; a time budget and Ctrl-C cut it short."""


class Reached(_Model):
    """How a load test reached its server: what a rerun needs besides the settings, which may hold a URL."""

    target: str | None = None
    """HOST:PORT of a server that was already running."""
    model: str | None = None
    """Folder or hub id, as given, of the model of a server that was started for the test."""
    options: PlainJson = Field(default_factory=dict)
    """The options of that server that were not left at their defaults, from any source."""


class LoadTestFile(_Model):
    """A load test or a simulation: settings, machine, server, and the points with their runs."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["cadenza.loadtest"] = "cadenza.loadtest"
    source: Literal["loadtest", "simulate"] = "loadtest"
    """Whether requests were sent to a server, or the scheduler's core ran in virtual time."""
    cadenza_version: str = cadenza.__version__
    created: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    label: str
    """Name of the result in reports and comparisons."""
    command: list[str]
    """The command line, including its first word."""
    settings: PlainJson
    """Everything that a rerun needs; infinity is the text "inf"."""
    client: ClientFacts = Field(default_factory=client_facts)
    reached: Reached | None = None
    """None for a simulation, a server with OpenAI's API, or a file from before this was recorded."""
    server: PlainJson | None
    """What the server reports about itself: kind, address, model, options, executors."""
    points: list[Point]
    max_rate: MaxRate | None = None
    cut_short: str = ""
    """Why the load test ended before everything was measured: CTRL_C, or an error's message; empty: it is complete."""


def run_of(
    columns: RequestColumns,
    steps: StepColumns | None,
    *,
    seed: int,
    started_unix_s: float,
    window: Window | None,
    slo: Slo | None,
    duration_s: float | None = None,
    truncations: Truncations | None = None,
    messages: Mapping[str, str] | None = None,
    open_loop: bool = True,
) -> Run:
    """A run and its metrics; without `duration_s` the run ended with its last token."""
    return Run(
        seed=seed,
        started_unix_s=started_unix_s,
        duration_s=end_of(columns) if duration_s is None else duration_s,
        window_s=window,
        metrics=measure(columns, window=window, slo=slo, steps=steps, truncations=truncations, open_loop=open_loop),
        requests=columns,
        steps=steps,
        messages=dict(messages or {}),
    )


def point_of(runs: Sequence[Run], swept: Mapping[str, float | str] | None = None) -> Point:
    """A point and its summary; there must be at least one run."""
    columns = runs[0].requests if len(runs) == 1 else None
    summary = summarise([run.metrics for run in runs], columns, seed=runs[0].seed)
    return Point(swept=dict(swept or {}), runs=list(runs), summary=summary)


def write(path: Path | str, file: LoadTestFile) -> Path:
    """Write the file atomically. Folders are created and links followed; a device or a pipe is written to directly.

    Raises LoadTestError if the file cannot be written.
    """
    path = Path(path)
    try:
        with _written(path) as out:
            out.write(file.__pydantic_serializer__.to_json(file))
            out.write(b"\n")
    except OSError as error:
        raise LoadTestError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


@contextmanager
def _written(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file that replaces `path` when it is complete; a path that is no regular file is opened directly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        with path.open("wb") as out:
            yield out
        return
    place = path.resolve()
    beside = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        beside.replace(place)
    finally:
        with suppress(OSError):
            beside.unlink()


def read(path: Path | str) -> LoadTestFile:
    """Read a result file. Raises a LoadTestError that names the file and the problem in it."""
    path = Path(path)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise LoadTestError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        return LoadTestFile.model_validate_json(text)
    except ValidationError as error:
        raise LoadTestError(f"{path}: {_what_is_wrong(text, error)}") from None


def read_again(path: Path | str, source: Literal["loadtest", "simulate"]) -> LoadTestFile:
    """Read the result that a command's `--rerun` names; raises LoadTestError if the other command made it."""
    try:
        file = read(path)
    except LoadTestError as error:
        raise LoadTestError(f"--rerun {error}") from None
    if file.source != source:
        what = {"loadtest": "measured on a server", "simulate": "simulated"}[file.source]
        raise LoadTestError(f"--rerun {path}: it was {what}: rerun it with `cadenza {file.source} --rerun {path}`")
    return file


def schema() -> dict[str, Any]:
    """The JSON schema of the file."""
    return LoadTestFile.model_json_schema()


def _what_is_wrong(text: bytes, error: ValidationError) -> str:
    try:
        top = from_json(text)
    except ValueError as problem:
        return f"is not JSON: {problem}"
    if not isinstance(top, dict) or top.get("kind") != KIND:
        return f'is not a result file of `cadenza loadtest` or `cadenza simulate`: it has no "kind": "{KIND}"'
    version = top.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        return (
            f"has schema version {version}, this Cadenza ({cadenza.__version__}) reads up to {SCHEMA_VERSION}; "
            f"it was written by Cadenza {top.get('cadenza_version')}: use that version or a newer one"
        )
    problems = error.errors(include_url=False, include_input=False)
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg'].removeprefix('Value error, ')}{more}"
