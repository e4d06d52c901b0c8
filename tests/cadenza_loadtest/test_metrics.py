"""A run in numbers: worked out by hand, and against loops that do the same thing slowly."""

from __future__ import annotations

import json
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import in_flight, longest_gap_s, per_request, tokens_within
from cadenza_loadtest.measures.metric_names import describe, values_of
from cadenza_loadtest.measures.metrics import Slo, Spread, measure, parse_slo, spread_of, steady_window
from cadenza_loadtest.requests import LoadTestError
from tests.helpers.loadtest.loadtest_runs import NAN, columns, made_up, made_up_steps

# One that was sent late, one with two samples, one that failed half way, one that never began.
FOUR: dict[str, Any] = {
    "due_s": [0.0, 1.0, 2.0, 3.0],
    "sent_s": [0.5, 1.0, 2.0, 3.0],
    "first_s": [1.0, 1.5, 2.5, NAN],
    "last_s": [4.0, 3.5, 3.0, NAN],
    "num_output_tokens": [4, 10, 2, 0],
    "num_samples": [1, 2, 1, 1],
    "num_prompt_tokens": [100, 50, 30, 20],
    "num_cached_tokens": [-1, 16, -1, -1],
    "num_preemptions": [1, 0, -1, -1],
    "queue_s": [0.1, 0.2, NAN, NAN],
    "kind": ["long", "short", "short", "long"],
    "error": ["", "", "TIMEOUT", "RESOURCE_EXHAUSTED"],
}
FOUR_GAPS = [[1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5], [0.5], []]


def test_a_run_by_hand() -> None:
    got = measure(columns(FOUR_GAPS, **FOUR), window=None, slo=Slo(ttft_s=0.9, tpot_s=0.6))
    assert (got.num_requests, got.num_ok, got.errors) == (4, 2, {"RESOURCE_EXHAUSTED": 1, "TIMEOUT": 1})
    assert (got.num_prompt_tokens, got.num_output_tokens, got.num_cached_tokens, got.num_preemptions) == (
        150,
        14,
        16,
        1,
    )
    assert got.duration_s == 4.0
    assert got.offered_per_s == 1.0, "a second between each"
    assert got.requests_per_s == 2 / 4
    assert got.output_tokens_per_s == 16 / 4, "tokens of the one that failed came, too"
    assert got.prompt_tokens_per_s == 180 / 4, "of the three that had a first token"
    assert got.ttft_s is not None
    assert got.ttft_s == Spread(count=2, mean=0.75, p50=0.75, p90=0.95, p95=0.975, p99=0.995, p99_9=0.9995, max=1.0)
    assert got.tpot_s is not None
    assert (got.tpot_s.count, got.tpot_s.mean) == (2, (3 / 3 + 2 / 4) / 2), "five tokens for each of two samples"
    assert got.itl_s is not None
    assert (got.itl_s.count, got.itl_s.mean, got.itl_s.max) == (7, pytest.approx(5 / 7), 1.0)
    assert got.e2e_s is not None
    assert (got.e2e_s.p50, got.e2e_s.max) == (3.25, 4.0)
    assert got.queue_s is not None
    assert (got.queue_s.count, got.queue_s.max) == (2, 0.2)
    assert got.lag_s is not None
    assert (got.lag_s.count, got.lag_s.max) == (4, 0.5), "of those that failed, too"
    assert got.slo_share == 1 / 4
    assert got.goodput_per_s == 1 / 4
    # In flight: 0 to 4, 1 to 3.5, 2 to 3, and nothing of the one that was refused.
    assert (got.mean_concurrency, got.max_concurrency) == ((4 + 2.5 + 1) / 4, 3)
    assert set(got.by_kind) == {"long", "short"}
    assert (got.by_kind["short"].num_requests, got.by_kind["short"].num_ok, got.by_kind["short"].slo_share) == (
        2,
        1,
        0.5,
    )
    assert got.by_kind["long"].ttft_s == spread_of(np.array([1.0]))
    assert got.by_tenant == {}
    assert got.steps is None


