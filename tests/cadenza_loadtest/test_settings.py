"""The settings of a load test: invalid settings, sweeps, and due times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza_loadtest.rate_search import MAX_FACTOR, RateSearch
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.schedule import DEFAULT_REQUESTS, make_schedule, planned_points
from cadenza_loadtest.settings import changed, make_settings, merged_values


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"request_rate": "-1"}, "--request-rate: input should be greater than 0"),
        ({"request_rate": "fast"}, "--request-rate: input should be a valid number"),
        ({"request_rate": "3", "concurrency": "3"}, "--request-rate .* or --concurrency"),
        ({"input_len": "uniform:5:2"}, "--input-len: "),
        ({"workload": "random", "num_turns": "3"}, "--num-turns is for --workload multi-turn"),
        ({"slo": "ttft"}, "^--slo: 'ttft' must be NAME=SECONDS"),
        ({"slo": "TTFT=0.5"}, "^--slo: 'TTFT=0.5' must be NAME=SECONDS, NAME one of ttft, tpot, itl, e2e$"),
        ({"slo": "ttft=500ms"}, "^--slo: ttft must be a number of seconds over 0, not '500ms'$"),
        ({"window": "5:3"}, "--window: its start must be 0 or more"),
        ({"window": "later"}, "--window: must be auto, all or START:END"),
        ({"find_max_rate": True}, "--find-max-rate needs --slo"),
        ({"find_max_rate": True, "slo": "ttft=1", "concurrency": "2"}, "sets the rate itself"),
        ({"duration_s": "5"}, "would have no end"),
        ({"slo": "itl=1", "keep_itl": False}, "--no-keep-itl"),
        ({"api": "openai"}, "--api openai needs --url"),
        ({"api": "session", "url": "http://x"}, "--url is for --api openai"),
        ({"nothing": "1"}, "--nothing: extra inputs"),
        ({"concurrency": "3", "arrivals": "gamma"}, "cannot be used with --concurrency"),
        ({"concurrency": "3", "arrivals": "trace"}, "cannot be used with --concurrency"),
        ({"endpoint": "chat"}, "--endpoint is for --api openai, not session"),
        ({"served_model_name": "m", "api": "generate"}, "--served-model-name is for --api openai, not generate"),
        ({"plain_fields": True}, "--plain-fields is for --api openai"),
        ({"connections": "0"}, "--connections: input should be greater than or equal to 1"),
    ],
)
def test_wrong_settings_are_named(given_: dict[str, object], message: str) -> None:
    with pytest.raises(LoadTestError, match=message):
        make_settings(given_)


@pytest.mark.parametrize(
    "given_",
    [
        {"find_max_rate": True, "slo": "ttft=1", "duration_s": "60"},
        {"sweep": ["request-rate=5,10"], "duration_s": "5"},
        {"sweep": ["concurrency=1,2"], "duration_s": "5"},
        {"sweep": ["num-requests=1,2"], "duration_s": "5"},
    ],
)
def test_a_duration_has_an_end_where_the_points_say_it(given_: dict[str, object]) -> None:
    assert planned_points(make_settings(given_))


def test_a_sweep_of_something_else_gives_a_duration_no_end() -> None:
    with pytest.raises(LoadTestError, match="would have no end"):
        planned_points(make_settings({"sweep": ["output-len=5,10"], "duration_s": "5"}))


def test_a_url_implies_the_api() -> None:
    assert make_settings({"url": "http://127.0.0.1:8000/v1", "api": None}).api == "openai"


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("request-rate", "must be NAME=VALUE"),
        ("request-rate=", "must be NAME=VALUE"),
        ("request-rate=1,1", "given twice"),
        ("request-rat=1", "did you mean request-rate"),
        ("api=session", "cannot be swept"),
        ("sweep=1", "cannot be swept"),
    ],
)
def test_wrong_sweeps_are_named(sweep: str, message: str) -> None:
    with pytest.raises(LoadTestError, match=message):
        _ = make_settings({"sweep": [sweep]}).points


def test_several_sweeps_make_every_combination() -> None:
    settings = make_settings({"sweep": ["request-rate=1,2", "output-len=8,uniform:1:3"], "seed": 5})
    rows = [changed(settings, swept) for swept in settings.points]
    assert [(row.request_rate, row.output_len) for row in rows] == [
        (1.0, "8"), (1.0, "uniform:1:3"), (2.0, "8"), (2.0, "uniform:1:3"),
    ]  # fmt: skip
    assert all(row.seed == 5 for row in rows)


def test_one_name_in_two_sweeps_is_refused() -> None:
    with pytest.raises(LoadTestError, match="given twice"):
        _ = make_settings({"sweep": ["request-rate=1", "request-rate=2"]}).points


def test_what_is_given_again_is_swept_no_more() -> None:
    before = {"sweep": ("request-rate=1,2", "output-len=8,16"), "seed": 3}
    assert merged_values(before, {"request_rate": 5.0, "seed": None}) == {
        "sweep": ["output-len=8,16"],
        "seed": 3,
        "request_rate": 5.0,
    }
    assert merged_values(before, {"sweep": ["seed=1,2"]})["sweep"] == ["seed=1,2"]
    assert merged_values({"request_rate": 3.0}, {"sweep": ["request-rate=1,2"]})["sweep"] == ["request-rate=1,2"]


def test_what_is_given_and_swept_is_refused() -> None:
    with pytest.raises(LoadTestError, match="--request-rate: --sweep request-rate=1,2 sets it, too"):
        merged_values({}, {"sweep": ["request-rate=1,2"], "request_rate": 3.0})


def test_settings_survive_json() -> None:
    settings = make_settings(
        {"slo": "ttft=1", "sweep": ["burstiness=1,2"], "arrivals": "gamma", "workload": "sharegpt"}
    )
    text = json.dumps(settings.model_dump(mode="json"))
    assert make_settings(json.loads(text)) == settings
    assert math.isinf(settings.request_rate)


def test_a_schedule_depends_on_nothing_but_settings_and_seed() -> None:
    settings = make_settings({"request_rate": "5", "num_requests": "50"})
    first = list(make_schedule(settings, 3))
    assert first == list(make_schedule(settings, 3))
    assert first != list(make_schedule(settings, 4))
    assert len(first) == 50
    assert [due for due, _ in first] == sorted(due for due, _ in first)


def test_a_schedule_at_another_rate_has_the_same_requests() -> None:
    slow = list(make_schedule(make_settings({"request_rate": "1"}), 0))
    fast = list(make_schedule(make_settings({"request_rate": "4"}), 0))
    assert [shape for _, shape in slow] == [shape for _, shape in fast]
    assert [due for due, _ in slow] == pytest.approx([4 * due for due, _ in fast])
    assert len(slow) == DEFAULT_REQUESTS


def test_a_duration_ends_the_schedule() -> None:
    due = [due for due, _ in make_schedule(make_settings({"request_rate": "100", "duration_s": "2"}), 0)]
    assert 140 < len(due) < 260  # Poisson with mean 200: over 4 standard deviations
    assert due[-1] <= 2


def test_later_turns_carry_the_time_of_the_first() -> None:
    settings = make_settings({"workload": "multi-turn", "num_requests": "5", "request_rate": "1"})
    rows = list(make_schedule(settings, 0))
    assert {shape.session for _, shape in rows} == set(range(5))
    for session in range(5):
        assert len({due for due, shape in rows if shape.session == session}) == 1


def test_a_trace_needs_timestamps(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt_tokens": 5, "output_len": 2}\n', encoding="utf-8")
    with pytest.raises(LoadTestError, match="no timestamp"):
        list(make_schedule(make_settings({"workload": str(file), "arrivals": "trace"}), 0))
    file.write_text(
        "".join(f'{{"prompt_tokens": 5, "output_len": 2, "timestamp": {at}}}\n' for at in (10, 11.5)),
        encoding="utf-8",
    )
    rows = list(make_schedule(make_settings({"workload": str(file), "arrivals": "trace"}), 0))
    assert [due for due, _ in rows] == [0.0, 1.5]


@given(limit=st.floats(1e-6, 1e6), start=st.floats(0.01, 100), tolerance=st.floats(0.01, 0.5))
def test_the_search_finds_the_limit(limit: float, start: float, tolerance: float) -> None:
    search = RateSearch(start, tolerance)
    tried = []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.record(rate, rate <= limit)
    assert len(tried) < 40
    assert all(start / MAX_FACTOR / 2 <= rate <= 2 * start * MAX_FACTOR for rate in tried)
    if search.held is not None:
        assert search.held <= limit
    if search.failed is not None:
        assert search.failed > limit
    if search.held is not None and search.failed is not None:
        assert search.failed <= search.held * (1 + tolerance)
