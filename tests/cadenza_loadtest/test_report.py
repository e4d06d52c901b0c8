"""Figures and the page: with any measurements, or without, they are made, labelled, and self-contained."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from cadenza_loadtest.figures.style import inline_svg, look
from cadenza_loadtest.figures.sweeps import throughput_and_latency
from cadenza_loadtest.measures.columns import RequestColumns, StepColumns
from cadenza_loadtest.measures.slo import parse_slo
from cadenza_loadtest.reports.curves import curves_of
from cadenza_loadtest.reports.report import figures_of, write_figures, write_report
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.results.comparison import compare
from cadenza_loadtest.results.results import LoadTestFile, MaxRate, point_of, run_of
from tests.helpers.loadtest.loadtest_runs import columns
from tests.helpers.marks import short_and_long

HOSTILE = '<script>alert("x")</script> $x_1$ _'


def requests(count: int, *, failed: int = 0, seed: int = 0, gaps: int = 3) -> RequestColumns:
    """A queue's latencies: exponential, growing over the run."""
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(0.1, count))
    first_s = due_s + rng.exponential(0.05, count) * (1 + due_s / (due_s[-1] if count else 1))
    gap_s = rng.exponential(0.02, (count, gaps)).astype(np.float32)
    last_s = first_s + gap_s.sum(1)
    error = np.where(np.arange(count) < failed, "TIMEOUT", "")
    first_s[:failed] = last_s[:failed] = np.nan
    tokens = np.where(error == "", gaps + 1, 0)
    kept = [row.tolist() if not code else [] for row, code in zip(gap_s, error, strict=True)]
    return columns(
        kept, due_s=due_s, sent_s=due_s + 0.0001, first_s=first_s, last_s=last_s, error=error, num_output_tokens=tokens
    )


def steps(count: int) -> StepColumns:
    at = np.arange(count) * 0.01
    ones = np.ones(count, np.int64)
    return StepColumns(
        executor=0 * ones, planned_s=at, applied_s=at + 0.01, device_s=np.full(count, 0.009), num_sequences=ones * 3,
        num_tokens=ones * 3, num_sampled=ones * 3, num_waiting=np.arange(count) % 5, num_running=ones * 3,
        num_swapped=0 * ones, num_used_blocks=np.arange(count) % 90, num_blocks=ones * 100, num_stored_tokens=ones * 50,
        num_preempted=0 * ones,
    )  # fmt: skip


def file(
    label: str, rates: tuple[float, ...] = (4.0,), *, count: int = 60, failed: int = 0, seed: int = 0
) -> LoadTestFile:
    points = []
    for place, rate in enumerate(rates):
        run = run_of(
            requests(count, failed=failed, seed=seed + place), steps(200), seed=0, started_unix_s=0.0, window=None,
            slo=parse_slo("ttft=0.1"),
        )  # fmt: skip
        points.append(point_of([run], {"request_rate": rate} if len(rates) > 1 else {}))
    return LoadTestFile(
        label=label, command=["cadenza", "loadtest", "--label", label], settings={"seed": 0}, server=None, points=points
    )


def two_settings() -> LoadTestFile:
    """As `--sweep input-len=64,uniform:100:300 --sweep request-rate=4,1,16`, whose values are texts in the file."""
    whole = file("two", tuple(range(6)), count=20)
    swept = [
        {"input_len": length, "request_rate": rate} for length in ("64", "uniform:100:300") for rate in "4 1 16".split()
    ]
    points = [point_of(point.runs, each) for point, each in zip(whole.points, swept, strict=True)]
    return whole.model_copy(update={"points": points})


CASES: dict[str, Callable[[], list[LoadTestFile]]] = {
    "usual": lambda: [file("usual")],
    "sweep": lambda: [file("sweep", (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0))],
    "two files": lambda: [file("first", (1.0, 2.0)), file("second", (1.0, 2.0), seed=9)],
    "all failed": lambda: [file("failed", count=5, failed=5)],
    "some failed": lambda: [file("some", count=50, failed=7)],
    "one request": lambda: [file("one", count=1)],
    "many": lambda: [file("many", count=5000)],
    "two settings": lambda: [two_settings()],
    "hostile": lambda: [file(HOSTILE, (1.0, 2.0))],
}


@functools.cache
def case_of(name: str) -> list[LoadTestFile]:
    """The files of a case, made when the first test needs them."""
    return CASES[name]()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", short_and_long(CASES, ["usual", "all failed", "one request", "two settings", "hostile"])
)
def test_every_figure_has_labels_with_units_and_nothing_is_cut(case: str) -> None:
    files = case_of(case)
    found = list(figures_of(files, compare(files) if len(files) > 1 else None))
    assert len({name for name, _, _ in found}) == len(found)
    for name, figure, caption in found:
        assert caption.endswith(".")
        _check(name, figure)