def test_a_window_counts_requests_by_due_time_and_tokens_by_arrival() -> None:
    got = measure(columns(FOUR_GAPS, **FOUR), window=(1.0, 3.0), slo=Slo(ttft_s=0.9))
    assert (got.num_requests, got.num_ok, got.duration_s) == (3, 1, 2.0), "both ends belong to the window"
    assert got.ttft_s is not None
    assert (got.ttft_s.count, got.ttft_s.max) == (1, 0.5)
    assert got.offered_per_s == 3 / 2
    assert got.requests_per_s == 0, "the two that ended well did so after it"
    # First request: tokens at 1, 2, 3; the second's five pairs at 1.5, 2, 2.5, 3, 3.5; the third's at 2.5 and 3.
    assert got.output_tokens_per_s == (3 + 8 + 2) / 2
    assert got.prompt_tokens_per_s == 180 / 2
    assert got.mean_concurrency == (2 + 2 + 1) / 2
    assert got.slo_share == 1 / 3
    assert got.goodput_per_s == 0, "the good one ended after it, too"


def test_goodput_is_a_part_of_the_throughput() -> None:
    """Of five that end within the window, two are late, and one of the good ones was due before it."""
    due_s, last_s = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.5, 1.5, 4.0, 5.0, 4.5, 5.5]
    got = measure(columns(due_s=due_s, first_s=last_s, last_s=last_s), window=(1.0, 5.0), slo=Slo(e2e_s=1.6))
    assert (got.requests_per_s, got.goodput_per_s) == (5 / 4, 3 / 4)
    assert got.slo_share == 3 / 5, "of those that were due within it, whenever they end"


@given(st.data())
def test_goodput_is_never_more_than_the_throughput(data: st.DataObject) -> None:
    run, start = data.draw(some_runs()), data.draw(st.integers(0, 40)) / 8
    for window in (None, (start, start + data.draw(st.integers(1, 40)) / 8)):
        got = measure(run, window=window, slo=Slo(ttft_s=1.0, tpot_s=0.5))
        if got.requests_per_s is not None:
            assert got.goodput_per_s is not None
            assert got.goodput_per_s <= got.requests_per_s


def test_a_stall_of_the_client_is_in_the_latencies_and_not_hidden() -> None:
    """Sent five seconds late and answered at once: its user waited for five seconds."""
    late = columns(due_s=[1.0], sent_s=[6.0], first_s=[6.1], last_s=[6.1])
    got = measure(late, window=None, slo=Slo(ttft_s=1.0))
    assert got.ttft_s is not None
    assert got.lag_s is not None
    assert (got.ttft_s.p50, got.lag_s.p50) == (pytest.approx(5.1), 5.0)
    assert got.slo_share == 0


def test_where_nothing_was_measured_there_is_none_and_no_nan() -> None:
    nothing = measure(columns(), window=None, slo=Slo(ttft_s=1.0))
    failed = measure(columns(due_s=[1.0, 2.0], error=["A", "B"]), window=(0.0, 4.0), slo=Slo(ttft_s=1.0))
    for got in (nothing, failed):
        assert got.ttft_s is got.tpot_s is got.itl_s is got.e2e_s is got.queue_s is None
        json.dumps(got.model_dump(), allow_nan=False)
    assert (nothing.num_requests, nothing.slo_share, nothing.goodput_per_s, nothing.requests_per_s) == (
        0,
        None,
        None,
        None,
    )
    assert (failed.slo_share, failed.goodput_per_s, failed.requests_per_s, failed.num_cached_tokens) == (0, 0, 0, None)


def test_all_at_once_has_no_offered_rate() -> None:
    burst = columns(due_s=[0.0] * 3, first_s=[1.0, 2.0, 3.0], last_s=[1.0, 2.0, 3.0])
    got = measure(burst, window=steady_window(burst), slo=None)
    assert (got.window_s, got.offered_per_s, got.requests_per_s, got.max_concurrency) == (None, None, 1.0, 3)


