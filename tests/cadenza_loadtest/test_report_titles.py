"""What a report calls its results, and how its page lays them out."""

from __future__ import annotations

import functools
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cadenza_loadtest.figures.style import WIDTH
from cadenza_loadtest.reports.report import figures_of, write_report
from cadenza_loadtest.reports.titles import page_title, point_name, section_line, section_names
from cadenza_loadtest.results.results import LoadTestFile, Reached
from tests.helpers.loadtest.loadtest_runs import made_up_file

ADDRESS = "127.0.0.1:40645"
AT = datetime(2026, 11, 23, 6, 17, tzinfo=UTC)


RATES = [{"request_rate": rate} for rate in ("2", "4", "8")]
MODEL = "/home/ada/models/cadenza-demo"


@functools.cache
def measured() -> LoadTestFile:
    """A result of a server on the demo model."""
    server = {"model": MODEL, "target": ADDRESS}
    return made_up_file(ADDRESS, [1], num_requests=20, swept={}, server=server, created=AT)


def result(swept: list[dict[str, Any]] | None = None, **given: Any) -> LoadTestFile:
    """The same under other settings or another label; `swept`: of each point, all of the same measurements."""
    file = measured()
    settings = {**file.settings, **given.pop("settings", {"request_rate": 4.0})}
    points = [file.points[0].model_copy(update={"swept": each}) for each in swept or [{}]]
    return file.model_copy(update={"settings": settings, "points": points, **given})


TITLES: dict[str, dict[str, Any]] = {
    "Load test of cadenza-demo at 4 requests/s, 23 November 2026": {},
    "Load test of cadenza-demo at 1 request/s, 23 November 2026": {"settings": {"request_rate": 1.0}},
    "Load test of cadenza-demo with all requests at once, 23 November 2026": {"settings": {"request_rate": "inf"}},
    "Load test of cadenza-demo with 8 users, 23 November 2026": {"settings": {"concurrency": 8, "request_rate": "inf"}},
    "Load test of cadenza-demo at the times of a trace, 23 November 2026": {"settings": {"arrivals": "trace"}},
    "Load test of cadenza-demo at 2, 4 and 8 requests/s, 23 November 2026": {"swept": RATES},
    "Load test of cadenza-demo at 1 to 64 requests/s, 23 November 2026": {
        "swept": [{"request_rate": str(2**power)} for power in range(7)]
    },
    "Load test of cadenza-demo at 4 requests/s by input-len, 23 November 2026": {
        "swept": [{"input_len": "8"}, {"input_len": "16"}]
    },
    "Simulated load test of cadenza-demo on 1 and 2 executors at 4 requests/s, 23 November 2026": {
        "swept": [{"executors": 1.0}, {"executors": 2.0}],
        "source": "simulate",
    },
    "Search for the highest request rate of cadenza-demo, 23 November 2026": {
        "swept": RATES,
        "settings": {"find_max_rate": True},
    },
    "Nightly: load test of cadenza-demo at 4 requests/s, 23 November 2026": {"label": "Nightly"},
}


@pytest.mark.parametrize("title", TITLES)
def test_a_title_names_model_load_and_day(title: str) -> None:
    assert page_title([result(**TITLES[title])]) == title


def test_a_label_that_nobody_gave_is_not_a_name() -> None:
    """A result's default label is an address, a URL or a model's place."""
    started = Reached(model="models/cadenza-demo")
    for file in (result(), result(label=MODEL), result(label="models/cadenza-demo", reached=started)):
        assert section_names([file]) == ["cadenza-demo"]
    hub = result().model_copy(update={"server": {"model": "org/Llama-3.1-8B"}, "label": "http://x/v1"})
    hub = hub.model_copy(update={"settings": {"url": "http://x/v1"}})
    assert page_title([hub]) == "Load test of Llama-3.1-8B, 23 November 2026"
    assert page_title([result(), result(label="after")]) == "Comparison of cadenza-demo and after, 23 November 2026"
    assert section_names([result(), result()]) == ["cadenza-demo", "cadenza-demo (2)"]


def test_lines_and_points_in_words() -> None:
    assert section_line(result()) == f"Measured on 23 November 2026, 06:17 UTC, at {ADDRESS}."
    assert section_line(result(source="simulate")).startswith("Simulated in virtual time on 23 November 2026")
    assert point_name({"executors": 2.0, "request_rate": "4", "input_len": "8"}) == (
        "2 executors, 4 requests/s, input-len 8"
    )
    assert point_name({}) == ""


@pytest.mark.slow
def test_figures_of_a_page_are_equally_wide(tmp_path: Path) -> None:
    files = [result(RATES[:2]), result(RATES[:2], label="after")]
    for each in (files, [result()]):
        found = list(figures_of(each))
        assert len(found) >= 3
        assert {figure.get_figwidth() for _, figure, _ in found} == {WIDTH}
        page = write_report(each, tmp_path / "page.html").read_text(encoding="utf-8")
        boxes = re.findall(r'<figure id="[^"]*"><svg [^>]*?width="100%"[^>]*viewBox="0 0 ([0-9.]+) ', page)
        assert len(boxes) == page.count("<figure")
        assert len(set(boxes)) == 1
        # They take the width of the page, and scroll where it is too narrow to read them.
        assert "max-width: 700px" not in page
        assert re.search(r"figure \{[^}]*overflow-x: auto", page)
        assert re.search(r"svg \{[^}]*min-width: 34rem", page)


@pytest.fixture(scope="module")
def sweep_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report([result(RATES)], tmp_path_factory.mktemp("page") / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_page_has_no_address_for_a_name(sweep_page: str) -> None:
    page = sweep_page
    title = "Load test of cadenza-demo at 2, 4 and 8 requests/s, 23 November 2026"
    assert f"<title>{title}</title>" in page
    assert f"<h1>{title}</h1>" in page
    for heading in re.findall(r"<h[1-3]>(.*?)</h[1-3]>", page):
        assert ADDRESS not in heading
        assert "request-rate" not in heading
    titles = [figure.get_suptitle() for _, figure, _ in figures_of([result(RATES)])]
    assert "Latency over the run: 2 requests/s" in titles
    assert "Latency over the run" in [figure.get_suptitle() for _, figure, _ in figures_of([result()])]


@pytest.mark.slow
def test_of_several_points_an_overview_comes_first(sweep_page: str, tmp_path: Path) -> None:
    page = sweep_page
    overview = page[: page.index("<h2>Figures</h2>")]
    assert [overview.count(f"<td>{rate} requests/s</td>") for rate in (2, 4, 8)] == [1, 1, 1]
    assert "TTFT p99" in overview
    assert page.index("<h2>Figures</h2>") < page.index("Every number") < page.index("<h2>Definitions</h2>")
    single = write_report([result()], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Every number" not in single
    assert single.index("95% interval") < single.index("<h2>Figures</h2>")
