"""`cadenza report`: a page of one result, or of several compared with the first."""

from __future__ import annotations

from typing import Annotated

import typer

from cadenza_cli.load.results import check_outputs, show, tables_console, write_page, write_pictures, write_tables

HELP = """Make a report of load tests and simulations, or compare them.

\b
Examples:
  cadenza report today.json --output today.html
  cadenza report before.json after.json --output change.html

With several files, each is compared with the first: differences and ratios with their 95% intervals, and differing
settings.
"""
EPILOG = "Exit codes: 0 success, 1 a failure, 2 wrong options."


def report(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Results written by --output.")],
    output: Annotated[str | None, typer.Option(metavar="FILE", help="Write one self-contained HTML page.")] = None,
    csv: Annotated[str | None, typer.Option(metavar="FOLDER", help="Write the tables of each file.")] = None,
    plots: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the figures as PNG and SVG; with several files, those of each in its own folder.",
        ),
    ] = None,
) -> None:
    """Run the command; raises LoadTestError for a file that is not a result."""
    from cadenza_loadtest.reports.summary import comparison_view
    from cadenza_loadtest.results.comparison import compare
    from cadenza_loadtest.results.results import read

    results = [read(path) for path in files]
    outputs = check_outputs(csv=csv, plots=plots, report=output, page="output", read=files)
    for result in results:
        show(result)
    if len(results) > 1:
        tables_console().print(comparison_view(compare(results)))
    for index, result in enumerate(results):
        part = f"{index + 1}" if len(results) > 1 else ""
        write_tables(result, outputs.csv and outputs.csv / part)
        write_pictures([result], outputs.plots and outputs.plots / part)
    if len(results) > 1:
        write_pictures(results, outputs.plots)
    write_page(results, outputs.report)