def test_a_closed_loop_of_two_users_has_two_in_flight() -> None:
    """Each sends the next request when the last has ended, at that very moment."""
    due_s = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    done = [due + 1 for due in due_s]
    got = measure(columns(due_s=due_s, first_s=done, last_s=done), window=None, slo=None)
    assert (got.mean_concurrency, got.max_concurrency) == (2.0, 2)


def test_an_answer_of_one_token_has_no_tpot() -> None:
    one = columns(due_s=[0.0, 0.0], first_s=[1.0, 1.0], last_s=[1.0, 1.0], num_output_tokens=[1, 3], num_samples=[1, 3])
    assert np.isnan(per_request(one)["tpot_s"]).all()
    assert measure(one, window=None, slo=Slo(tpot_s=0.01, itl_s=0.01)).slo_share == 1, (
        "it keeps limits on what it lacks"
    )


def test_an_answer_in_one_piece_has_no_tpot() -> None:
    """Ten tokens at once, as of a beam search, beside ten that take nine seconds."""
    run = columns(due_s=[0.0, 0.0], first_s=[1.0, 1.0], last_s=[1.0, 10.0], num_output_tokens=[10, 10])
    assert per_request(run)["tpot_s"] == pytest.approx([NAN, 1.0], nan_ok=True)
    got = measure(run, window=None, slo=Slo(tpot_s=0.5))
    assert got.tpot_s is not None
    assert (got.tpot_s.count, got.tpot_s.p50) == (1, 1.0)
    assert got.slo_share == 0.5, "what is not known keeps its limit"


def test_a_window_must_end_after_it_starts() -> None:
    with pytest.raises(LoadTestError, match="--window 2:2"):
        measure(columns(due_s=[0.0]), window=(2.0, 2.0), slo=None)


def test_steps_by_hand() -> None:
    steps = made_up_steps(8, 1)
    steps.num_sequences[:] = [1, 2, 3, 4, 5, 6, 7, 8]
    steps.num_used_blocks[:] = [0, 10, 20, 30, 40, 50, 60, 70]
    steps.num_preempted[:] = [0, 0, 1, 0, 0, 2, 0, 0]
    got = measure(columns(due_s=[0.0]), window=(0.05, 0.125), slo=None, steps=steps).steps
    assert got is not None
    assert (got.num_steps, got.num_dropped, got.num_preemptions) == (4, 3, 3)
    assert (got.mean_sequences, got.mean_kv_use, got.max_kv_use) == (4.5, pytest.approx(0.35), 0.5)
    assert got.mean_device_s == pytest.approx(steps.device_s[2:6].mean())
    steps.num_blocks[:] = 0
    without_pool = measure(columns(due_s=[0.0]), window=None, slo=None, steps=steps).steps
    assert without_pool is not None
    assert without_pool.mean_kv_use is None
    assert measure(columns(due_s=[0.0]), window=(9.0, 10.0), slo=None, steps=steps).steps is None


# ---------------------------------------------------------------- against slow loops


@st.composite
def some_runs(draw: st.DrawFn) -> RequestColumns:
    """Times on a grid of eighths, so that sums are exact and ties happen."""
    n = draw(st.integers(1, 12))
    grid = st.integers(0, 40).map(lambda k: k / 8)
    due_s = [draw(grid) for _ in range(n)]
    sent_s = [due + draw(st.integers(0, 4)) / 8 for due in due_s]
    gaps, first_s, last_s, tokens, samples, errors = [], [], [], [], [], []
    keep = draw(st.booleans())
    for sent in sent_s:
        arrived = draw(st.integers(0, 9)) > 0
        first_s.append(sent + draw(st.integers(1, 16)) / 8 if arrived else NAN)
        own = [draw(st.integers(0, 8)) / 8 for _ in range(draw(st.integers(0, 6)))] if arrived else []
        last_s.append(first_s[-1] + sum(own))
        gaps.append(own if keep else [])
        samples.append(draw(st.integers(1, 3)))
        tokens.append(samples[-1] * (len(own) + 1) if arrived else 0)
        errors.append("" if arrived and draw(st.integers(0, 4)) else "CODE")
    return columns(
        gaps,
        due_s=due_s,
        sent_s=sent_s,
        first_s=first_s,
        last_s=last_s,
        num_output_tokens=tokens,
        num_samples=samples,
        error=errors,
    )


