"""The results of a load test or a simulation: tables on the screen, and the requested files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cadenza.errors import CadenzaError, OptionError
from cadenza_cli.text import notice

if TYPE_CHECKING:
    from rich.console import Console

    from cadenza_loadtest.results.results import LoadTestFile


_TABLE_WIDTH = 100
_MOST_WHOLE = 2
"""Most points that are shown with all their numbers; more points are shown as a table with a row for each."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Paths of the output files; None: not requested."""

    output: Path | None = None
    csv: Path | None = None
    plots: Path | None = None
    report: Path | None = None


def check_outputs(
    *,
    output: str | None = None,
    csv: str | None = None,
    plots: str | None = None,
    report: str | None = None,
    page: str = "report",
    read: Sequence[str | None] = (),
) -> Outputs:
    """Check the paths and create their folders before the run, so that a long run does not end at a misspelled path.

    `page`: the command's own name for the option `report`. `read`: files that the command reads and must not overwrite.
    Raises OptionError.
    """
    taken = {Path(text).resolve(): "it is read" for text in read if text is not None}
    for name, text in (("output", output), (page, report)):
        if text is not None:
            path, option = Path(text), f"--{name} {text}"
            if path.is_dir():
                raise OptionError(f"{option}: it is a folder; give a file")
            if path.resolve() in taken:
                raise OptionError(f"{option}: {taken[path.resolve()]}; give another file")
            taken[path.resolve()] = f"--{name} is written there"
            _make(path.parent, option)
    for name, text in (("csv", csv), ("plots", plots)):
        if text is not None:
            _make(Path(text), f"--{name} {text}")
    places = (Path(text) if text is not None else None for text in (output, csv, plots, report))
    return Outputs(*places)


def write_outputs(file: LoadTestFile, outputs: Outputs) -> None:
    """Print the tables and write the files.

    A failure does not prevent the other outputs; the first failure is raised at the end: LoadTestError for a file that
    cannot be written, OSError for tables that cannot be printed.
    """
    from cadenza_loadtest.requests import LoadTestError

    parts: Sequence[Callable[[], None]] = (
        partial(write_result, file, outputs.output),
        partial(show, file),
        partial(write_tables, file, outputs.csv),
        partial(write_pictures, [file], outputs.plots),
        partial(write_page, [file], outputs.report),
    )
    failures: list[LoadTestError | OSError] = []
    for part in parts:
        try:
            part()
        except (LoadTestError, OSError) as error:
            failures.append(error)
    if failures:
        raise failures[0]


def write_result(file: LoadTestFile, path: Path | None) -> None:
    """Write the result itself, if a path is given."""
    if path is not None:
        from cadenza_loadtest.results.results import write

        write(path, file)


def write_tables(file: LoadTestFile, folder: Path | None) -> None:
    """Write the CSV files, if a folder is given."""
    if folder is not None:
        from cadenza_loadtest.results.csv_files import write_csv

        write_csv(file, folder)


def write_pictures(files: Sequence[LoadTestFile], folder: Path | None) -> None:
    """Write the figures of all these files together, if a folder is given."""
    if folder is not None:
        from cadenza_loadtest.reports.report import write_figures

        write_figures(files, folder)


def write_page(files: Sequence[LoadTestFile], path: Path | None) -> None:
    """Write the report, if a path is given."""
    if path is not None:
        from cadenza_loadtest.reports.report import write_report

        write_report(files, path)


def tables_console() -> Console:
    """A console on stdout; if that is not a terminal and COLUMNS gives no width, it is wide enough for the tables.

    Labels and lengths such as `uniform:100:300` are printed as text, without markup or emoji names.
    """
    from rich.console import Console

    is_known = Console().is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if is_known else _TABLE_WIDTH, emoji=False, markup=False)


def show(file: LoadTestFile) -> None:
    """Print a result's tables."""
    from cadenza_loadtest.reports.summary import cut_short_sentence, point_view, points_view

    console = tables_console()
    if not file.points:
        notice(f"{file.label}: no run was measured to its end")
    if len(file.points) > _MOST_WHOLE:
        console.print(points_view(file.points))
    else:
        for point in file.points:
            console.print(point_view(point))
    if (found := file.max_rate) is not None:
        held = f"{found.held:.3g} requests/s" if found.held is not None else "no rate that was tried"
        above = f"; {found.failed:.3g} did not" if found.failed is not None else "; none that was tried failed"
        console.print(f"{held} held {found.slo} for {found.slo_share:.0%} of the requests{above}.", highlight=False)
    if file.cut_short:
        console.print(f"! {cut_short_sentence(file.cut_short)}", style="yellow", highlight=False)


def check_whole(file: LoadTestFile) -> None:
    """Raises KeyboardInterrupt or CadenzaError, for the exit code, if the result was cut short."""
    from cadenza_loadtest.results.results import CTRL_C

    if file.cut_short == CTRL_C:
        raise KeyboardInterrupt
    if file.cut_short:
        raise CadenzaError(file.cut_short)


def nothing_counted(file: LoadTestFile) -> str | None:
    """Why the load gave no measurements, in a sentence; None if it gave some."""
    metrics = [run.metrics for point in file.points for run in point.runs]
    if any(each.num_ok for each in metrics):
        return None
    if metrics and not any(each.num_requests for each in metrics):
        return "no request was due within the window that counts (--window, --warm-up-s): nothing was measured"
    return "no request completed: see the errors above"


def _make(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{option}: {folder}: {(error.strerror or str(error)).lower()}") from None
    if not os.access(folder, os.W_OK):
        raise OptionError(f"{option}: {folder}: permission denied")
