"""Makes docs/experiments.md and its figures from the results in benchmarks/results/experiments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.common.rows import ROOT
from benchmarks.experiments.experiment import Experiment, ExperimentResult, Table, load
from benchmarks.experiments.figures import draw

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