def slow_percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] * (1 - (place - low)) + ordered[high] * (place - low)


def slow_gaps(run: RequestColumns) -> list[list[float]]:
    ends = np.cumsum(run.num_gaps)
    return [run.gap_s[end - count : end].tolist() for end, count in zip(ends, run.num_gaps, strict=True)]


@given(run=some_runs(), start=st.integers(0, 30), length=st.integers(1, 30))
def test_latencies_are_those_of_a_loop(run: RequestColumns, start: int, length: int) -> None:
    window = (start / 8, (start + length) / 8)
    got = measure(run, window=window, slo=Slo(ttft_s=1.0, tpot_s=0.5))
    ttft, tpot, e2e, itl, good, num_due = [], [], [], [], 0, 0
    for row, own in enumerate(slow_gaps(run)):
        if not window[0] <= run.due_s[row] <= window[1]:
            continue
        num_due += 1
        if run.error[row]:
            continue
        ttft.append(run.first_s[row] - run.due_s[row])
        e2e.append(run.last_s[row] - run.due_s[row])
        itl += own
        each = run.num_output_tokens[row] / run.num_samples[row]
        if each > 1 and run.last_s[row] > run.first_s[row]:
            tpot.append((run.last_s[row] - run.first_s[row]) / (each - 1))
        good += ttft[-1] <= 1.0 and (run.last_s[row] - run.first_s[row]) <= 0.5 * (each - 1)
    assert got.num_requests == num_due
    assert got.slo_share == (good / num_due if num_due else None)
    for spread, values in ((got.ttft_s, ttft), (got.tpot_s, tpot), (got.e2e_s, e2e), (got.itl_s, itl)):
        if not values:
            assert spread is None
            continue
        assert spread is not None
        assert (spread.count, spread.max) == (len(values), max(values))
        assert spread.mean == pytest.approx(sum(values) / len(values))
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p99_9", 0.999)):
            assert getattr(spread, name) == pytest.approx(slow_percentile(values, share))


@pytest.mark.slow
@given(run=some_runs(), start=st.integers(0, 30), length=st.integers(1, 30))
def test_tokens_and_requests_in_flight_are_those_of_a_loop(run: RequestColumns, start: int, length: int) -> None:
    # Between the grid's points: whether a token on the border is within is another test's matter.
    window = (start / 8 + 1 / 100, (start + length) / 8 + 1 / 100)
    kept = len(run.gap_s) > 0
    count = 0.0
    for row, own in enumerate(slow_gaps(run)):
        if not run.num_output_tokens[row]:
            continue
        messages = int(run.num_output_tokens[row] / run.num_samples[row])
        step = (run.last_s[row] - run.first_s[row]) / max(messages - 1, 1)
        times = np.cumsum([run.first_s[row], *(own if kept else [step] * (messages - 1))])
        count += run.num_samples[row] * sum(window[0] <= time <= window[1] for time in times)
    assert tokens_within(run, window) == pytest.approx(count)
    ends = np.where(np.isnan(run.last_s), run.sent_s, run.last_s)
    # Nothing changes between two borders: look in the middle of each piece.
    borders = np.unique(np.clip([*window, *run.due_s, *ends], *window))
    inside = [int(((run.due_s < mid) & (ends > mid)).sum()) for mid in (borders[:-1] + borders[1:]) / 2]
    mean, most = in_flight(run, window)
    assert mean == pytest.approx(np.dot(inside, np.diff(borders)) / (window[1] - window[0]))
    assert most >= max(inside), "a request without a length is in flight at its moment only"
    if (ends > run.due_s).all():
        assert most == max(inside)