def _check(name: str, figure: Figure) -> None:
    figure.canvas.draw()
    whole = figure.bbox
    for axes in figure.axes:
        if not axes.axison:
            assert axes.texts, f"{name}: an empty panel says why"
            continue
        for axis in (axes.xaxis, axes.yaxis):
            label = axis.get_label()
            has_names = any(re.search("[a-zA-Z]{3}", tick.get_text()) for tick in axis.get_ticklabels())
            shared = name.startswith("occupancy") and axis is axes.xaxis
            assert label.get_text() or has_names or shared, f"{name}: an axis without a label"
            extent = label.get_window_extent()
            assert extent.x0 >= -1
            assert extent.x1 <= whole.x1 + 1
    panels = [axes.get_window_extent() for axes in figure.axes]
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.x0 >= -1
        assert box.x1 <= whole.x1 + 1
        assert not any(box.overlaps(panel) for panel in panels), f"{name}: the legend lies on a panel"


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.referred: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "xlink:href" and value and value.startswith("#"):
                self.referred.append(value)
            if name in ("src", "href", "xlink:href", "action") and value and not value.startswith(("#", "data:")):
                self.fetched.append(value)
            if name == "id" and value:
                self.ids.append(value)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", short_and_long(["usual", "two files", "all failed", "hostile"], ["all failed", "hostile"])
)
def test_the_page_is_whole_and_fetches_nothing(case: str, tmp_path: Path) -> None:
    files = case_of(case)
    text = write_report(files, tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    page.close()
    assert page.fetched == []
    assert "script" not in page.tags
    assert "url(http" not in text
    assert page.tags.count("svg") == page.tags.count("figure") >= 3
    for each in files:
        assert each.label in page.text
    assert len(text) < 4_000_000
    assert len(set(page.ids)) == len(page.ids)
    assert {each.removeprefix("#") for each in page.referred} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(page.ids)


@pytest.mark.slow
def test_figures_are_the_same_bytes_again(tmp_path: Path) -> None:
    first = write_figures(case_of("usual"), tmp_path / "a")
    again = write_figures(case_of("usual"), tmp_path / "b")
    assert {path.suffix for path in first} == {".png", ".svg"}
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_a_figure_in_a_page_takes_the_width_there_is() -> None:
    _, figure, _ = next(iter(figures_of(case_of("usual"))))
    svg = inline_svg(figure, "x")
    assert svg.startswith("<svg ")
    assert 'width="100%"' in svg[:300]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadTestError, match="cannot be written"):
        write_report(case_of("usual"), tmp_path / "file" / "report.html")
    with pytest.raises(LoadTestError, match="cannot be written"):
        write_figures(case_of("usual"), tmp_path / "file" / "plots")


@pytest.mark.slow
def test_of_several_files_the_same_points_are_drawn_each_in_its_files_colour() -> None:
    rates = tuple(float(rate) for rate in range(1, 9))
    files = [file("first", rates, count=20), file("second", rates, count=20, seed=9)]
    found = {name: figure for name, figure, _ in figures_of(files, compare(files))}
    legend = found["latency-distributions"].legends[0]
    labels = [text.get_text() for text in legend.get_texts()][: -len(["SLO"])]
    points = [label.split(", ") for label in labels]
    assert [name for name, _ in points] == ["first"] * 3 + ["second"] * 3
    assert [at for _, at in points[:3]] == [at for _, at in points[3:]]
    colours = [line.get_color() for line in legend.get_lines()][:6]
    assert len(set(colours[:3])) == len(set(colours[3:])) == 1
    assert colours[0] != colours[3]
    assert sum(name.startswith("change-") for name in found) == 6


@pytest.mark.slow
def test_what_holds_tokens_is_shown_if_the_block_size_is_known() -> None:
    usual = case_of("usual")[0]
    known = usual.model_copy(update={"server": {"executors": [{"block_size": 16}, {"block_size": 16}]}})
    unknown = usual.model_copy(update={"server": {"executors": [{"block_size": 16}, {"block_size": 32}]}})
    simulated = usual.model_copy(update={"server": {"executors": [{"limits": {"block_size": 16}}]}})
    shown = []
    for each in (known, simulated, unknown, usual):
        figure = next(figure for name, figure, _ in figures_of([each]) if name.startswith("occupancy"))
        shown.append("holds tokens" in [text.get_text() for text in figure.axes[2].get_legend().get_texts()])
    assert shown == [True, True, False, False]


def test_of_several_runs_it_is_stated_which_one_is_seen_over_time() -> None:
    usual = case_of("usual")[0]
    (one,) = usual.points
    several = usual.model_copy(update={"points": [point_of(one.runs * 3)]})
    for each, said in ((several, True), (usual, False)):
        over_time = [found for found in figures_of([each]) if found[0].startswith(("latency-over", "occupancy"))]
        assert len(over_time) == 2
        for _, figure, caption in over_time:
            assert figure.get_suptitle().endswith(", run 1 of 3") == said
            assert caption.endswith("The first of 3 runs.") == said


