"""What a number of executors holds: a case that can be computed, the search's own promises, and its early ends."""

from __future__ import annotations

import math

import pytest

from cadenza_loadtest.measures.slo import parse_slo
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.settings import LoadSettings, make_settings
from cadenza_simulator.campaign import Simulated, run_simulation, simulate
from cadenza_simulator.capacity.capacity import Capacity, as_plot, summary_of
from cadenza_simulator.capacity.rate_trials import Misses, RunAt
from cadenza_simulator.capacity.search import CapacitySearch
from cadenza_simulator.executor_profiles import ExecutorProfile
from tests.helpers.loadtest.load_views import SilentView
from tests.helpers.loadtest.simulations import options, profile, shape

SHORT = {"input_len": "uniform:8:32", "output_len": "uniform:8:24"}
BUSY = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}


def even(**given: object) -> LoadSettings:
    """Requests of one prompt token and 10 of output, one after the other at a constant rate."""
    values = {"input_len": "1", "output_len": "10", "arrivals": "constant", "slo": "e2e=0.5", "num_requests": 400}
    return make_settings({**values, **given})


def found_by(settings: LoadSettings, run: RunAt, num_executors: int = 1, tolerance: float = 0.02) -> Capacity:
    search = CapacitySearch(settings, {num_executors: run}, SilentView(), tolerance=tolerance)
    search.run()
    (found,) = search.capacities
    return found


def held_by(fleet: list[ExecutorProfile], settings: LoadSettings) -> float:
    config = options()
    found = found_by(
        settings, lambda each, seed, watch: simulate(each, fleet, config, seed, watch=watch), len(fleet), 0.05
    )
    assert found.held is not None
    assert found.failed is not None
    assert found.failed <= found.held * 1.0501
    return found.held


@pytest.mark.slow
def test_the_capacity_of_a_plain_case() -> None:
    """A request needs 10 steps of 10 ms, and 8 are served at a time: 80 a second, beyond which the queue grows.

    At the very edge a run of 400 requests ends before its queue is long: 10% over capacity leaves 40 requests, half a
    second's work, at the end.
    """
    rate = held_by([profile({"step_us": 10_000.0}, **BUSY)], even())
    assert 72 <= rate <= 90


@pytest.mark.slow
@pytest.mark.long
def test_twice_the_executors_hold_twice_the_rate() -> None:
    settings = make_settings({**SHORT, "slo": "ttft=0.2,tpot=0.03", "num_requests": 150})
    busy = profile({"step_us": 10_000.0}, **BUSY)
    one, two = (held_by([busy] * count, settings) for count in (1, 2))
    assert two / one == pytest.approx(2.0, rel=0.15)


@pytest.mark.long
@pytest.mark.slow
def test_a_stricter_slo_holds_no_more() -> None:
    busy = profile({"step_us": 10_000.0, "token_us": 50.0}, **BUSY)
    loose, strict = (
        held_by([busy], make_settings({**SHORT, "slo": f"ttft={limit},tpot=0.05", "num_requests": 80}))
        for limit in (1.0, 0.1)
    )
    assert strict < loose


@pytest.mark.slow
def test_a_trial_that_fails_ends_early() -> None:
    config, fleet = options(), [profile({"step_us": 10_000.0}, **BUSY)]
    lengths: dict[float, int] = {}

    def run(settings, seed, watch):
        outcome = simulate(settings, fleet, config, seed, watch=watch)
        lengths[settings.request_rate] = len(outcome.requests)
        return outcome

    found = found_by(even(request_rate=500.0, num_requests=500), run)
    assert lengths[500.0] < 300
    tried = {trial.rate: trial for trial in found.trials}
    assert tried[500.0].ended_early
    assert not tried[500.0].held
    assert not tried[500.0].outcomes
    assert all(trial.held or trial.rate > found.held for trial in found.trials)
    assert max(lengths[trial.rate] for trial in found.trials if trial.held) == 500


@pytest.mark.slow
def test_nothing_may_hold() -> None:
    config, fleet = options(), [profile({"step_us": 10_000.0}, **BUSY)]
    found = found_by(
        even(slo="ttft=0.001", num_requests=20),
        lambda each, seed, watch: simulate(each, fleet, config, seed, watch=watch),
    )
    assert found.held is None
    assert summary_of(found) == {"executors": 1, "request_rate": None}
    assert as_plot([found]) == ([], [])


def test_misses_are_counted_limit_by_limit() -> None:
    """Two may miss, the first two requests do not count; one token has no TPOT, and samples share their tokens."""
    slo = parse_slo("ttft=0.1,tpot=0.01,e2e=1")
    watch = Misses(slo, first_judged=2, num_allowed=2)
    nan = math.nan
    assert not watch.ended(shape(1, 1, 1), 0.0, nan, nan, 0, "RESOURCE_EXHAUSTED")
    assert not watch.ended(shape(2, 1, 1), 0.0, 0.1, 0.1, 1, "")
    assert not watch.ended(shape(3, 1, 11, n=2), 0.0, 0.1, 0.2, 22, "")
    assert watch.num_missed == 0
    assert not watch.ended(shape(4, 1, 11), 0.0, 0.11, 0.2, 11, "")
    assert not watch.ended(shape(5, 1, 11), 0.0, 0.1, 0.21, 11, "")
    assert watch.num_missed == 2
    assert watch.ended(shape(6, 1, 200), 0.0, 0.1, 1.1, 200, "")
    assert (watch.num_missed, watch.num_judged) == (3, 5)


@pytest.mark.long
@pytest.mark.slow
def test_a_file_of_capacities() -> None:
    view = SilentView()
    simulated = Simulated((profile({"step_us": 10_000.0}, **BUSY),), options(), counts=(1, 2))
    file, found = run_simulation(even(find_max_rate=True, num_requests=120), simulated, view, label="x")
    assert [each.num_executors for each in found] == [1, 2]
    counts, rates = as_plot(found)
    assert counts == [1, 2]
    assert rates[1] / rates[0] == pytest.approx(2.0, rel=0.1)
    row = summary_of(found[1])
    assert row["request_rate"] == found[1].held
    assert row["tokens_per_s_per_executor"] == pytest.approx(row["output_tokens_per_s"] / 2)
    assert row["share"] >= 0.99
    # A point for every trial that was run to its end; for one number of executors also the search's outcome.
    assert {point.swept["executors"] for point in file.points} == {1.0, 2.0}
    assert file.max_rate is None
    assert file.source == "simulate"
    assert any("ended early" in said for said in view.said)
    file, found = run_simulation(even(find_max_rate=True, num_requests=60), Simulated(simulated.fleet, options()), view)
    assert file.max_rate.held == found[0].held
    assert [point.swept["request_rate"] for point in file.points] == [trial.rate for trial in found[0].kept]


def test_without_an_slo_there_is_no_search() -> None:
    with pytest.raises(LoadTestError, match="--find-max-rate needs --slo"):
        CapacitySearch(make_settings({}), {1: lambda *_: pytest.fail("nothing is to run")}, SilentView())
