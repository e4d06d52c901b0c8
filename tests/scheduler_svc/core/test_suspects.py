"""Requests that kill executors: each is found and ended, and nothing else is."""

from __future__ import annotations

import math
import random

import pytest

from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.steps.suspects import MAX_DEATHS_ALONE
from scheduler_svc.core.types import BeamSpec, FinishDetail
from tests.helpers.core.core_bench import Bench

BEAMS = {"beams": BeamSpec(2), "temperature": 0.0}


def check_others(bench: Bench) -> None:
    """Every request without poison has the tokens of an undisturbed run."""
    for request_id, spec in bench.specs.items():
        if request_id in bench.poisons:
            continue
        if spec.beams:
            assert bench.found(request_id) == bench.known_beams(request_id)[: spec.num_samples]
            continue
        for index in range(spec.num_samples):
            assert bench.samples[request_id, index] == bench.known(request_id, index)
            assert bench.ends[request_id, index] is not FinishDetail.EXECUTOR_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("poison", [0, 17, 63])
@pytest.mark.parametrize("fails", [False, True])
def test_one_of_64_is_found_after_log2_deaths(poison: int, fails: bool) -> None:
    bench = Bench(max_num_seqs=64, num_slots=66, num_blocks=640, max_num_batched_tokens=256)
    for index in range(64):
        bench.add(f"r{index}", [index % 50, *range(3 + index % 5)], max_tokens=12 + index % 7, seed=index)
    bench.poisons[f"r{poison}"] = 9
    bench.run(fails=fails)
    assert bench.details[f"r{poison}"] is FinishDetail.EXECUTOR_ERROR
    assert bench.num_deaths <= math.log2(64) + MAX_DEATHS_ALONE
    check_others(bench)


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("position", [0, 3, 5, 8])
@pytest.mark.parametrize("kind", [{}, {"n": 2}, BEAMS], ids=["one", "samples", "beams"])
def test_it_is_found_at_any_position(kind: dict[str, object], position: int, fails: bool) -> None:
    """In the prompt's first and last tokens, and in the output."""
    bench = Bench()
    bench.add("poison", 6, max_tokens=8, **kind)  # type: ignore[arg-type]
    bench.add("a", 7, max_tokens=12)
    bench.add("b", 9, max_tokens=9)
    bench.poisons["poison"] = position
    bench.run(fails=fails)
    assert bench.details["poison"] is FinishDetail.EXECUTOR_ERROR
    assert bench.num_deaths <= 1 + 1 + MAX_DEATHS_ALONE, "among three, then in a half, then alone"
    check_others(bench)


def test_the_first_death_of_a_request_by_itself_does_not_count() -> None:
    """The first death is in a step that two plans may explain; only trials count."""
    bench = Bench()
    bench.add("poison", 40)
    bench.poisons["poison"] = 35
    bench.run()
    assert bench.details["poison"] is FinishDetail.EXECUTOR_ERROR
    assert bench.num_deaths == 1 + MAX_DEATHS_ALONE
    assert not bench.core.groups


def test_two_poisons_are_both_found() -> None:
    bench = Bench(max_num_seqs=8, num_slots=10)
    for index in range(8):
        bench.add(f"r{index}", [index, 1, 2], max_tokens=14, seed=index)
    bench.poisons |= {"r2": 7, "r6": 7}
    bench.run()
    assert {name for name, detail in bench.details.items() if detail is FinishDetail.EXECUTOR_ERROR} == {"r2", "r6"}
    check_others(bench)


def test_deaths_for_other_reasons_end_no_request() -> None:
    """Each comes at another moment: between steps, in shared steps, in trials that were not known to have begun."""
    bench = Bench()
    bench.add("long", 50, max_tokens=10)
    bench.add("short", 5, max_tokens=20)
    for number in range(30):
        for _ in range(number % 4 + 1):
            bench.step()
        bench.plan()
        bench.die(is_known=bool(bench.plans) and not bench.plans[0].announces_start)
    bench.run()
    assert set(bench.details.values()) == {FinishDetail.MAX_TOKENS}
    check_others(bench)


def test_a_step_that_is_not_known_to_have_begun_counts_for_nothing() -> None:
    bench = Bench()
    bench.add("r", 6, max_tokens=4)
    for _ in range(10):
        assert bench.plan() is not None
        bench.die(is_known=False)
    assert not bench.details
    for _ in range(MAX_DEATHS_ALONE):
        plan = bench.plan()
        assert plan is not None
        assert plan.announces_start
        bench.die()
    assert bench.details["r"] is FinishDetail.EXECUTOR_ERROR


