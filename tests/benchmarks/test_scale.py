"""The benchmarks of scale at a small size: lanes of one core, fleets, prefill and decode apart."""

from __future__ import annotations

import pytest

from benchmarks import disaggregation, lane_scaling
from benchmarks.common.rows import BenchmarkError, make_row
from benchmarks.disaggregation import Comparison, Layout, Trial, held
from benchmarks.fleet import benchmark as fleet
from benchmarks.fleet.options import FleetOptions
from benchmarks.lane_scaling import LaneCase, LaneLoad


def test_every_lane_is_planned_and_a_share_of_its_sequences_changes() -> None:
    case = LaneCase(3, 16, output_tokens=8)
    load = LaneLoad(case, seed=1)
    load.fill()
    assert [len(lane.decode_batch) for lane in load.core.lanes.values()] == [16] * 3
    begun = load.core.counts.num_steps
    found = load.measure(20).metrics(case)
    assert load.core.counts.num_steps == begun + 3 * 21  # two plans in flight
    assert found["whole_ms"] == pytest.approx(sum(found[f"{part}_ms"] for part in ("plan", "apply", "convert", "add")))
    assert found["whole_percent"] == pytest.approx(100 * found["whole_ms"] / 20)
    assert found["us_per_lane"] == pytest.approx(1000 * found["whole_ms"] / 3)
    # Two sequences of each lane end with each result.
    assert load._num_added == 3 * 16 + 20 * 3 * 2
    assert [LaneCase(1, 64, 256).num_leaving(step) for step in range(8)] == [0, 0, 0, 1] * 2


def test_lanes_that_run_empty_give_no_row() -> None:
    load = LaneLoad(LaneCase(2, 32, output_tokens=16), seed=1)
    load.fill()
    load._add = lambda count: None  # type: ignore[method-assign]
    with pytest.raises(BenchmarkError, match=r"sequences run|nothing to plan"):
        load.measure(12)


def test_plans_that_take_longer_than_steps_slow_all_executors_down() -> None:
    ideal = lane_scaling.virtual_tokens_per_s(2, 8, 0.0, seed=1)
    assert ideal == pytest.approx(2 * 8 / 0.02, rel=0.01)
    assert lane_scaling.virtual_tokens_per_s(2, 8, 5000.0, seed=1) == pytest.approx(ideal, rel=0.03)
    assert lane_scaling.virtual_tokens_per_s(2, 8, 20_000.0, seed=1) == pytest.approx(ideal / 2, rel=0.15)


def test_the_held_rate_is_between_the_last_good_trial_and_the_next() -> None:
    trials = [Trial(1.0, (1.0, 0.8), 1.0), Trial(2.0, (0.95, 0.7), 2.0), Trial(3.0, (0.85, 0.1), 3.0)]
    assert held(trials, 0, 0.9) == pytest.approx(2.5)
    assert held(trials, 1, 0.9) == 0.0
    assert held(trials[:2], 0, 0.9) == 2.0
    assert held([*trials, Trial(4.0, (0.99, 0.0), 1.0)], 0, 0.9) == pytest.approx(2.5)


def test_both_layouts_serve_the_same_requests() -> None:
    comparison = Comparison("h200-llama-3.1-8b", "azure-code", 50.0, 4.0, seed=2)
    mixed, apart = comparison.run(Layout(2048), 20.0), comparison.run(Layout(8192, 4), 20.0)
    assert mixed.tally.num_due == apart.tally.num_due > 50
    assert mixed.tally.output_tokens == apart.tally.output_tokens
    assert mixed.tally.num_ended == apart.tally.num_ended == mixed.tally.num_due


def test_a_fleets_row_in_words() -> None:
    options = FleetOptions(
        executor="h200-llama-3.1-8b", schedulers=2, executors=2, traffic="azure-code", request_rate=5.0, price=3.0,
        duration_s=10.0, course="flat", slice_s=1.0,
    )  # fmt: skip
    found = fleet.measure(options)
    assert {name: value for name, value in fleet.measure(options).items() if name != "cpu_s"} == {
        name: value for name, value in found.items() if name != "cpu_s"
    }
    params = {"router": "round-robin", "requests_per_s": 5.0, "hours": 1.0}
    text = fleet.BENCHMARK.describe(make_row("fleet", seed=1, params=params, repeats=[found], other_cores=[]))
    assert "100.00% good" in text
    limits = {"ttft_s": 0.5, "tpot_s": 0.01, "executor": "x", "executors": 8, "mix": "m", "link_gb_per_s": 1.0}
    metrics = dict.fromkeys(
        ("mixed_per_s", "mixed_budget", "mixed_itl_p99_ms", "split_per_s", "split_prefill", "split_itl_p99_ms",
         "split_over_mixed"), 2.0,
    )  # fmt: skip
    row = make_row("disaggregation", seed=1, params=limits, repeats=[metrics], other_cores=[])
    assert "2.00 times" in disaggregation.BENCHMARK.describe(row)