@pytest.mark.slow
@given(run=some_runs())
def test_the_longest_gap_is_that_of_a_loop(run: RequestColumns) -> None:
    longest = longest_gap_s(run)
    if not len(run.gap_s) and (run.ok & (run.last_s > run.first_s)).any():
        assert longest is None, "they were not kept"
        return
    assert longest is not None
    for value, own in zip(longest, slow_gaps(run), strict=True):
        assert value == max(own) if own else np.isnan(value)


def test_tokens_are_spread_evenly_where_gaps_were_not_kept() -> None:
    even = columns(due_s=[0.0], first_s=[1.0], last_s=[5.0], num_output_tokens=[9])
    assert tokens_within(even, (1.0, 5.0)) == 9, "the last one is on the border, which belongs to the window"
    assert tokens_within(even, (1.1, 2.0)) == 2
    assert tokens_within(even, (5.1, 9.0)) == 0


# ---------------------------------------------------------------- limits


def test_limits_are_read() -> None:
    slo = parse_slo(" ttft=0.5, tpot=0.05,itl=1,e2e=30 ")
    assert slo == Slo(ttft_s=0.5, tpot_s=0.05, itl_s=1, e2e_s=30)
    assert parse_slo(str(slo)) == slo
    assert slo.limits == {"ttft_s": 0.5, "tpot_s": 0.05, "itl_s": 1, "e2e_s": 30}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--slo .*NAME=SECONDS"),
        ("ttft", "--slo ttft: 'ttft' must be NAME=SECONDS"),
        ("ttft=0.5,", "--slo .*NAME=SECONDS"),
        ("tttf=0.5", "one of ttft, tpot, itl, e2e"),
        ("ttft=fast", "ttft must be a number of seconds over 0, not 'fast'"),
        ("ttft=0", "over 0"),
        ("ttft=nan", "over 0"),
        ("e2e=inf", "over 0"),
        ("ttft=1,ttft=2", "ttft is given twice"),
    ],
)
def test_wrong_limits_are_reported(text: str, message: str) -> None:
    with pytest.raises(LoadTestError, match=message):
        parse_slo(text)


def test_the_limit_on_itl_is_on_the_longest_pause() -> None:
    run = {"due_s": [0.0, 0.0], "first_s": [1.0, 1.0], "last_s": [2.0, 2.0], "num_output_tokens": [3, 3]}
    kept = columns([[0.5, 0.5], [0.2, 0.8]], **run)
    assert measure(kept, window=None, slo=Slo(itl_s=0.6)).slo_share == 0.5
    without = measure(columns(**run), window=None, slo=Slo(itl_s=0.6))
    assert (without.slo_share, without.goodput_per_s) == (None, None), "it is unknown"
    assert measure(columns(**run), window=None, slo=Slo(tpot_s=0.6)).slo_share == 1


# ---------------------------------------------------------------- names


def test_every_number_has_a_flat_name_and_a_label() -> None:
    metrics = measure(made_up(100, 1), window=None, slo=Slo(ttft_s=0.3), steps=made_up_steps(10, 1))
    values = values_of(metrics)
    assert metrics.ttft_s is not None
    assert metrics.steps is not None
    assert values["ttft_s.p99_9"] == metrics.ttft_s.p99_9
    assert values["by_tenant.a.b.num_requests"] == metrics.by_tenant["a.b"].num_requests
    assert values["steps.mean_kv_use"] == metrics.steps.mean_kv_use
    assert values["num_failed"] == sum(metrics.errors.values())
    assert "ttft_s.count" not in values
    for name in values:
        assert describe(name).label != name, "known to people by other words"
    assert (describe("ttft_s.p99_9").label, describe("ttft_s.p99_9").unit) == ("TTFT p99.9", "ms")
    assert describe("by_tenant.a.b.tpot_s.mean").label == "TPOT mean of a.b"
    assert describe("by_tenant..num_ok").label == "completed requests of the rest"
    assert describe("another").label == "another"
