"""Makes docs/experiments.md from benchmarks/results/experiments, with figures in the style of the load tests."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from benchmarks.common.rows import ROOT
from benchmarks.experiments.experiment import Experiment, ExperimentResult, Figure, Series, Table, load
from cadenza_loadtest.figures.style import drawable, line_handle, look, new_figure, put_legend, styled
from cadenza_loadtest.figures.ticks import plain, set_scale
from cadenza_loadtest.requests import Floats

PAGE = ROOT / "docs" / "experiments.md"
FIGURES = ROOT / "docs" / "figures"
_PLACES = {
    "simulate": "In virtual time: the scheduler's own core, and a published cost model in place of the executor",
    "cpu": "Measured: both services on this machine's CPU",
}
_HEAD = """# The experiments that started this field

Made by `make experiments` from its measurements; do not edit. Each section has the claims of the literature, the
results here, and an explanation where they differ. The raw results are in `benchmarks/results/experiments/`; `cadenza
simulate` is described in [simulate.md](simulate.md), the harness in [loadtest.md](loadtest.md).
"""


def write_page(experiments: Iterable[Experiment], page: Path = PAGE, figures: Path = FIGURES) -> Path:
    """Write the page and draw its figures; an experiment without results has no section."""
    figures.mkdir(parents=True, exist_ok=True)
    page.write_text(page_text(experiments), encoding="utf-8")
    for result in _results(experiments):
        for figure in result.figures:
            draw(figure, figures / f"{_file_name(result, figure.name)}.svg")
    return page


def page_text(experiments: Iterable[Experiment]) -> str:
    """The whole page in Markdown."""
    sections = [_HEAD]
    for experiment in experiments:
        found = [result for place in experiment.places if (result := load(experiment.name, place)) is not None]
        if found:
            sections.append("\n".join(_section(experiment, found)))
    return "\n".join(sections)


def _section(experiment: Experiment, results: list[ExperimentResult]) -> Iterator[str]:
    number, _, _ = experiment.name.partition("-")
    yield f"## {number}. {experiment.title}\n"
    yield f"{experiment.hypothesis.strip()}\n"
    for result in results:
        yield f"### {_PLACES[result.place]}\n"
        yield f"{_setup(result)}\n"
        yield "| claim | here | |\n|---|---|---|"
        for finding in result.findings:
            yield f"| {finding.claim} | {finding.evidence} | {'holds' if finding.held else '**does not hold**'} |"
        yield ""
        for figure in result.figures:
            yield f"![{figure.title}](figures/{_file_name(result, figure.name)}.svg)\n"
            if figure.caption:
                yield f"{figure.caption}\n"
        for table in result.tables:
            yield from _table(table)
    if experiment.notes:
        yield f"{experiment.notes.strip()}\n"


def _setup(result: ExperimentResult) -> str:
    setup = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in result.setup.items())
    return (
        f"{setup}. Seed {result.seed}, {result.wall_s:.0f} s on {result.machine.cores} cores of {result.machine.cpu}."
    )


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield f"{table.title}\n"
    yield "| " + " | ".join(table.columns) + " |"
    yield "|" + "---|" * len(table.columns)
    for row in table.rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _results(experiments: Iterable[Experiment]) -> Iterator[ExperimentResult]:
    for experiment in experiments:
        for place in experiment.places:
            if (result := load(experiment.name, place)) is not None:
                yield result


def _file_name(result: ExperimentResult, figure: str) -> str:
    return f"experiment-{result.experiment}-{result.place}-{figure}"


_GROUP_WIDTH = 0.8
"""Width of a group of bars; groups are 1 apart."""
_SALT = "cadenza"
"""Ids inside an SVG follow from it and from the drawing."""


@styled()
def draw(figure: Figure, path: Path) -> None:
    """Write the figure as SVG or PNG, by the path's suffix; equal figures give equal bytes.

    Bars, and series with names in place of numbers, are evenly spaced in the order in which they first appear.
    """
    whole, (axes,) = new_figure(figure.title, height=3.8)
    names = _names(figure)
    for index, series in enumerate(figure.series):
        if figure.kind == "bar":
            _bars(axes, series, index, len(figure.series), names)
        else:
            _line(axes, series, index, names, figure)
    axes.set_xlabel(drawable(figure.x_label, 90))
    axes.set_ylabel(textwrap.fill(drawable(figure.y_label, 90), 44))
    if names:
        _put_names(axes, names)
    else:
        _put_ticks(axes, figure)
    set_scale(axes, "y", figure.log_y)
    if not figure.log_y and min((y for each in figure.series for y in each.y if y is not None), default=0) >= 0:
        axes.set_ylim(0, 1.03 * axes.get_ylim()[1])
    if len(figure.series) > 1:
        put_legend(whole, [_handle(series, index, figure) for index, series in enumerate(figure.series)])
    matplotlib.rcParams["svg.hashsalt"] = _SALT
    whole.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)


def _names(figure: Figure) -> list[str]:
    """The evenly spaced names on the x axis; empty if x is numeric."""
    xs = [x for series in figure.series for x in series.x]
    if figure.kind == "bar" or any(isinstance(x, str) for x in xs):
        return list(dict.fromkeys(_name(x) for x in xs))
    return []


def _name(x: float | str) -> str:
    return x if isinstance(x, str) else plain(x)


def _places(series: Series, names: list[str]) -> Floats:
    """[n] the x positions of its values."""
    return np.array([names.index(_name(x)) if names else x for x in series.x], np.float64)


def _values(values: list[float | None]) -> Floats:
    return np.array(values, np.float64)


def _line(axes: Axes, series: Series, index: int, names: list[str], figure: Figure) -> None:
    colour, style, marker = look(index).colour, look(index).line, look(index).marker
    x, y = _places(series, names), _values(series.y)
    if figure.kind == "step":
        axes.plot(x, y, color=colour, linestyle=style, drawstyle="steps-post")
        return
    axes.plot(x, y, color=colour, linestyle=style, marker=marker)
    if series.low is not None and series.high is not None:
        axes.fill_between(x, _values(series.low), _values(series.high), color=colour, alpha=0.18, linewidth=0)


def _bars(axes: Axes, series: Series, index: int, num_series: int, names: list[str]) -> None:
    width = _GROUP_WIDTH / num_series
    x = _places(series, names) + (index - (num_series - 1) / 2) * width
    y = _values(series.y)
    axes.bar(x, y, 0.92 * width, color=look(index).colour)
    if series.low is not None and series.high is not None:
        reach = [np.maximum(y - _values(series.low), 0), np.maximum(_values(series.high) - y, 0)]
        axes.errorbar(x, y, yerr=reach, fmt="none", ecolor=matplotlib.rcParams["text.color"], elinewidth=1, capsize=2)


def _handle(series: Series, index: int, figure: Figure) -> Line2D:
    own = look(index)
    if figure.kind == "bar":
        return line_handle(series.label, own.colour, linewidth=7)
    marker = {"marker": own.marker} if figure.kind == "line" else {}
    return line_handle(series.label, own.colour, linestyle=own.line, **marker)


def _put_names(axes: Axes, names: list[str]) -> None:
    axes.set_xticks(range(len(names)), [drawable(name, 26) for name in names])
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.grid(visible=False, axis="x")
    if sum(map(len, names)) > 75:
        axes.tick_params(axis="x", labelrotation=25)


def _put_ticks(axes: Axes, figure: Figure) -> None:
    """Set the ticks of a numeric axis; on a logarithmic axis with few values, each has a tick."""
    set_scale(axes, "x", figure.log_x, most=8)
    places = sorted({float(x) for series in figure.series for x in series.x})
    if figure.log_x and figure.kind == "line" and len(places) <= 12 and _are_apart(places):
        axes.set_xticks(places, [plain(place) for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())


def _are_apart(places: list[float]) -> bool:
    """Whether the places are far enough apart for a label at each."""
    logs = np.log10(np.array(places))
    return len(places) < 2 or bool(np.diff(logs).min() > (logs[-1] - logs[0]) / 18)
