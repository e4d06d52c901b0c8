"""Scheduling orders on a virtual clock: which group goes first, which goes last, and that none starves."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.policies.policies import Policies, Preemption
from scheduler_svc.core.queues.orders import FairOrder, FcfsOrder, OrderPolicy, PriorityOrder, ShortestFirstOrder
from scheduler_svc.core.types import BeamSpec, FinishDetail
from tests.helpers.core.core_bench import Bench

ONE_AT_A_TIME = {"max_num_seqs": 1, "num_slots": 4}


def test_a_smaller_priority_pushes_out_a_larger_one() -> None:
    bench = Bench(Policies(order=PriorityOrder()), **ONE_AT_A_TIME)
    bench.add("low", 3, max_tokens=20, priority=1)
    bench.step()
    bench.add("equal", 3, max_tokens=2, priority=1)
    bench.step()
    assert bench.order == ["low"], "equals do not push each other out"
    bench.add("high", 3, max_tokens=2, priority=0)
    bench.run()
    assert bench.order == ["low", "high", "low", "equal"]
    assert bench.tokens["low"] == bench.known("low")


def test_nobody_is_pushed_out_for_a_group_that_would_not_fit_all_the_same() -> None:
    bench = Bench(Policies(order=PriorityOrder()), num_blocks=8, max_num_seqs=3)
    bench.add("first", 16, max_tokens=12, priority=0)
    bench.add("low", 3, max_tokens=8, priority=5)
    bench.step()
    bench.add("high", 28, max_tokens=2, priority=1)
    bench.step()
    assert bench.core.num_preemptions == 0, "with the 4 blocks of `first` taken, 7 can not be had"
    bench.run()
    assert set(bench.details.values()) == {FinishDetail.MAX_TOKENS}


def test_a_preempted_priority_frees_blocks_for_a_long_prompt() -> None:
    bench = Bench(Policies(order=PriorityOrder()), num_blocks=8, max_num_seqs=4)
    for name in ("a", "b"):
        bench.add(name, 12, max_tokens=4, priority=9)
    bench.step()
    bench.step()
    bench.add("high", 24, max_tokens=4, priority=0)
    bench.run()
    assert bench.order[:3] == ["a", "b", "high"]
    assert bench.tokens["a"] == bench.tokens["b"] == bench.known("a")


def test_short_outputs_go_first() -> None:
    bench = Bench(Policies(order=ShortestFirstOrder()), **ONE_AT_A_TIME)
    bench.add("running", 3, max_tokens=3)
    bench.step()
    bench.add("long", 3, max_tokens=30)
    bench.add("short", 3, max_tokens=5)
    bench.add("said to be shorter", 3, max_tokens=30, expected=2)
    bench.run()
    assert bench.order == ["running", "said to be shorter", "short", "long"]


@pytest.mark.slow
def test_lengths_are_learnt_from_those_that_ended_by_themselves() -> None:
    order = ShortestFirstOrder()
    bench = Bench(Policies(order=order), **ONE_AT_A_TIME)
    for index in range(200):
        bench.add(f"past {index}", 2, max_tokens=4)
    bench.run()
    bench.add("running", 3, max_tokens=3)
    bench.step()
    bench.add("expected to have ten", 3, max_tokens=40, expected=10)
    bench.add("nothing known", 3, max_tokens=40)
    bench.run()
    assert bench.order[-2:] == ["nothing known", "expected to have ten"], "the past says some four tokens"


def served(bench: Bench) -> dict[str, int]:
    """Tokens of each tenant so far; request ids begin with the tenant's name."""
    counts: dict[str, int] = {}
    for name, tokens in bench.tokens.items():
        counts[name[0]] = counts.get(name[0], 0) + len(tokens)
    return counts


def flood(bench: Bench, tenant: str, count: int) -> None:
    for index in range(count):
        bench.add(f"{tenant}{index}", 4, max_tokens=8, tenant=tenant)


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "share"), [({}, 0.5), ({"b": 3.0}, 0.75)])
def test_tenants_are_served_by_their_weights_however_much_they_send(weights: dict[str, float], share: float) -> None:
    bench = Bench(Policies(order=FairOrder(weights)), max_num_seqs=2)
    flood(bench, "a", 400)
    flood(bench, "b", 80)
    while served(bench)["b"] < 400:
        bench.step()
    counts = served(bench)
    assert counts["b"] / (counts["a"] + counts["b"]) == pytest.approx(share, abs=0.05)


def test_an_absent_tenant_does_not_save_up() -> None:
    bench = Bench(Policies(order=FairOrder()), max_num_seqs=2)
    flood(bench, "a", 100)
    for _ in range(200):
        bench.step()
    before = served(bench)["a"]
    flood(bench, "b", 60)
    while served(bench)["b"] < 200:
        bench.step()
    assert served(bench)["a"] - before == pytest.approx(200, abs=40), "not everything for b until it has caught up"


def test_a_prompt_that_has_begun_is_no_obstacle_to_a_tenant_that_was_served_less() -> None:
    """The step's budget goes to the least-served tenant first; without shares the long prompt would take it whole."""
    bench = Bench(Policies(order=FairOrder()), max_num_seqs=4, max_num_batched_tokens=8, num_blocks=64)
    bench.add("long", 40, tenant="a")
    bench.add("longer", 40, tenant="a")
    bench.step()
    bench.add("short", 6, tenant="b")
    bench.step()
    assert bench.order == ["long", "short"], "in the next step, though the long prompt has 32 tokens left"
    bench.step()
    assert bench.tokens["short"], "its whole prompt was computed in that step"


