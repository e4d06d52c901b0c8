"""What the commands of loads share: options, besides those of a load, and a check that their packages are there."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

import typer

from cadenza.errors import OptionError
from cadenza_common.settings.extras import install_command

LOADTEST_MODULES = ("aiohttp", "jinja2", "matplotlib", "numpy", "pydantic", "pydantic_settings", "scipy")
"""What the extra `loadtest` installs, by the names of imports."""


def of_results(metavar: str, text: str) -> Any:
    """An option for the results of a run."""
    return typer.Option(metavar=metavar, help=text, rich_help_panel="Results")


Sweep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=V,V,…",
        help="A run for each value of an option of Load or Workload, such as request-rate=1,2,4; several: a run "
        "for each combination.",
        rich_help_panel="Load",
    ),
]
Output = Annotated[
    str | None, of_results("FILE", "Write the result as JSON, with everything that a rerun or a report needs.")
]
Csv = Annotated[str | None, of_results("FOLDER", "Write requests.csv, points.csv and steps.csv.")]
Plots = Annotated[str | None, of_results("FOLDER", "Write the figures, each as PNG and SVG.")]
Report = Annotated[str | None, of_results("FILE", "Write one self-contained HTML page.")]
Label = Annotated[str, of_results("TEXT", "Name of the result in reports.")]


def require_loadtest(what: str, extras: str = "loadtest") -> None:
    """Raise an OptionError with the command that installs `extras` if a package for `what` is missing."""
    missing = [name for name in LOADTEST_MODULES if find_spec(name) is None]
    if missing:
        raise OptionError(f"{what} needs {', '.join(missing)}: {install_command(extras)}")
