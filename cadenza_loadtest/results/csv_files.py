"""The result file as CSV tables: a row for each request, each point and each step. Times are in seconds."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from cadenza_loadtest.measures.columns import RequestColumns, StepColumns
from cadenza_loadtest.measures.latencies import longest_gap_s, per_request
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.results.column_json import DECIMALS
from cadenza_loadtest.results.results import LoadTestFile

_CHUNK = 20_000
_Row = Sequence[Any]


def write_csv(file: LoadTestFile, folder: Path | str) -> list[Path]:
    """Write requests.csv, points.csv and, if steps were recorded, steps.csv; returns their paths.

    Cells without a measurement are empty. Columns "swept.NAME" identify a row's point; points and their runs are
    numbered from 0. Raises LoadTestError if a file cannot be written.
    """
    folder = Path(folder)
    tables = {"requests.csv": _requests(file), "points.csv": _points(file)}
    if any(run.steps is not None for point in file.points for run in point.runs):
        tables["steps.csv"] = _steps(file)
    paths = [folder / name for name in tables]
    for path, rows in zip(paths, tables.values(), strict=True):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="", encoding="utf-8") as out:
                csv.writer(out, lineterminator="\n").writerows(rows)
        except OSError as error:
            raise LoadTestError(f"{path}: cannot be written: {error.strerror or error}") from error
    return paths


def _requests(file: LoadTestFile) -> Iterator[_Row]:
    """Rows of requests.csv; of a request's inter-token latencies they hold only the longest."""
    own = [each.name for each in fields(RequestColumns) if each.name != "gap_s"]
    yield [*_place_names(file), *own, "ttft_s", "tpot_s", "e2e_s", "lag_s", "max_itl_s"]
    for place, run in _runs(file):
        columns = run.requests
        more = per_request(columns)
        longest = longest_gap_s(columns)
        arrays = [getattr(columns, name) for name in own]
        arrays += [more["ttft_s"], more["tpot_s"], more["e2e_s"], more["lag_s"]]
        arrays.append(np.full(len(columns), np.nan) if longest is None else longest)
        yield from _rows(place, arrays)


def _points(file: LoadTestFile) -> Iterator[_Row]:
    swept = _swept_names(file)
    metrics = list(dict.fromkeys(name for point in file.points for name in point.summary))
    heads = [f"{name}{end}" for name in metrics for end in ("", ".low", ".high")]
    yield ["point", *(f"swept.{name}" for name in swept), "num_runs", *heads]
    for index, point in enumerate(file.points):
        row: list[Any] = [index, *(point.swept.get(name, "") for name in swept), len(point.runs)]
        for name in metrics:
            estimate = point.summary.get(name)
            row += ["", "", ""] if estimate is None else map(_cell, (estimate.value, estimate.low, estimate.high))
        yield row


def _steps(file: LoadTestFile) -> Iterator[_Row]:
    own = [each.name for each in fields(StepColumns) if each.name != "num_dropped"]
    yield [*_place_names(file), *own]
    for place, run in _runs(file):
        if run.steps is not None:
            yield from _rows(place, [getattr(run.steps, name) for name in own])


def _swept_names(file: LoadTestFile) -> list[str]:
    return list(dict.fromkeys(name for point in file.points for name in point.swept))


def _place_names(file: LoadTestFile) -> list[str]:
    return ["point", *(f"swept.{name}" for name in _swept_names(file)), "run", "seed"]


def _runs(file: LoadTestFile) -> Iterator[tuple[list[Any], Any]]:
    """Each run, with the cells that identify it."""
    swept = _swept_names(file)
    for index, point in enumerate(file.points):
        for number, run in enumerate(point.runs):
            yield [index, *(point.swept.get(name, "") for name in swept), number, run.seed], run


def _rows(place: list[Any], arrays: Sequence[Any]) -> Iterator[_Row]:
    """Rows in chunks, so that a million rows are never objects all at once."""
    for start in range(0, len(arrays[0]), _CHUNK):
        columns = [_cells(array[start : start + _CHUNK]) for array in arrays]
        for cells in zip(*columns, strict=True):
            yield [*place, *cells]


def _cells(array: Any) -> list[Any]:
    if array.dtype.kind != "f":
        return list(array.tolist())
    values = np.round(array.astype(np.float64), DECIMALS).tolist()
    return ["" if value != value else value for value in values]


def _cell(value: float | None) -> float | str:
    return "" if value is None else float(f"{value:.9g}")