@pytest.mark.slow
def test_a_sweep_of_two_settings_has_a_line_for_each_value_of_the_other() -> None:
    whole = two_settings()
    first, second = curves_of([whole])
    assert [first.label, second.label] == ["input-len 64", "input-len uniform:100:300"]
    assert first.swept == second.swept == "request-rate"
    assert first.at == second.at == [1, 4, 16]
    assert first.names == ["1", "4", "16"]
    assert first.summaries == [whole.points[place].summary for place in (1, 0, 2)]
    assert first.own != second.own
    found = {name: figure for name, figure, _ in figures_of([whole])}
    legend = [text.get_text() for text in found["over-swept"].legends[0].get_texts()]
    assert legend[:4] == [first.label, second.label, "p50", "p99"]
    for panel in found["over-swept"].axes:
        lines = [line for line in panel.lines if len(line.get_xdata()) == 3 and line.get_linestyle() in ("-", "--")]
        assert len(lines) >= 2
        assert all(list(line.get_xdata()) == [1, 4, 16] for line in lines)


def test_what_a_line_runs_along() -> None:
    whole = two_settings()

    def along(**swept: list[float | str]) -> list[tuple[str, str, list[float]]]:
        values = [dict(zip(swept, each, strict=True)) for each in zip(*swept.values(), strict=True)]
        points = [point_of(whole.points[0].runs, each) for each in values]
        return [
            (curve.label, curve.swept, curve.at) for curve in curves_of([whole.model_copy(update={"points": points})])
        ]

    assert along(executors=[1.0, 1.0, 2.0], request_rate=[4.0, 2.0, 9.0]) == [
        ("executors 1", "request-rate", [2, 4]), ("executors 2", "request-rate", [9]),
    ]  # fmt: skip
    assert along(request_rate=["2", "inf", "1"]) == [("two", "", [])], "infinity has no place on an axis"
    assert along(workload=["random", "random", "sharegpt"], arrivals=["poisson", "gamma", "poisson"]) == [
        ("workload random, arrivals poisson", "", []),
        ("workload random, arrivals gamma", "", []),
        ("workload sharegpt, arrivals poisson", "", []),
    ], "no line joins what are names"
    assert along(input_len=["8", "16"], output_len=["3", "3"]) == [("output-len 3", "input-len", [8, 16])]
    both = curves_of([whole, whole.model_copy(update={"label": "again"})])
    assert [curve.label for curve in both][1:3] == ["two, input-len uniform:100:300", "again, input-len 64"]
    assert [curve.own.colour for curve in both if curve.own].count(look(0).colour) == 2


@pytest.mark.slow
def test_files_with_one_name_are_distinguished_in_every_figure(tmp_path: Path) -> None:
    long = "a name that is far too long for a legend, of the {} one, and ends alike for all of them"
    labels = ["same", "same", long.format("first"), long.format("second")]
    files = [file(label, (1.0, 2.0), count=5, seed=place) for place, label in enumerate(labels)]
    found = {name: figure for name, figure, _ in figures_of(files)}
    for name in ("throughput-and-latency", "rates"):
        shown = [text.get_text() for text in found[name].legends[0].get_texts()][:4]
        assert shown[:2] == ["same", "same (2)"]
        assert len(set(shown)) == 4
    page = write_report(files[:2], tmp_path / "same.html").read_text(encoding="utf-8")
    assert "<h2>same</h2>" in page
    assert "<h2>same (2)</h2>" in page


@pytest.mark.slow
def test_of_a_load_without_a_rate_there_is_no_figure_of_rates() -> None:
    points = [
        point_of([run_of(point.runs[0].requests, None, seed=0, started_unix_s=0.0, window=None, slo=None,
                         open_loop=False)], {"concurrency": place + 1.0})
        for place, point in enumerate(file("users", (1.0, 2.0), count=9).points)
    ]  # fmt: skip
    assert all("offered_per_s" not in point.summary for point in points)
    names = [name for name, _, _ in figures_of([file("users").model_copy(update={"points": points})])]
    assert "over-swept" in names
    assert "rates" not in names


@pytest.mark.slow
def test_figures_of_several_files_are_those_of_their_comparison(tmp_path: Path) -> None:
    files = [file("first", count=5), file("second", count=5, seed=9)]
    names = {path.stem for path in write_figures(files, tmp_path)}
    assert {"change-0", "latency-distributions"} <= names


def test_the_rate_that_a_search_found_is_named_first() -> None:
    slo = parse_slo("ttft=0.1")
    found = file("search", (4.0, 4.1, 4.2), count=20).model_copy(
        update={"max_rate": MaxRate(held=4.1, failed=4.2, slo=slo, slo_share=0.99, tolerance=0.05)}
    )
    (curve,) = curves_of([found])
    assert curve.names[curve.chosen or 0] == "4.1"
    # Three points in one place: there is room for one name or two, and that of the rate that held is one of them.
    together = replace(curve, summaries=[curve.summaries[0]] * 3)
    figure = throughput_and_latency([together])
    for axes in figure.axes:
        assert axes.texts[0].get_text() == "4.1"
