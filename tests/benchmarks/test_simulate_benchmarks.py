"""The simulator's benchmarks at a small size: rows have all measurements, and failures give no row."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import simulate_fit, simulate_speed
from benchmarks.common.rows import BenchmarkError, make_row
from cadenza_simulator.fit import fit_costs, fitted_profile
from tests.helpers.loadtest.made_recordings import COSTS, recording
from tests.helpers.loadtest.simulations import shape


@pytest.mark.slow
def test_the_speed_of_a_small_run() -> None:
    found = simulate_speed.measure_once(300, seed=3)
    assert found["virtual_s"] > 25
    assert found["times_real_time"] == pytest.approx(found["virtual_s"] / found["wall_s"])
    # Outputs of mean 128: within 5 standard errors of 300.
    assert abs(found["output_tokens"] / 300 - 128) < 5 * 128 / 300**0.5
    assert found["peak_rss_mib"] > 10


def test_tenths_are_timed_as_they_end() -> None:
    watch = simulate_speed.Tenths(25)
    for index in range(25):
        assert not watch.ended(shape(index, 1, 1), 0.0, 0.0, 0.0, 1, "")
    assert len(watch.seconds) == 10
    assert all(seconds >= 0 for seconds in watch.seconds)


@pytest.mark.slow
def test_a_row_of_speed_is_reported_in_words() -> None:
    row = make_row(
        simulate_speed.NAME,
        seed=1,
        params={"requests": 100},
        repeats=[simulate_speed.measure_once(100, 1)],
        other_cores=[0.0],
    )
    assert "times real time" in simulate_speed.BENCHMARK.describe(row)
    parser = argparse.ArgumentParser()
    simulate_speed.BENCHMARK.add_options(parser)
    assert parser.parse_args(["--hours", "24"]).hours == 24
    with pytest.raises(SystemExit):
        parser.parse_args(["--hours", "0"])


@pytest.mark.slow
def test_requests_that_fail_give_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_speed, "_PROFILE", simulate_speed._PROFILE.changed({"max_num_seqs": 1}))
    monkeypatch.setattr(simulate_speed, "RATE", 1e6)
    monkeypatch.setattr(simulate_speed, "MEAN_OUTPUT", 2)
    with pytest.raises(BenchmarkError, match="some failed"):
        simulate_speed.measure_once(1500, seed=1)


@pytest.mark.slow
def test_errors_of_a_prediction_are_relative_to_what_was_measured() -> None:
    """Two simulations of the same load, one on an executor twice as slow."""
    made = recording(COSTS)
    profile = fitted_profile(made, fit_costs(made), "toy", "a test")
    slow = profile.model_copy(
        update={"costs": profile.costs.model_copy(update={name: 2 * value for name, value in profile.costs})}
    )
    _, settings = simulate_fit.loads("10m", 40, 1.5, 5)
    fast_run, slow_run = simulate_fit.predict(profile, settings), simulate_fit.predict(slow, settings)
    found = simulate_fit._errors("predicted", fast_run, slow_run)
    assert found["predicted_tpot_p50_error"] == pytest.approx(
        fast_run.metrics.tpot_s.p50 / slow_run.metrics.tpot_s.p50 - 1
    )
    assert -0.8 < found["predicted_tpot_p50_error"] < -0.3
    assert found["predicted_ttft_p50_ms"] == pytest.approx(1000 * slow_run.metrics.ttft_s.p50)


def test_the_two_loads_differ() -> None:
    fitted, predicted = simulate_fit.loads("10m", 100, 1.5, 7)
    assert predicted.request_rate == 1.5 * fitted.request_rate
    assert (fitted.input_len, fitted.output_len) != (predicted.input_len, predicted.output_len)
    assert fitted.seed != predicted.seed
