"""Comparisons: matched points, differences with their uncertainty, verdicts; and their terminal output."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from cadenza_loadtest.measures.metrics import Slo, measure, parse_slo
from cadenza_loadtest.reports.summary import comparison_view, notices, number, point_view, points_view
from cadenza_loadtest.reports.tables import NumberTable
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.results.comparison import SettingDifference, compare, welch, welch_ratio
from cadenza_loadtest.results.results import LoadTestFile, MaxRate, point_of, read, run_of, write
from tests.helpers.loadtest.loadtest_runs import columns, made_up, made_up_file, made_up_steps


def text_of(view: Any, width: int = 100) -> str:
    console = Console(width=width, record=True, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(view)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    return "\n".join(line.rstrip() for line in lines)


def test_welchs_interval_is_that_of_scipy() -> None:
    base, other = [1.0, 2.0, 4.0], [3.0, 3.5, 4.5, 5.0]
    got = welch(base, other)
    expected = stats.ttest_ind(other, base, equal_var=False).confidence_interval(0.95)
    assert got.value == pytest.approx(4.0 - 7 / 3)
    assert (got.low, got.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    ratio = welch_ratio(base, other)
    assert ratio is not None
    assert ratio.value == pytest.approx(np.exp(np.mean(np.log(other)) - np.mean(np.log(base))))
    logs = stats.ttest_ind(np.log(other), np.log(base), equal_var=False).confidence_interval(0.95)
    assert (ratio.low, ratio.high) == (pytest.approx(math.exp(logs.low)), pytest.approx(math.exp(logs.high)))
    assert welch_ratio([0.0, 1.0], [1.0, 2.0]) is None


def test_runs_that_do_not_vary_differ_for_sure() -> None:
    got = welch([2.0, 2.0], [3.0, 3.0])
    assert (got.value, got.low, got.high) == (1.0, 1.0, 1.0)


def test_repetitions_are_compared_by_welch() -> None:
    base, other = made_up_file("a", [1, 2, 3]), made_up_file("b", [4, 5, 6], slower=1.5)
    comparison = compare([base, other])
    (point,) = comparison.points
    (changes,) = point.changes
    assert point.swept == {"request_rate": 10.0}
    tpot = changes["tpot_s.mean"]
    runs = [[run.metrics.tpot_s.mean for run in file.points[0].runs if run.metrics.tpot_s] for file in (base, other)]
    assert (tpot.how, tpot.verdict, tpot.difference) == ("welch", "higher", welch(*runs))
    assert tpot.ratio is not None
    assert tpot.ratio.low is not None
    assert tpot.ratio.high is not None
    assert tpot.ratio.low < 1.5 < tpot.ratio.high
    assert changes["slo_share"].verdict == "lower"
    assert changes["lag_s.mean"].verdict == "no difference shown"
    assert changes["by_kind.long.tpot_s.mean"].verdict == "higher"
    assert (tpot.base, tpot.other) == tuple(file.points[0].summary["tpot_s.mean"] for file in (base, other))


@pytest.mark.slow
def test_single_runs_are_compared_by_a_bootstrap() -> None:
    base, other = made_up_file("a", [1]), made_up_file("b", [2], slower=1.5)
    (changes,) = compare([base, other]).points[0].changes
    tpot = changes["tpot_s.mean"]
    assert (tpot.how, tpot.verdict) == ("bootstrap", "higher")
    assert tpot.ratio is not None
    assert tpot.ratio.low is not None
    assert tpot.ratio.high is not None
    assert tpot.ratio.low < tpot.ratio.value < tpot.ratio.high
    assert 1.3 < tpot.ratio.low < 1.5 < tpot.ratio.high < 1.7
    assert changes["lag_s.mean"].verdict == "no difference shown"
    assert changes["slo_share"].how == "bootstrap"
    for name in ("max_concurrency", "ttft_s.max", "ttft_s.p99"):
        assert (changes[name].how, changes[name].verdict, changes[name].difference.low) == (
            "none",
            "not known",
            None,
        ), name
    mixed = compare([made_up_file("a", [1, 3, 4]), other]).points[0].changes[0]["tpot_s.mean"]
    assert (mixed.how, mixed.verdict) == ("bootstrap", "higher")


def of_one_distribution(seed: int) -> LoadTestFile:
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(0.1, 150))
    first_s = due_s + rng.lognormal(-2, 0.5, 150)
    run = columns(due_s=due_s, first_s=first_s, last_s=first_s + rng.gamma(9, 0.02, 150), num_output_tokens=[9] * 150)
    point = point_of([run_of(run, None, seed=seed, started_unix_s=0, window=None, slo=None)])
    return LoadTestFile(label="x", command=[], settings={}, server=None, points=[point])


@pytest.mark.long
@pytest.mark.slow
def test_equals_are_called_different_about_as_often_as_stated() -> None:
    """40 comparisons of independent metrics: 2 false differences are expected at 95%, of a bootstrap's 93% 3; more
    than 7 have a chance of 1%."""
    mistakes = 0
    for pair in range(20):
        (changes,) = compare([of_one_distribution(2 * pair), of_one_distribution(2 * pair + 1)]).points[0].changes
        mistakes += sum(changes[name].verdict in ("lower", "higher") for name in ("ttft_s.mean", "tpot_s.p50"))
    assert 1 <= mistakes <= 7


@pytest.mark.slow
def test_three_files_and_their_labels() -> None:
    comparison = compare([made_up_file("a", [1]), made_up_file("a", [1]), made_up_file("a (2)", [2])])
    assert comparison.labels == ("a", "a (2)", "a (2) (2)")
    same, other = comparison.points[0].changes
    assert all(change.difference.value == 0 for change in same.values())
    assert {change.verdict for change in same.values()} == {"no difference shown", "not known"}
    assert other["ttft_s.mean"].difference.value != 0


def swept_file(label: str, values: list[Any], **settings: Any) -> LoadTestFile:
    points = [made_up_file(label, [1], num_requests=30, swept={"request_rate": value}).points[0] for value in values]
    file = made_up_file(label, [1], num_requests=30, settings=settings)
    return file.model_copy(update={"points": points})


@pytest.mark.slow
def test_points_are_matched_by_their_values_however_written() -> None:
    comparison = compare([swept_file("a", [1.0, "2", "inf"]), swept_file("b", ["inf", "1", 4.0])])
    assert [point.swept for point in comparison.points] == [{"request_rate": 1.0}, {"request_rate": "inf"}]
    assert comparison.unmatched == (("a", {"request_rate": "2"}), ("b", {"request_rate": 4.0}))


@pytest.mark.slow
def test_a_file_that_does_not_sweep_a_setting_is_matched_by_the_setting() -> None:
    single = made_up_file("b", [1], num_requests=30, swept={}, settings={"request_rate": 2})
    comparison = compare([swept_file("a", [1.0, 2.0]), single])
    assert [point.swept for point in comparison.points] == [{"request_rate": 2.0}]


@pytest.mark.slow
def test_what_was_not_the_same_is_listed() -> None:
    base = made_up_file(
        "a", [1], num_requests=20, settings={"output_len": "128"}, server={"model": "demo", "options": {"x": "1"}}
    )
    other = made_up_file(
        "b",
        [1, 2],
        num_requests=20,
        source="simulate",
        settings={"output_len": 64, "seed": 5},
        server={"model": "demo", "options": {"x": "2"}},
    )
    listed = set(compare([base, other]).differences)
    assert listed == {
        SettingDifference("file", "source", ("loadtest", "simulate")),
        SettingDifference("file", "repetitions", ("[1]", "[2]")),
        SettingDifference("settings", "output_len", ("128", "64")),
        SettingDifference("settings", "seed", ("0", "5")),
        SettingDifference("server", "options.x", ("1", "2")),
    }
    without = made_up_file("c", [1], num_requests=20, settings={"output_len": 128}, server=None)
    assert SettingDifference("server", "model", ("demo", "(none)")) in compare([base, without]).differences
    assert compare([base, base]).differences == ()
    # A file of before an option does not have it, later ones have none where it was not given.
    later = base.model_copy(update={"settings": {**base.settings, "connections": None}})
    assert compare([base, later]).differences == ()


def test_a_comparison_needs_two_files() -> None:
    with pytest.raises(LoadTestError, match="two result files"):
        compare([made_up_file("a", [1], num_requests=20)])


@pytest.mark.slow
def test_files_that_were_read_back_compare_the_same(tmp_path: Any) -> None:
    files = [made_up_file("a", [1], num_requests=50), made_up_file("b", [2], num_requests=50)]
    back = [read(write(tmp_path / f"{file.label}.json", file)) for file in files]
    ours, theirs = (compare(each).points[0].changes[0] for each in (files, back))
    assert ours.keys() == theirs.keys()
    for name, change in ours.items():
        assert change.verdict == theirs[name].verdict, name
        assert change.difference.value == theirs[name].difference.value, "of the metrics, which are not rounded"


# ---------------------------------------------------------------- the terminal


def test_a_point_is_shown_in_100_columns() -> None:
    text = text_of(point_view(made_up_file("a", [1, 2], num_requests=200).points[0]))
    for part in (
        "request-rate 10",
        "mean of 2 runs",
        "request throughput",
        "requests/s",
        "kept the SLO",
        "95% interval",
    ):
        assert part in text, part
    for part in ("TTFT, ms", "TPOT, ms", "ITL, ms", "E2E, ms", "client's lag, ms", "p99.9", "KV blocks in use", "a.b"):
        assert part in text, part
    assert "…" not in text, "nothing is cut off"
    assert "step records were lost" in text
    assert "Run 1: " in text
    assert "TIMEOUT" in text


def test_the_first_line_has_the_whole_run_and_the_second_the_window() -> None:
    """A second of 10 requests, each of 5 tokens, which all end long after the last arrival."""
    due_s = np.arange(10) / 10
    run = columns(due_s=due_s, first_s=due_s + 30, last_s=due_s + 39.1, num_output_tokens=np.full(10, 5))
    runs = [run_of(run, None, seed=1, started_unix_s=0, window=window, slo=None) for window in ((0.0, 0.9), None)]
    first, second = text_of(point_view(point_of(runs[:1]))).splitlines()[:2]
    assert first.strip() == "10 of 10 completed in 40 s: 0.250 requests/s, 1.25 tokens/s"
    assert second.strip() == "below: what was due or came from 0 to 0.900 s of it, 10 requests in 0.900 s"
    whole = text_of(point_view(point_of(runs[1:]))).splitlines()
    assert whole[0] == first
    assert "below" not in whole[1]
    failed = columns(due_s=due_s, sent_s=due_s, error=["UNAVAILABLE"] * 10)
    none = point_of([run_of(failed, None, seed=1, started_unix_s=0, window=None, slo=None)])
    assert text_of(point_view(none)).splitlines()[0].strip() == "0 of 10 completed in 0 s"


@pytest.mark.slow
def test_a_narrow_terminal_is_not_overrun() -> None:
    files = [made_up_file("a", [1], num_requests=50), made_up_file("b", [2], num_requests=50)]
    assert "TTFT, ms" in text_of(point_view(files[0].points[0]), width=80)
    assert "TTFT mean, ms" in text_of(comparison_view(compare(files)), width=80)
    assert max(map(len, text_of(point_view(files[0].points[0]), width=160).splitlines())) <= 100


def test_a_point_of_one_run_is_shown_with_its_requests_and_long_times_in_seconds() -> None:
    slow = made_up(50, 1)
    slow.first_s += 5000
    slow.last_s += 5000
    slow.error[:] = ""
    point = point_of([run_of(slow, None, seed=1, started_unix_s=0, window=None, slo=None)])
    text = text_of(point_view(point, "a title"))
    assert "a title" in text
    assert "TTFT, s " in text
    assert "TPOT, ms" in text


@pytest.mark.slow
def test_a_comparison_is_shown_in_100_columns() -> None:
    rate = {"slo": Slo(ttft_s=0.3), "slo_share": 0.99, "tolerance": 0.05}
    base = swept_file("a", [1.0, 2.0], output_len=5).model_copy(
        update={"max_rate": MaxRate(held=4.25, failed=5, **rate)}
    )
    other = swept_file("with a long label", [1.0, 3.0], output_len=6)
    other = other.model_copy(update={"max_rate": MaxRate(held=None, failed=1, **rate)})
    text = text_of(comparison_view(compare([base, other])))
    assert "Differing settings" in text
    assert "settings: output_len" in text
    assert "with a long label against a at request-rate 1" in text
    assert "TTFT p99, ms" in text
    assert "Highest rate that held, requests/s: a 4.25, with a long label none" in text
    assert "Not all files have the point request-rate 2 of a." in text
    nothing = text_of(comparison_view(compare([swept_file("a", [1.0]), swept_file("b", [2.0])])))
    assert "nothing can be compared" in nothing


@pytest.mark.slow
@pytest.mark.parametrize("width", [30, 50, 80, 100, 200])
def test_numbers_of_a_sweep_are_whole_in_every_width(width: int) -> None:
    """Labels wrap, and columns go below; lengths are no names of emoji, and brackets are no markup."""
    (point,) = made_up_file("a", [1], num_requests=50).points
    swept = [{"request_rate": 17.25, "input_len": "uniform:100:300"}, {"request_rate": 3.0, "workload": "[bold]a.b"}]
    text = text_of(points_view([point_of(point.runs, each) for each in swept]), width)
    assert "…" not in text
    for metric in ("output_tokens_per_s", "ttft_s.p99", "tpot_s.p50"):
        assert text.count(number(point.summary[metric].value * (1 if "tokens" in metric else 1000))) >= 2, metric
    rows = " ".join(text.split())
    assert "uniform:100:300" in rows
    assert "[bold]a.b" in rows
    assert ("SLO" in text.splitlines()[1]) == (width >= 100), "side by side where there is room"


def test_a_table_is_split_and_its_words_stand_to_the_left() -> None:
    rows = [["first, with a long name", "1,234,567", "lower"], ["[red]second[/red]", "2", "no"]]
    table = NumberTable(["", "number", "verdict"], rows, title="A [title]", caption="the end", text_columns=[2])
    assert [line for line in text_of(table, 60).splitlines() if line.strip(" ─")] == [
        "A [title]",
        "                              number  verdict",
        "  first, with a long name  1,234,567  lower",
        "  [red]second[/red]                2  no",
        "the end",
    ]
    narrow = text_of(table, 24)
    assert narrow.count("A [title]") == narrow.count("the end") == 1
    assert "1,234,567" in narrow
    assert [line.split() for line in narrow.splitlines()].count(["verdict"]) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (4.0, "4"),
        (1234567.8, "1,234,568"),
        (12.345, "12.3"),
        (0.012345, "0.0123"),
        (-0.5, "-0.500"),
        (1e-7, "1e-07"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_a_saturated_client_is_reported() -> None:
    due_s = np.arange(10.0)
    quick = measure(columns(due_s=due_s, sent_s=due_s, first_s=due_s + 1, last_s=due_s + 1), window=None, slo=None)
    assert notices(quick) == []
    late = measure(
        columns(due_s=due_s, sent_s=due_s + 0.02, first_s=due_s + 1, last_s=due_s + 1), window=None, slo=None
    )
    (notice,) = notices(late)
    assert notice.startswith(
        "The client was late: requests were sent 20.0 ms after they were due at p99, 2% of the median TTFT"
    )
    small = columns(due_s=due_s, sent_s=due_s + 0.002, first_s=due_s + 0.01, last_s=due_s + 0.01)
    (notice,) = notices(measure(small, window=None, slo=None))
    assert "2.00 ms after they were due at p99, 20% of the median TTFT" in notice


def test_a_server_that_falls_behind_is_reported() -> None:
    """Ten requests a second are due, and eight end."""
    due_s = np.arange(1000) / 10
    done = np.arange(1000) / 8 + 0.1
    behind = columns(due_s=due_s, first_s=done, last_s=done)
    (notice,) = notices(measure(behind, window=(10.0, 99.9), slo=None))
    assert notice.startswith("The server did not keep up: 10.0 requests/s were due, 8.00 ended.")
    assert notices(measure(behind, window=None, slo=None)) == [], "over the whole run all of them end"
    few = columns(due_s=due_s[:20], first_s=done[:20], last_s=done[:20])
    assert notices(measure(few, window=(0.5, 1.9), slo=None)) == [], "a few may be chance"


def test_errors_lost_steps_and_limits_that_cannot_be_judged_are_reported() -> None:
    run = columns(
        due_s=[0.0] * 3, first_s=[1.0] * 3, last_s=[2.0] * 3, num_output_tokens=[3] * 3, error=["A", "B", "B"]
    )
    found = notices(measure(run, window=None, slo=parse_slo("itl=0.1"), steps=made_up_steps(5, 1)))
    assert found == [
        "3 of 3 requests failed: B 2, A 1.",
        "No request completed: there are no latencies.",
        "3 step records were lost: occupancy and KV use are computed from the others.",
    ]
    assert notices(measure(run, window=(100.0, 200.0), slo=None)) == [
        "No request was due within the window, 100 to 200 s of the run: there are no latencies."
    ]
    run.error[:] = ["", "B", "B"]
    assert notices(measure(run, window=None, slo=None), {"A": "of another run", "B": "no such model"}) == [
        "2 of 3 requests failed: B 2.",
        "B: no such model",
        "Latencies are those of completed requests.",
    ]
    run.error[:] = ""
    (notice,) = notices(measure(run, window=None, slo=parse_slo("itl=0.1")))
    assert "cannot be checked" in notice


def test_requests_that_failed_are_not_reported_again_as_a_server_that_fell_behind() -> None:
    due_s = np.arange(100) / 10
    refused = columns(due_s=due_s, sent_s=due_s, error=["HTTP_404"] * 100)
    assert notices(measure(refused, window=(0.0, 9.9), slo=None)) == [
        "100 of 100 requests failed: HTTP_404 100.",
        "No request completed: there are no latencies.",
    ]