def test_chunks_of_long_prompts_alternate_by_weight() -> None:
    bench = Bench(Policies(order=FairOrder({"b": 3.0})), max_num_seqs=4, max_num_batched_tokens=8, num_blocks=64)
    bench.add("a", 64, tenant="a")
    bench.add("a, waiting", 8, tenant="a")
    bench.step()
    bench.add("b", 48, tenant="b")
    count = 0
    while not bench.tokens["b"]:
        bench.step()
        count += 1
    assert count <= 8 + 1, "6 steps of its own, and every fourth is the other tenant's"


def test_a_tenant_above_its_share_gives_up_slots_for_one_within_its_own() -> None:
    bench = Bench(Policies(order=FairOrder()), max_num_seqs=4)
    for index in range(8):
        bench.add(f"a{index}", 4, max_tokens=40, tenant="a")
    for _ in range(3):
        bench.step()
    assert bench.order == ["a0", "a1", "a2", "a3"]
    for index in range(4):
        bench.add(f"b{index}", 4, max_tokens=40, tenant="b")
    for _ in range(3):
        bench.step()
    assert bench.order[4:] == ["b0", "b1"], "half of the slots"
    preempted = [name for name in ("a0", "a1", "a2", "a3") if bench.sequences(name, "a")[0].group.num_preemptions]
    assert preempted == ["a2", "a3"], "those that came last"
    for _ in range(10):
        bench.step()
    assert bench.order[4:] == ["b0", "b1"], "within its share no tenant is preempted"


@pytest.mark.slow
def test_weights_change_while_it_runs() -> None:
    bench = Bench(Policies(order=FairOrder()), max_num_seqs=2)
    flood(bench, "a", 400)
    flood(bench, "b", 400)
    bench.core.set_weights({"b": 3.0})
    while served(bench)["b"] < 400:
        bench.step()
    counts = served(bench)
    assert counts["b"] / (counts["a"] + counts["b"]) == pytest.approx(0.75, abs=0.05)


MAX_WAIT_S = 40.0
ORDERS = [FcfsOrder, PriorityOrder, ShortestFirstOrder, FairOrder]


@pytest.mark.parametrize("order", ORDERS)
def test_nobody_waits_longer_than_the_bound(order: type[OrderPolicy]) -> None:
    """New requests that every order prefers come faster than they can be served; the unloved one gets in all the same.

    Its wait is at most max_wait_s, the time until what runs has ended, and the service of those that became overdue
    before it: here none.
    """
    bench = Bench(Policies(order=order(), max_wait_s=MAX_WAIT_S), max_num_seqs=2, num_blocks=16)
    bench.add("unloved", 8, max_tokens=30, priority=9, tenant="greedy")
    longest_run = 10
    for index in range(6):
        bench.add(f"greedy{index}", 4, max_tokens=longest_run, priority=0, tenant="greedy")
    count = 0
    while "unloved" not in bench.details:
        for _ in range(2):
            bench.add(f"loved{count}", 3, max_tokens=longest_run // 2, priority=-1, tenant=f"t{count}", expected=1)
            count += 1
        bench.step()
        if "unloved" in bench.order:
            break
    assert bench.now <= MAX_WAIT_S + longest_run + 5
    start = bench.now
    while "unloved" not in bench.details:
        bench.add(f"loved{count}", 3, max_tokens=longest_run // 2, priority=-1, tenant=f"t{count}", expected=1)
        count += 1
        bench.step()
    assert bench.tokens["unloved"] == bench.known("unloved")
    assert bench.now <= start + MAX_WAIT_S + 30 + 10, "once overdue it is never a victim"


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("group", [{"n": 4}, {"beams": BeamSpec(4)}], ids=["samples", "beams"])
@pytest.mark.parametrize("order", [FcfsOrder, PriorityOrder, ShortestFirstOrder, FairOrder])
def test_a_group_waits_no_longer_than_the_bound(
    order: type[OrderPolicy], group: dict[str, Any], preemption: Preemption
) -> None:
    """It needs all slots at once."""
    policies = Policies(order=order(), max_wait_s=MAX_WAIT_S, preemption=preemption)
    bench = Bench(policies, max_num_seqs=4, num_blocks=24, num_host_blocks=64)
    longest_run = 10
    for index in range(3):
        bench.add(f"first{index}", 4, max_tokens=longest_run, priority=0, tenant="greedy")
    bench.add("unloved", 8, max_tokens=30, priority=9, tenant="greedy", expected=99, **group)
    count = 0
    while "unloved" not in bench.order:
        bench.add(f"loved{count}", 3, max_tokens=5, priority=-1, tenant=f"t{count}", expected=1)
        count += 1
        bench.step()
    assert bench.now <= MAX_WAIT_S + longest_run + 5


@pytest.mark.slow
@pytest.mark.parametrize("order", [PriorityOrder, ShortestFirstOrder])
def test_without_the_bound_it_would_starve(order: type[OrderPolicy]) -> None:
    """Shows that the test above proves something."""
    bench = Bench(Policies(order=order()), max_num_seqs=2, num_blocks=16)
    for count in range(300):
        if count == 1:
            bench.add("unloved", 8, max_tokens=30, priority=9)
        for each in range(2):
            bench.add(f"loved{count}.{each}", 3, max_tokens=5, priority=-1, expected=1)
        bench.step()
    assert "unloved" not in bench.order