def test_an_end_of_which_nothing_is_known_makes_no_suspects() -> None:
    """As in logs of earlier versions."""
    bench = Bench()
    bench.add("r", 6)
    for _ in range(20):
        plan = bench.plan()
        assert plan is not None
        assert not plan.announces_start
        bench.lose_executor()
    bench.run()
    assert bench.tokens["r"] == bench.known("r")


def test_a_suspect_that_passes_its_position_decodes_with_the_others_again() -> None:
    bench = Bench()
    bench.add("a", 6, max_tokens=20)
    bench.add("b", 6, max_tokens=20)
    for _ in range(5):
        bench.step()
    bench.plan()
    bench.die()
    assert suspects(bench.core) == {"a", "b"}
    trials = []
    while suspects(bench.core):
        before = suspects(bench.core)
        while len(bench.plans) < 2 and bench.plan() is not None:
            pass
        if bench.plans[0].announces_start:
            assert len(bench.plans) == 1, "no other plan is in flight during a trial"
        bench.apply()
        if suspects(bench.core) != before:
            trials.append(before - suspects(bench.core))
    assert trials == [{"a"}, {"b"}]
    bench.step()
    plan = bench.plans[-1]
    assert plan.decode_ready
    assert not plan.scheduled_slots
    bench.run()
    check_others(bench)


def test_others_go_on_while_suspects_are_tried() -> None:
    """A request that came after the death waits for single steps, never for a restart."""
    bench = Bench(max_num_seqs=16, num_slots=18, num_blocks=160, max_num_batched_tokens=32)
    for index in range(15):
        bench.add(f"r{index}", [index, 1, 2, 3], max_tokens=30, seed=index)
    for _ in range(12):
        bench.step()
    bench.plan()
    bench.die()
    bench.add("late", 3, max_tokens=10)
    num_steps = num_trials = 0
    while "late" not in bench.details:
        while len(bench.plans) < 2 and bench.plan() is not None:
            pass
        num_trials += bench.plans[0].announces_start
        bench.apply()
        num_steps += 1
    assert num_trials <= 2 * math.log2(16), "two positions of each were to be computed when the executor died"
    assert num_steps <= 40
    assert bench.tokens["late"] == bench.known("late")


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_load(seed: int) -> None:
    """Requests of all kinds, preempted by swap and recompute, with shared prefixes; two of them are poisonous."""
    rng = random.Random(seed)
    policies = Policies(prefix_caching=rng.random() < 0.5, preemption=rng.choice(["swap", "recompute"]))
    bench = Bench(policies, num_blocks=rng.choice([24, 40]), num_host_blocks=rng.choice([0, 20]))
    for index in range(10):
        prompt = [*range(rng.choice([0, 9])), index, *(rng.randrange(9) for _ in range(rng.randrange(12)))]
        kind = rng.choice([{}, {}, {"n": 2}, BEAMS])
        bench.add(f"r{index}", prompt, rng.randrange(1, 12), seed=index, **kind)
    for name in rng.sample(sorted(bench.specs), 2):
        bench.poisons[name] = rng.randrange(len(bench.specs[name].prompt_token_ids) + 4)
    depth = rng.randrange(1, 4)
    for _ in range(rng.randrange(4)):
        for _ in range(rng.randrange(12)):
            bench.step(depth) if not (bench.lane.inflight and bench.is_fatal()) else bench.die()
        bench.cut_session()
    bench.run(depth, fails=rng.random() < 0.3)
    errors = {name for name, detail in bench.details.items() if detail is FinishDetail.EXECUTOR_ERROR}
    assert errors <= bench.poisons.keys()
    assert bench.num_deaths <= 2 * (math.ceil(math.log2(10)) + 1 + MAX_DEATHS_ALONE)
    check_others(bench)


def suspects(core: Scheduler) -> set[str]:
    """The ids of the requests that are suspected."""
    return {group.spec.request_id for group in core._requests.suspects}


def test_an_executor_that_is_told_to_stop_makes_no_suspects() -> None:
    """Stopped in every step of one request, again and again: no trial, no error, the same tokens."""
    bench = Bench()
    bench.add("r", 7, max_tokens=10)
    for _ in range(3 * MAX_DEATHS_ALONE):
        bench.plan()
        bench.plan()
        bench.die(told_to_stop=True)
        assert not bench.core._requests.suspects
        bench.plan()
        bench.apply()
    bench.run()
    check_others(bench)
