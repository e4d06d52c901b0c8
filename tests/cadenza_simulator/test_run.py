"""The simulator: cases computed by hand, the service's behaviour around the core, and invariants."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import per_request
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.workloads.prompts import Prompts
from cadenza_simulator import rows
from cadenza_simulator import run as run_module
from cadenza_simulator.executor_profiles import Noise
from cadenza_simulator.rows import StepRows
from executor_svc.simulated.costs import StepCosts
from tests.helpers.loadtest.simulations import options, profile, random_schedule, shape, simulate, simulation

COSTS = {"step_us": 1000.0, "token_us": 100.0}
OVERHEADS = {"plan_us": 200.0, "transit_us": 100.0, "request_us": 500.0, "reply_us": 300.0}
TIGHT = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 6, "max_num_batched_tokens": 32, "max_model_len": 96}


@pytest.mark.slow
def test_one_request_without_overheads() -> None:
    """Steps of 10, 1 and 1 tokens: 2, 1.1 and 1.1 ms, one after the other whatever the depth."""
    for depth in (1, 2, 4):
        outcome = simulate([(0.0, shape(0, 10, 3))], profile(COSTS), config=options(max_inflight_plans=depth))
        (first,), (last,) = outcome.requests.first_s, outcome.requests.last_s
        assert first == pytest.approx(0.002)
        assert last == pytest.approx(0.0042)
        assert outcome.num_steps in (3, 4)  # a last one reports that the slot is free


def test_one_request_with_one_plan_in_flight() -> None:
    """Between two steps lie planning and both transits; before the first, also that from the client to the queue."""
    outcome = simulate([(1.0, shape(0, 10, 3))], profile(COSTS, OVERHEADS), config=options(max_inflight_plans=1))
    (row,) = table(outcome.requests)
    # Queued at 0.5 ms, begun at 0.8, ended at 2.8, its result in at 2.9.
    assert row["queue_s"] == 0.0
    assert row["server_first_s"] == pytest.approx(0.0024)
    assert row["first_s"] == pytest.approx(1.0032)
    # 1.1 ms a step and 0.4 between two.
    assert row["last_s"] == pytest.approx(1.0032 + 2 * 0.0015)
    assert row["server_total_s"] == pytest.approx(0.0024 + 2 * 0.0015)


def test_one_request_with_two_plans_in_flight() -> None:
    """The second plan is made as soon as the scheduler is free again, and its step begins when the first one ends."""
    outcome = simulate([(0.0, shape(0, 10, 3))], profile(COSTS, OVERHEADS), config=options(max_inflight_plans=2))
    (row,) = table(outcome.requests)
    assert row["first_s"] == pytest.approx(0.0032)
    assert row["last_s"] == pytest.approx(0.0032 + 2 * 0.0011)


@pytest.mark.slow
def test_a_plan_is_sent_late_in_a_long_step() -> None:
    """As the pacer does: with known steps of 20 ms, the next plan is made 10 ms into a step and admits the waiting
    requests."""
    schedule = [(0.0, shape(0, 1, 200)), (1.005, shape(1, 1, 2)), (1.015, shape(2, 1, 2))]
    outcome = simulate(schedule, profile({"step_us": 20_000.0}))
    queue_s = outcome.requests.queue_s
    # Steps begin at 1.00, 1.02, …; 0.7 of one less 4 ms after that the next is planned.
    assert queue_s[1] == pytest.approx(0.005)
    assert queue_s[2] == pytest.approx(0.015)


@pytest.mark.slow
def test_depth_hides_what_is_between_short_steps() -> None:
    schedule = [(0.0, shape(0, 1, 300))]
    short = profile({"step_us": 500.0}, {"plan_us": 100.0, "transit_us": 150.0})
    tpots = {
        depth: tpot(simulate(schedule, short, config=options(max_inflight_plans=depth)).requests) for depth in (1, 2)
    }
    assert tpots[1] == pytest.approx(0.0009)
    assert tpots[2] == pytest.approx(0.0005, rel=1e-3)


@pytest.mark.slow
def test_two_executors_do_twice_as_much() -> None:
    """A load that keeps both busy: 64 requests at once, 8 at a time on each."""
    schedule = [(0.0, shape(index, 8, 20)) for index in range(64)]
    busy = profile({"step_us": 5000.0}, max_num_seqs=8, max_num_batched_tokens=64)
    alone, both = (simulate(schedule, [busy] * count) for count in (1, 2))
    assert alone.duration_s / both.duration_s == pytest.approx(2.0, rel=0.05)
    assert set(both.steps.executor.tolist()) == {0, 1}


@pytest.mark.slow
def test_a_faster_executor_does_more() -> None:
    schedule = [(0.0, shape(index, 8, 20)) for index in range(128)]
    slow, fast = (
        profile({"step_us": us}, name=str(us), max_num_seqs=8, max_num_batched_tokens=64) for us in (9000, 3000)
    )
    steps = simulate(schedule, [slow, fast]).steps
    tokens = [steps.num_sampled[steps.executor == index].sum() for index in (0, 1)]
    assert tokens[1] / tokens[0] == pytest.approx(3.0, rel=0.15)


@pytest.mark.slow
def test_a_full_queue_and_a_long_prompt_are_refused() -> None:
    small = profile(COSTS, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=32)
    schedule = [(0.0, shape(index, 8 if index else 40, 4)) for index in range(6)]
    outcome = simulate(schedule, small, config=options(max_queued_requests=2))
    errors = outcome.requests.error.tolist()
    assert errors == ["INVALID_ARGUMENT", "", "", *["RESOURCE_EXHAUSTED"] * 3]
    refused = outcome.requests.select(~outcome.requests.ok)
    assert np.isnan(refused.first_s).all()
    assert (refused.num_output_tokens == 0).all()


@pytest.mark.slow
def test_a_later_turn_comes_when_the_answer_was_read() -> None:
    """A turn's prompt is the previous turn, the answer, and the new part; the prefix cache finds the full blocks of the
    former."""
    turns = [(0.0, shape(i, 20, 12, session=0, turn=i, think_s=0.5 * (i > 0))) for i in range(3)]
    outcome = simulate(turns, profile(COSTS, OVERHEADS), prompts=Prompts(7))
    requests = outcome.requests
    assert requests.num_prompt_tokens.tolist() == [20, 52, 84]
    assert requests.due_s[1:] == pytest.approx(requests.last_s[:-1] + 0.5)
    # Of 32 and 64 tokens before, the last one's KV was never computed: 1 and 3 blocks of 16 are full.
    assert requests.num_cached_tokens.tolist() == [0, 16, 48]
    without = simulate(turns, profile(COSTS, OVERHEADS)).requests
    assert without.num_cached_tokens.tolist() == [0, 0, 0]
    assert without.first_s[2] - without.due_s[2] > requests.first_s[2] - requests.due_s[2]


def test_a_refused_turn_ends_its_session() -> None:
    turns = [(0.0, shape(i, 20, 4, session=0, turn=i)) for i in range(3)]
    small = profile(COSTS, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)
    requests = simulate(turns, small).requests
    assert requests.error.tolist() == ["", "INVALID_ARGUMENT", "SKIPPED"]
    assert math.isnan(requests.sent_s[2])
    assert requests.due_s[2] == requests.due_s[1]


@pytest.mark.slow
def test_a_closed_loop_has_so_many_users() -> None:
    schedule = [(0.0, shape(index, 8, 10)) for index in range(40)]
    outcome = simulate(schedule, profile(COSTS, OVERHEADS), concurrency=3)
    requests = outcome.requests
    assert len(requests) == 40
    for due in requests.due_s:
        assert ((requests.due_s <= due) & (requests.last_s > due)).sum() <= 3
    # A user whose request ends sends the next one at once.
    assert set(np.round(requests.due_s[3:], 9)) <= set(np.round(requests.last_s, 9))
    cut = simulate(schedule, profile(COSTS, OVERHEADS), concurrency=3, duration_s=0.05).requests
    assert 3 <= len(cut) < 40
    assert cut.due_s.max() <= 0.05


def test_static_batches_run_to_the_end() -> None:
    """10 requests in batches of 4: the last two would wait forever, so the core is drained."""
    schedule = [(0.0, shape(index, 8, 5 + index)) for index in range(10)]
    outcome = simulate(schedule, profile(COSTS), config=options(batching="static", batch_size=4))
    assert outcome.requests.ok.all()
    planned = sorted(set(np.round(outcome.requests.queue_s, 9)))
    assert len(planned) == 3


def test_dynamic_batches_start_when_their_window_ends() -> None:
    schedule = [(0.0, shape(0, 8, 5)), (0.01, shape(1, 8, 5)), (0.5, shape(2, 8, 5))]
    config = options(batching="dynamic", batch_size=4, batch_window_ms=50.0)
    queue_s = simulate(schedule, profile(COSTS), config=config).requests.queue_s
    assert queue_s == pytest.approx([0.05, 0.04, 0.05])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_or_is_refused(seed: int) -> None:
    """In little memory, with preemptions; of every sort, under every kind of preemption."""
    schedule = random_schedule(seed, 120, rate=150.0, longest=40)
    config = options(
        preemption=("recompute", "swap", "auto")[seed % 3],
        order=("fcfs", "fair")[seed % 2],
        max_inflight_plans=1 + seed % 4,
    )
    tight = profile({**COSTS, "moved_block_us": 30.0}, OVERHEADS, num_host_blocks=16, **TIGHT)
    made = simulation(schedule, tight, config=config, keep_gaps=True, prompts=Prompts(seed) if seed % 2 else None)
    outcome = made.run()
    requests = outcome.requests
    assert requests.index.tolist() == list(range(len(schedule)))
    assert set(requests.error) <= {"", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "SKIPPED"}
    assert outcome.num_preemptions > 0
    assert requests.num_preemptions.sum() == outcome.num_preemptions
    check_rows(requests, schedule)
    made._core.check_integrity()
    assert not made._core.groups
    assert not made._request_log._live


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    schedule = random_schedule(seed, 80, rate=150.0, longest=40)
    one, other = (simulate(schedule, profile(COSTS, OVERHEADS, **TIGHT), keep_gaps=True) for _ in range(2))
    for field in fields(RequestColumns):
        values = (getattr(run.requests, field.name) for run in (one, other))
        np.testing.assert_array_equal(*values, err_msg=field.name)
    assert one.num_steps == other.num_steps


@pytest.mark.slow
def test_noise_follows_from_the_seed_and_keeps_the_mean() -> None:
    """4000 steps of mean 1 ms and variance 0.2 ms^2: their mean is within 5 standard errors, which are 7 us."""
    noisy = profile({"step_us": 1000.0}).model_copy(update={"noise": Noise(step_us=200.0)})
    schedule = [(0.0, shape(0, 1, 4000))]
    one, same, other = (simulate(schedule, noisy, seed=seed) for seed in (1, 1, 2))
    assert one.duration_s == same.duration_s != other.duration_s
    for outcome in (one, other):
        steps_s = np.diff(outcome.steps.applied_s[:4000])
        assert steps_s.mean() == pytest.approx(0.001, abs=5 * 7.1e-6)
        assert steps_s.var() / steps_s.mean() == pytest.approx(200e-6, rel=0.15)


@pytest.mark.slow
def test_chance_costs_short_steps_throughput() -> None:
    """What lies between is as long as a step: hidden if it is always the same, not if it is sometimes twice that."""
    schedule = [(0.0, shape(0, 1, 2000))]
    even = profile({"step_us": 500.0}, {"plan_us": 100.0, "transit_us": 190.0})
    uneven = even.model_copy(update={"noise": Noise(overheads=0.7)})
    steady, shaken = (simulate(schedule, each, seed=3).duration_s for each in (even, uneven))
    assert steady == pytest.approx(1.0, rel=0.01)
    assert 1.05 < shaken / steady < 1.5
    long = even.model_copy(update={"costs": StepCosts(step_us=20_000)})
    shaken_long = long.model_copy(update={"noise": Noise(overheads=0.7)})
    few = [(0.0, shape(0, 1, 200))]
    assert simulate(few, shaken_long).duration_s == pytest.approx(simulate(few, long).duration_s, rel=1e-3)


@pytest.mark.slow
def test_several_executors_lose_nothing() -> None:
    schedule = random_schedule(3, 300, rate=400.0, mixed=False, longest=40)
    tight = profile(COSTS, OVERHEADS, **TIGHT)
    made = simulation(schedule, [tight] * 3, keep_gaps=True)
    outcome = made.run()
    assert outcome.requests.ok.all()
    assert outcome.num_preemptions > 0
    check_rows(outcome.requests, schedule)
    made._core.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
def test_several_executors_of_different_sizes_lose_nothing(preemption: str) -> None:
    """Block sizes differ, samples and beams are preempted, and the small pool cannot hold every request to its end."""
    schedule = random_schedule(4, 200, rate=300.0, longest=40)
    sizes = ({"block_size": 4, "num_blocks": 14}, {"block_size": 8, "num_blocks": 16}, {"block_size": 4})
    fleet = [
        profile({**COSTS, "moved_block_us": 30.0}, OVERHEADS, num_host_blocks=16, **{**TIGHT, **each}) for each in sizes
    ]
    made = simulation(schedule, fleet, config=options(preemption=preemption), keep_gaps=True, prompts=Prompts(4))
    outcome = made.run()
    assert set(outcome.requests.error) <= {"", "INVALID_ARGUMENT", "SKIPPED"}
    assert outcome.num_preemptions > 0
    assert outcome.requests.num_preemptions.sum() == outcome.num_preemptions
    check_rows(outcome.requests, schedule)
    made._core.check_integrity()
    assert not made._core.groups
    assert [lane.counts.last_step_id for lane in made._core.lanes.values()] == [
        lane.num_applied for lane in made._lanes
    ]


def test_a_request_that_outgrows_its_pool_goes_on_in_a_larger_one_that_was_idle() -> None:
    small = profile(COSTS, **{**TIGHT, "num_blocks": 5}, name="small")
    outcome = simulate([(0.0, shape(0, 8, 40))], [small, profile(COSTS, **TIGHT)], placement="round-robin")
    (row,) = table(outcome.requests)
    assert row["num_output_tokens"] == 40
    assert row["num_preemptions"] == 1
    assert set(outcome.steps.executor.tolist()) == {0, 1}


def test_an_idle_executor_takes_over_what_waits_for_another() -> None:
    """Both have one slot. The second request waits for the executor that seems free sooner, but is not."""
    one_slot = {"max_num_seqs": 1, "max_num_batched_tokens": 64}
    schedule = [(0.0, shape(0, 8, 400)), (0.0, shape(1, 8, 20)), (0.001, shape(2, 8, 20)), (0.002, shape(3, 8, 20))]
    fleet = [profile({"step_us": 1000.0}, **one_slot)] * 2
    taken = simulate(schedule, fleet).requests
    stays = simulate(schedule, fleet, placement="round-robin").requests
    assert taken.last_s[1:].max() < 0.08  # one after the other on one executor, 20 steps each
    assert stays.last_s[2] > 0.4  # behind the long one


def test_options_that_do_not_fit_an_executor_are_refused() -> None:
    with pytest.raises(LoadTestError, match="executor toy: max_num_batched_tokens"):
        simulation([], profile(max_num_seqs=8), config=options(max_num_batched_tokens=4))
    with pytest.raises(LoadTestError, match="at least one is needed"):
        simulation([], [])


def test_a_prompt_whose_last_token_is_left_over_has_a_first_token_too() -> None:
    """The budget leaves one token of the prompt: it is computed as a decode, which gives the first output."""
    outcome = simulate(
        [(0.0, shape(0, 33, 5))], profile(COSTS, max_num_batched_tokens=32, max_num_seqs=4), keep_gaps=True
    )
    (row,) = table(outcome.requests)
    assert row["first_s"] == pytest.approx(0.0042 + 0.0011)
    assert row["num_gaps"] == 4


@pytest.mark.slow
def test_steps_are_thinned_and_preemptions_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = random_schedule(5, 150, rate=150.0, mixed=False, longest=40)
    tight = profile(COSTS, OVERHEADS, **TIGHT)  # no two steps are planned at one moment
    whole = simulate(schedule, tight)
    monkeypatch.setattr(run_module, "MAX_STEP_ROWS", 64)
    thin = simulate(schedule, tight)
    assert whole.step_stride == 1
    assert thin.step_stride >= 4
    assert len(whole.steps) >= thin.step_stride * len(thin.steps) - thin.step_stride
    assert len(thin.steps) <= 64
    left_over = whole.steps.num_preempted[whole.steps.planned_s > thin.steps.planned_s[-1]].sum()
    assert thin.steps.num_preempted.sum() + left_over == whole.steps.num_preempted.sum() > 0
    kept = np.isin(whole.steps.planned_s, thin.steps.planned_s)
    for name in ("num_sequences", "num_tokens", "num_used_blocks", "num_stored_tokens", "applied_s"):
        assert np.array_equal(getattr(whole.steps, name)[kept], getattr(thin.steps, name)), name


def test_rows_of_steps_keep_every_second_when_full() -> None:
    kept = StepRows(4)
    for number in range(1, 41):
        if kept.is_due(1):
            kept.put((float(number),) * (len(rows._STEP_FIELDS) - 1))
    columns = kept.columns()
    assert kept.stride == 16
    assert columns.executor.tolist() == [16, 32]
    assert columns.num_preempted.tolist() == [16, 16]


@pytest.mark.slow
def test_the_load_of_steps_is_the_cores() -> None:
    schedule = random_schedule(9, 100, rate=150.0, longest=40)
    steps = simulate(schedule, profile(COSTS, **TIGHT)).steps
    assert (steps.num_stored_tokens <= steps.num_used_blocks * TIGHT["block_size"]).all()
    assert (steps.num_used_blocks <= TIGHT["num_blocks"]).all()
    assert (steps.applied_s > steps.planned_s).all()
    assert steps.num_sequences.max() > 3
    assert steps.num_waiting.max() > 0


def check_rows(requests: RequestColumns, schedule: list) -> None:
    """What holds for every request that ended well."""
    for row, (_, wanted_shape) in zip(table(requests), schedule, strict=True):
        if row["error"]:
            continue
        wanted = wanted_shape.num_samples * wanted_shape.num_output_tokens
        # All requests except those that exceed the longest sequence or the pool.
        width = max(wanted_shape.n, wanted_shape.beam_width)
        if row["num_prompt_tokens"] + (width + 1) * wanted_shape.num_output_tokens <= TIGHT["max_model_len"]:
            assert row["num_output_tokens"] == wanted
        assert 0 < row["num_output_tokens"] <= wanted
        assert row["due_s"] < row["first_s"] <= row["last_s"]
        assert 0 <= row["queue_s"] < row["server_first_s"] <= row["server_total_s"]
        assert row["num_prompt_tokens"] >= wanted_shape.num_prompt_tokens
        assert row["num_cached_tokens"] < row["num_prompt_tokens"]
        gaps = row["gaps"]
        if not wanted_shape.beam_width:
            assert gaps.sum() == pytest.approx(row["last_s"] - row["first_s"], abs=1e-5)
            assert (gaps > 0).all()
            assert len(gaps) >= row["num_output_tokens"] / wanted_shape.n - 1
        if wanted_shape.n == 1 and not wanted_shape.beam_width:
            assert len(gaps) == row["num_output_tokens"] - 1


def table(requests: RequestColumns) -> list[dict]:
    """Rows as dicts, each with its gaps."""
    names = [field.name for field in fields(RequestColumns) if field.name != "gap_s"]
    found = [{name: getattr(requests, name)[place] for name in names} for place in range(len(requests))]
    ends = np.cumsum(requests.num_gaps)
    for row, end in zip(found, ends, strict=True):
        row["gaps"] = requests.gap_s[end - row["num_gaps"] : end]
    return found


def tpot(requests: RequestColumns) -> float:
    return float(per_request(requests)["tpot_s"][0])
