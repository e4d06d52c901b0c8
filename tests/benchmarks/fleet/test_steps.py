"""A fleet's executors: times of steps by hand, memory, preemption, failures, KV on its way; and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fleet.engine import LOST_S, Fleet, FleetPlan, Split
from benchmarks.fleet.requests import FAILURES_PER_GPU_HOUR, Failures
from benchmarks.fleet.results import FleetResult, LogHistogram, Objective
from tests.helpers.loadtest.fleets import Given, model, requests, serve


def ms(result: FleetResult, name: str, mark: int = 50) -> float:
    times = {"ttft": result.tally.ttft, "tpot": result.tally.tpot, "itl": result.tally.gaps, "e2e": result.tally.e2e}
    return 1000 * times[name].percentile(mark)


def test_one_request_takes_its_steps() -> None:
    """A step with 100 prompt tokens takes 11 ms, the nine others 10.01 ms each."""
    found = serve(requests((0.0, 100, 10)))
    assert ms(found, "ttft") == pytest.approx(11.0, rel=0.01)
    assert ms(found, "itl") == pytest.approx(10.01, rel=0.01)
    assert ms(found, "e2e") == pytest.approx(11 + 9 * 10.01, rel=0.01)
    assert found.tally.output_tokens == 10
    assert found.tally.busy_s == pytest.approx(0.011 + 9 * 0.01001)


def test_a_long_prompt_goes_in_chunks_beside_decodes() -> None:
    """512 tokens a step: the second prompt of 1,000 takes two steps beside the first one's token: 511 and 489."""
    found = serve(requests((0.0, 12, 100), (0.1, 1000, 1)))
    assert found.tally.num_ended == 2
    assert ms(found, "itl", 100) == pytest.approx(10 + 0.01 * 512, rel=0.01)
    # It comes in the step that begins about 0.1 s after the start, at a multiple of 10.01 ms.
    assert 2 * 10 + 0.01 * 1002 - 1 < ms(found, "ttft", 99) < 3 * 10 + 0.01 * 1002 + 1


def test_one_token_needs_no_decode() -> None:
    found = serve(requests((0.0, 100, 1)))
    assert found.tally.num_ended == 1
    assert found.tally.busy_s == pytest.approx(0.011)


def test_seats_are_taken_in_turn() -> None:
    """Four seats and five requests of five tokens: the last one waits for an end."""
    found = serve(requests(*[(0.0, 10, 5)] * 5), model(max_num_seqs=4))
    first_s, second_s = 0.0104, 0.0104 + 4 * 0.01004 + 0.0101
    assert ms(found, "ttft") == pytest.approx(1000 * first_s, rel=0.01)
    assert ms(found, "ttft", 99) == pytest.approx(1000 * second_s, rel=0.01)


def test_overheads_and_a_slow_scheduler_make_steps_longer() -> None:
    slow = model(overheads={"plan_us": 15_000.0, "transit_us": 1000.0, "request_us": 2000.0, "reply_us": 500.0})
    found = serve(requests((0.0, 100, 10)), slow)
    assert ms(found, "itl") == pytest.approx(15.0, rel=0.02)
    assert ms(found, "ttft") == pytest.approx(2 + 15 + 1 + 15 + 1 + 0.5, rel=0.02)
    assert ms(serve(requests((0.0, 100, 10)), slow, ideal=True), "itl") == pytest.approx(10.01, rel=0.02)


def test_preempted_requests_are_computed_again_and_end() -> None:
    """Two requests that outgrow a pool of 320 tokens together, but not alone."""
    small = model(num_blocks=20, block_size=16)
    found = serve(requests((0.0, 100, 100), (0.0, 100, 100)), small)
    assert found.tally.num_preemptions >= 1
    assert found.tally.num_ended == 2
    assert found.tally.output_tokens == 200
    assert found.summary()["unfinished"] == 0


def test_what_fits_no_executor_is_refused() -> None:
    found = serve(requests((0.0, 4000, 97), (0.0, 100, 10)))
    assert (found.tally.num_refused, found.tally.num_ended) == (1, 1)
    assert found.good_share == 0.5


def test_goodput_counts_what_keeps_both_limits() -> None:
    limits = (Objective(0.0115, 0.1), Objective(1.0, 0.005), Objective())
    found = serve(requests((0.0, 100, 10), (0.0, 200, 10)), objectives=limits)
    assert found.tally.good.tolist() == [0, 0, 2]  # both come in one step of 13 ms
    alone = serve(requests((0.0, 100, 10), (5.0, 200, 10)), objectives=limits)
    assert alone.tally.good.tolist() == [1, 0, 2]
    assert alone.tally.good_tokens == 10


