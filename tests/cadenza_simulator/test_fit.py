"""Known costs are recovered from synthetic steps with noise and outliers; undetermined terms are reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cadenza_loadtest.requests import LoadTestError
from cadenza_simulator.fit import Fit, fit_costs, fitted_profile, with_clients
from executor_svc.simulated.costs import StepCosts
from tests.helpers.loadtest.loadtest_runs import columns
from tests.helpers.loadtest.made_recordings import COSTS, recording


def check_close(fit: Fit, costs: StepCosts, rel: float) -> None:
    for name, value in costs:
        assert getattr(fit.costs, name) == pytest.approx(value, rel=rel, abs=1e-6), name


def test_costs_without_noise_are_found_exactly() -> None:
    fit = fit_costs(recording(COSTS))
    check_close(fit, COSTS, 1e-4)
    assert fit.median_error < 1e-5
    assert fit.explained == pytest.approx(1.0)
    assert not fit.warnings
    # 0.5 ms beyond the executor's own times; the 0.1 ms that every plan waited there are no queue.
    assert fit.overheads.transit_us == pytest.approx(250, rel=1e-3)
    assert fit.overheads.plan_us == pytest.approx(200, rel=1e-3)
    assert (fit.noise.step_us, fit.noise.overheads) == (pytest.approx(0, abs=0.1), pytest.approx(0, abs=1e-3))


@pytest.mark.parametrize("seed", range(5))
def test_costs_are_found_in_noise(seed: int) -> None:
    """20% a step, and one in a hundred held up for 50 times as long: 2000 steps leave a few percent of each term."""
    noisy = recording(COSTS, seed, noise=0.2)
    held_up = np.random.default_rng(seed).random(len(noisy.steps)) < 0.01
    total_ns = np.where(held_up, 50 * noisy.steps.total_ns, noisy.steps.total_ns)
    fit = fit_costs(replace(noisy, steps=replace(noisy.steps, total_ns=total_ns)))
    for name, rel in (("step_us", 0.1), ("token_us", 0.05), ("kv_token_us", 0.15), ("context_token_us", 0.3)):
        assert getattr(fit.costs, name) == pytest.approx(getattr(COSTS, name), rel=rel), name
    assert 0.1 < fit.median_error < 0.2
    without = fit_costs(noisy)
    assert without.total_ratio == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_found(seed: int) -> None:
    """Steps whose variance is 300 us times their mean; overheads with a coefficient of variation of 0.6."""
    made, rng = recording(COSTS, seed, count=4000), np.random.default_rng(seed)
    means = made.steps.total_ns
    total_ns = 300_000 * rng.standard_gamma(means / 300_000)
    late, there, back = (200e-6 * 0.36 * rng.standard_gamma(1 / 0.36, 4000) for _ in range(3))
    steps = replace(
        made.steps,
        total_ns=total_ns,
        sample_ns=made.steps.sample_ns * total_ns / means,
        moves_ns=made.steps.moves_ns * total_ns / means,
        late_s=late,
        queue_ns=np.zeros(4000),
        applied_s=made.steps.planned_s + total_ns / 1e9 + there + back,
    )
    fit = fit_costs(replace(made, steps=steps))
    assert fit.noise.step_us == pytest.approx(300, rel=0.15)
    # A hundredth of the largest overheads is left out.
    assert fit.noise.overheads == pytest.approx(0.6, rel=0.1)
    assert fit.overheads.plan_us == pytest.approx(200, rel=0.05)
    assert fit.overheads.transit_us == pytest.approx(200, rel=0.05)
    assert fit.costs.token_us == pytest.approx(120, rel=0.05)
    assert fit.total_ratio == pytest.approx(1.0, abs=0.02)


def test_the_executors_own_pause_is_part_of_a_step() -> None:
    """Every second plan waits for the previous step; results arrive 0.3 ms after the end of a step."""
    made = recording(COSTS)
    queue_ns = np.where(np.arange(len(made.steps)) % 2, 2e6, 1e5)
    applied_s = np.cumsum(made.steps.total_ns / 1e9 + 0.0003)
    planned_s = applied_s - (made.steps.total_ns + queue_ns) / 1e9 - 0.0004
    steps = replace(made.steps, queue_ns=queue_ns, applied_s=applied_s, planned_s=planned_s)
    fit = fit_costs(replace(made, steps=steps))
    assert fit.costs.step_us == pytest.approx(800 + 300, rel=1e-3)
    assert fit.overheads.transit_us == pytest.approx(250, rel=1e-3)


def test_hidden_tokens_are_found() -> None:
    hidden = COSTS.model_copy(update={"hidden_tokens": 32.0, "step_us": 5000.0})
    fit = fit_costs(recording(hidden, noise=0.05))
    assert fit.costs.hidden_tokens == 32
    assert fit.costs.token_us == pytest.approx(120, rel=0.03)
    assert fit_costs(recording(COSTS, noise=0.05)).costs.hidden_tokens == 0


def test_what_cannot_be_fitted_is_reported() -> None:
    """Without prompts in the steps the two counts of read positions are equal; without moves, their cost is 0."""
    fit = fit_costs(recording(COSTS, prefills=0.0, moves=0.0))
    assert [warning.split()[0] for warning in fit.warnings] == ["moved_block_us", "kv_token_us"]
    assert "cannot be distinguished from context_token_us" in fit.warnings[1]
    # What the lost term cost, the other one has now.
    assert fit.costs.context_token_us == pytest.approx(0.45, rel=1e-3)
    assert fit.median_error < 1e-5


def test_a_term_that_never_varies_is_part_of_the_step() -> None:
    made = recording(COSTS, prefills=0.0, moves=0.0)
    same = np.full(len(made.steps), 8.0)
    reads = made.steps.context_tokens
    total = 1000 * (800 + 120 * 8 + 0.05 * reads)
    steps = replace(made.steps, tokens=same, kv_tokens=same, samples=same, sample_ns=0 * same, total_ns=total)
    fit = fit_costs(replace(made, steps=steps))
    assert (fit.costs.token_us, fit.costs.kv_token_us, fit.costs.sample_us) == (0, 0, 0)
    assert fit.costs.step_us == pytest.approx(1760)
    assert any(warning.startswith("token_us cannot be fitted: every step had 8 of them") for warning in fit.warnings)


def test_a_fixed_part_of_sampling_is_part_of_the_step() -> None:
    made = recording(COSTS)
    steps = replace(made.steps, sample_ns=made.steps.sample_ns + 40_000, total_ns=made.steps.total_ns + 40_000)
    fit = fit_costs(replace(made, steps=steps))
    assert fit.costs.sample_us == pytest.approx(5, rel=1e-3)
    assert fit.costs.step_us == pytest.approx(840, rel=1e-3)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(LoadTestError, match="has 19 steps with times; at least 20 are needed"):
        fit_costs(recording(COSTS, count=19))


def test_the_fitted_profile_says_where_it_is_from() -> None:
    made = recording(COSTS)
    found = fitted_profile(made, fit_costs(made), "mine", "day.log")
    assert (found.name, found.limits) == ("mine", made.limits)
    assert found.source == "fitted to 2000 steps of toy on cpu in day.log"


def test_how_far_clients_are_comes_from_their_load_test() -> None:
    """The median difference of the client's TTFT and the server's is 0.9 ms: half in each direction."""
    made = recording(COSTS)
    seen = columns(
        due_s=[0.0, 1.0, 2.0, 3.0],
        sent_s=[0.5, 1.0, 2.0, 3.0],
        first_s=[0.6009, 1.2009, 2.5, 3.1],
        server_first_s=[0.1, 0.2, 0.1, np.nan],
        error=["", "", "TIMEOUT", ""],
    )
    overheads = with_clients(fit_costs(made), seen).overheads
    assert overheads.request_us == overheads.reply_us == pytest.approx(450, abs=1)
    with pytest.raises(LoadTestError, match="no request with the server's own times"):
        with_clients(fit_costs(made), seen.select(np.array([False, False, False, True])))
