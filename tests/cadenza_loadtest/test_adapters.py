"""The adapters that requests of a load name, and what a result says of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from cadenza_loadtest.measures.metrics import MAX_ADAPTERS, measure
from cadenza_loadtest.measures.uncertainty import replicates_of
from cadenza_loadtest.reports.summary import point_view
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.results.csv_files import write_csv
from cadenza_loadtest.results.results import point_of, read, run_of, write
from cadenza_loadtest.workloads.adapters import adapter_names, parse_adapters
from cadenza_loadtest.workloads.workloads import make_workload
from cadenza_simulator.campaign import simulate
from cadenza_simulator.options import find_profile, scheduler_config
from tests.helpers.loadtest.loadtest_runs import made_up, made_up_file
from tests.helpers.loadtest.specs import make_spec

COUNT = 20_000


def drawn(count: int = COUNT, seed: int = 1, **options: object) -> list[str]:
    return [shape.adapter for shape in make_workload(make_spec(**options)).shapes(count, seed)]


@pytest.mark.parametrize(("text", "exponent"), [("zipf:1000", 1.0), ("zipf:1000:1.5", 1.5)])
def test_adapters_follow_zipfs_law(text: str, exponent: float) -> None:
    found = Counter(drawn(adapters=text))
    names = adapter_names(1000)
    assert found.keys() <= set(names)
    weights = np.arange(1, 1001) ** -exponent
    expected = COUNT * weights / weights.sum()
    # The test of the first ones, and of all others as one: they come too seldom each.
    heads = [found[name] for name in names[:20]]
    counts, wanted = [*heads, COUNT - sum(heads)], [*expected[:20], COUNT - expected[:20].sum()]
    assert stats.chisquare(counts, wanted).pvalue > 0.001


def test_equal_weights_and_names_with_theirs() -> None:
    assert stats.chisquare(list(Counter(drawn(adapters="uniform:16")).values())).pvalue > 0.001
    assert set(drawn(200, adapters="uniform:3", adapter_prefix="x")) == {"x0000", "x0001", "x0002"}
    found = Counter(drawn(adapters="a:3,team:b:1", adapter_share=0.5))
    assert (
        stats.chisquare([found["a"], found["team:b"], found[""]], [COUNT * w for w in (0.375, 0.125, 0.5)]).pvalue
        > 0.001
    )


def test_names_have_one_length_and_differ() -> None:
    assert adapter_names(2) == ["adapter-0000", "adapter-0001"]
    names = adapter_names(12_000, "x")
    assert (names[0], names[-1], len(set(names))) == ("x00000", "x11999", 12_000)


def test_adapters_change_nothing_else_and_a_session_keeps_its_own() -> None:
    plain, named = (
        list(make_workload(make_spec(**options)).shapes(500, 3)) for options in ({}, {"adapters": "zipf:9"})
    )
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in plain] == [
        (each.num_prompt_tokens, each.num_output_tokens) for each in named
    ]
    assert not any(each.adapter for each in plain)
    sessions: dict[int, set[str]] = {}
    for turn in make_workload(make_spec(workload="multi-turn", adapters="uniform:4")).shapes(50, 3):
        sessions.setdefault(turn.session, set()).add(turn.adapter)
    assert all(len(names) == 1 for names in sessions.values())
    assert len(set.union(*sessions.values())) == 4


def test_a_file_names_adapters_and_the_option_fills_in_the_others(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines = [{"prompt": [1], "output_len": 2, "adapter": "own"}, {"prompt": [1], "output_len": 2}]
    path.write_text("\n".join(map(json.dumps, [*lines, {**lines[0], "adapter": ""}])))
    assert drawn(3, workload=str(path), adapters="a") == ["own", "a", ""]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("zipf", "adapters look like zipf:1000, zipf:1000:1.5, uniform:16, a:3,b:1"),
        ("uniform:4:2", "adapters look like"),
        ("zipf:0", "the number of adapters must be 1 to 1,000,000, not '0'"),
        ("zipf:x", "not 'x'"),
        ("zipf:-4", "not '-4'"),
        ("zipf:2000000", "must be 1 to 1,000,000"),
        ("zipf:10:0", "the exponent must be over 0"),
        ("zipf:10:nan", "the exponent must be over 0"),
        ("zipf:10:inf", "the exponent must be over 0"),
        ("zipf:10:99", "the exponent must be at most 10, not 99"),
        ("a,,b", "'' has no name"),
        (":3", "':3' has no name"),
        ("a:0", "the weight in 'a:0' must be over 0"),
        ("a:x", "must be a number, not 'x'"),
        ("a,a", "a is given twice"),
    ],
)
def test_wrong_adapters_are_refused(text: str, problem: str) -> None:
    with pytest.raises(LoadTestError) as caught:
        parse_adapters(text)
    assert str(caught.value).startswith(f"--adapters {text}: ")
    assert problem in str(caught.value)
    with pytest.raises(LoadTestError, match="--adapters"):
        make_spec(adapters=text)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"adapters": "a", "adapter_share": 0}, "--adapter-share: "),
        ({"adapters": "a", "adapter_share": 1.5}, "--adapter-share: "),
        ({"adapter_share": 0.5}, "--adapter-share is for --adapters"),
        ({"adapter_prefix": "x"}, "--adapter-prefix is for --adapters"),
        ({"adapters": "zipf:3", "adapter_prefix": ""}, "--adapter-prefix: "),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], problem: str) -> None:
    with pytest.raises(LoadTestError, match=problem):
        make_spec(**options)


def test_the_simulator_has_none() -> None:
    from cadenza_loadtest.settings import LoadSettings

    settings = LoadSettings(adapters="zipf:3", num_requests=3)
    with pytest.raises(LoadTestError, match="--adapters: cannot be simulated"):
        simulate(settings, [find_profile("a100-40gb-opt-13b")], scheduler_config({}), 0)


@pytest.mark.slow
def test_a_result_has_the_adapter_of_each_request(tmp_path: Path) -> None:
    columns = made_up(300, 1, adapters=2)
    metrics = measure(columns, window=None, slo=None)
    assert metrics.num_adapters == 2
    assert metrics.by_adapter.keys() == {"", "a1", "a2"}
    assert sum(group.num_requests for group in metrics.by_adapter.values()) == 300
    assert any(name.startswith("by_adapter.a1.ttft_s") for name in replicates_of(columns, metrics))
    run = run_of(columns, None, seed=1, started_unix_s=1.0, window=None, slo=None)
    file = made_up_file("one", [1]).model_copy(update={"points": [point_of([run])]})
    again = read(write(tmp_path / "one.json", file))
    assert again.points[0].runs[0].requests.adapter.tolist() == columns.adapter.tolist()
    assert again.points[0].summary["num_adapters"].value == 2
    requests = (write_csv(again, tmp_path)[0]).read_text().splitlines()
    place = requests[0].split(",").index("adapter")
    assert [line.split(",")[place] for line in requests[1:]] == columns.adapter.tolist()
    console = Console(width=100, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(point_view(again.points[0]))
    text = capture.get()
    assert "adapters, distinct" in text
    assert "a2" in text


def test_of_many_adapters_only_the_number_is_known() -> None:
    assert len(measure(made_up(300, 1, adapters=MAX_ADAPTERS), window=None, slo=None).by_adapter) == MAX_ADAPTERS + 1
    metrics = measure(made_up(300, 1, adapters=MAX_ADAPTERS + 1), window=None, slo=None)
    assert (metrics.num_adapters, metrics.by_adapter) == (MAX_ADAPTERS + 1, {})


def test_a_result_without_adapters_is_as_before(tmp_path: Path) -> None:
    """Also one from before adapters were recorded."""
    file = made_up_file("one", [1])
    path = write(tmp_path / "one.json", file)
    content = json.loads(path.read_text())
    run = content["points"][0]["runs"][0]
    assert set(run["requests"].pop("adapter")) == {""}
    assert (run["metrics"].pop("num_adapters"), run["metrics"].pop("by_adapter")) == (None, {})
    path.write_text(json.dumps(content))
    again = read(path)
    assert again.model_dump_json() == file.model_dump_json()
    assert set(again.points[0].runs[0].requests.adapter) == {""}