def test_a_price_of_tokens() -> None:
    found = serve(requests((0.0, 100, 10)), duration_s=3600.0, slice_s=1.0, price=3.0)
    assert found.summary()["cost_per_million_tokens"] == pytest.approx(3.0 / 10 * 1e6)


def test_a_lost_executor_costs_time_and_no_token() -> None:
    """Both executors serve; one fails in the middle, and its requests go on at the other."""
    plan = FleetPlan(model(), 1, 2, duration_s=10.0, slice_s=0.1, repair_s=5.0, failures_per_hour=1e-9)
    fleet = Fleet(plan, Given(requests(*[(0.0, 50, 200)] * 4)))
    events = [(1.0, 0, True), (6.0, 0, False)]
    fleet._failures.take = lambda until_s: [events.pop(0)] if events and events[0][0] < until_s else []  # type: ignore[method-assign]
    found = fleet.run()
    assert (found.tally.num_failures, found.tally.num_restarted) == (1, 2)
    assert (found.tally.num_ended, found.tally.output_tokens) == (4, 800)
    whole_s = 200 * 0.0102
    assert 1000 * (whole_s + LOST_S - 0.2) < ms(found, "e2e", 99) < 1000 * (whole_s + LOST_S + 1.2)


def test_failures_alternate_and_come_at_their_rate() -> None:
    failures = Failures(1000, 0.01, 600.0, seed=3)
    events = failures.take(100 * 3600.0)
    assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    downs = [executor for _, executor, fails in events if fails]
    assert len(downs) == pytest.approx(1000, rel=0.15)
    one = [fails for _, executor, fails in events if executor == downs[0]]
    assert one == [place % 2 == 0 for place in range(len(one))]
    assert Failures(10, 0.0, 1.0, seed=0).take(1e9) == []
    assert pytest.approx(1.97e-5, rel=0.01) == FAILURES_PER_GPU_HOUR


def test_kv_goes_from_prefill_to_decode() -> None:
    """100 tokens of 1 MB over 1 GB/s: 100 ms between the first and the second token, in time slices of 10 ms."""
    split = Split(1, kv_bytes=1e6, bytes_per_s=1e9, latency_s=0.02)
    found = serve(requests((0.0, 100, 10), (0.0, 100, 10)), num_executors=2, split=split, slice_s=0.01)
    assert found.tally.num_ended == 2
    assert ms(found, "ttft") == pytest.approx(12.0, rel=0.02)
    # The second one's KV waits for the link.
    assert ms(found, "e2e") == pytest.approx(12 + 100 + 20 + 9 * 10.02, abs=20)
    assert ms(found, "e2e", 99) == pytest.approx(12 + 200 + 20 + 9 * 10.02, abs=25)
    assert ms(found, "itl") == pytest.approx(10.01, rel=0.02)


def test_a_session_is_cached_where_it_was() -> None:
    """The second turn finds the first turn's 100 prompt tokens, in whole blocks."""
    arrivals = requests((0.0, 100, 28), (5.0, 400, 5), (5.0, 400, 5), sessions=[0, 0, 1], shared=[0, 128, 0])
    found = serve(arrivals, num_executors=2)
    assert found.tally.cached_tokens == 112


def test_an_evicted_session_is_computed_again() -> None:
    rows = [(0.0, 100, 28), *[(1.0 + place, 200, 4) for place in range(10)], (20.0, 400, 5)]
    arrivals = requests(*rows, sessions=[0, *range(1, 11), 0], shared=[*[0] * 11, 128])
    assert serve(arrivals, model(num_blocks=50, block_size=16)).tally.cached_tokens == 0
    assert serve(arrivals, model(num_blocks=500, block_size=16)).tally.cached_tokens == 112


def test_percentiles_to_a_hundredth() -> None:
    histogram, values = LogHistogram(), np.random.default_rng(1).lognormal(-3, 1.5, 20_000)
    histogram.add(values[:5000])
    histogram.add(values[5000:], np.ones(15_000))
    for mark in (1, 50, 90, 99):
        assert histogram.percentile(mark) == pytest.approx(np.percentile(values, mark), rel=0.012)
    assert histogram.mean == pytest.approx(values.mean())
    assert np.isnan(LogHistogram().percentile(50))
