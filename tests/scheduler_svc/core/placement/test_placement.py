"""Several executors: where waiting groups are placed, and for how long the head is passed over."""

from __future__ import annotations

import itertools

import pytest

from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.memory import prefix_lookups
from scheduler_svc.core.placement.placer import MAX_PASS_OVER_S
from scheduler_svc.core.policies.batching import StaticBatching
from scheduler_svc.core.policies.placement import MAX_EXCESS, RoundRobin
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import PriorityOrder
from scheduler_svc.core.types import FinishDetail
from tests.helpers.core.fleet_bench import SMALL, FleetBench, spec

SHARED = [7, *range(30)]
"""The beginning of many prompts."""


def test_requests_are_spread_over_idle_executors() -> None:
    bench = FleetBench(SMALL, SMALL, SMALL)
    for index in range(6):
        bench.add(f"r{index}", [index, 1, 2])
    bench.run()
    assert sorted(itertools.chain(*bench.ran_on.values())) == [0, 0, 1, 1, 2, 2]


def test_step_ids_count_for_each_executor() -> None:
    bench = FleetBench(SMALL, SMALL)
    bench.add("a")
    bench.add("b", [9, 9])
    for _ in range(4):
        bench.step()
    for lane in bench.core.lanes.values():
        assert lane.counts.last_step_id == lane.counts.num_steps >= 4
    bench.run()


def test_the_end_of_a_request_touches_its_executor_alone() -> None:
    bench = FleetBench(SMALL, SMALL, policies=Policies(batching=StaticBatching(2)))
    for index in range(4):
        bench.add(f"r{index}", [index, 5], 20)
    bench.step()
    bench.step()
    first, second = bench.core.lanes.values()
    assert (len(first.running), len(second.running)) == (2, 2), "a batch each"
    bench.take(bench.core.abort(("", "r0"), FinishDetail.ABORTED))
    bench.core.check_integrity()
    bench.take(bench.core.abort(("", "r3"), FinishDetail.ABORTED))
    bench.core.check_integrity()
    assert (len(first.running), len(second.running)) == (1, 1)
    del bench.specs["r0"], bench.specs["r3"]
    bench.run()


def test_a_prompt_goes_where_its_prefix_is_cached() -> None:
    bench = FleetBench(SMALL, SMALL)
    bench.add("a", [*SHARED, 1])
    bench.add("b", [9] * 40)
    bench.run()
    (home,) = bench.ran_on["a"]
    for index in range(3):
        bench.add(f"again {index}", [*SHARED, 2, index])
        bench.run()
        assert bench.ran_on[f"again {index}"] == [home]
    assert bench.core.lanes[home].counts.prefixes.num_hits >= 3 * 28


@pytest.mark.slow
def test_a_prefix_that_all_share_does_not_starve_its_executor() -> None:
    bench = FleetBench(*[spec(max_num_seqs=64, num_slots=64, num_blocks=4_000, max_num_batched_tokens=64)] * 2)
    bench.add("first", SHARED)
    bench.run()
    for index in range(60):
        bench.add(f"r{index}", [*SHARED, index % 50, index // 50], 30)
    bench.step()
    for _ in range(20):
        bench.step()
    busy = sorted(len(lane.running) + bench.core.num_waiting(each) for each, lane in bench.core.lanes.items())
    assert busy[1] - busy[0] <= max(MAX_EXCESS, 0.5 * busy[0]) + 1
    bench.run()


def test_a_request_is_checked_against_single_executors() -> None:
    """One has many blocks, the other many slots: neither holds a request that needs both."""
    bench = FleetBench(spec(max_num_seqs=2, num_slots=2), spec(num_blocks=6, max_num_seqs=8, num_slots=8))
    bench.add("long", 100, 2)
    bench.add("wide", 4, 4, n=4)
    with pytest.raises(RequestRejectedError, match=r"4 sequences exceed max_num_seqs = 2|the pool has 6"):
        bench.add("long and wide", 100, 2, n=4)
    bench.run()
    assert (bench.ran_on["long"], bench.ran_on["wide"]) == ([0], [1])


@pytest.mark.slow
def test_a_smaller_limit_of_another_executor_cuts_nothing() -> None:
    bench = FleetBench(spec(max_model_len=16), SMALL, spec(max_model_len=16))
    for index in range(5):
        bench.add(f"r{index}", [index] * 3, None)
    bench.run()
    assert all(len(bench.outputs[f"r{index}", 0]) == 125 for index in range(5))


def test_what_outgrows_a_small_pool_goes_on_in_a_larger_one() -> None:
    bench = FleetBench(spec(num_blocks=5), spec(num_blocks=5))
    bench.add("r", 3, 60)
    for _ in range(4):
        bench.step()
    larger = bench.join(SMALL)
    bench.run()
    assert bench.ran_on["r"][-1] == larger
    assert bench.details["r", 0] is FinishDetail.MAX_TOKENS


def test_without_a_larger_pool_it_ends_there() -> None:
    bench = FleetBench(spec(num_blocks=5), spec(num_blocks=5))
    bench.add("r", 3, 60)
    while ("r", 0) not in bench.details:
        bench.step()
    assert bench.details["r", 0] is FinishDetail.KV_CAPACITY
    assert len(bench.outputs["r", 0]) == 20 + 1 - 3


def test_features_that_an_executor_lacks() -> None:
    bench = FleetBench(spec(lacks=frozenset({"samples", "prompt_logprobs"})), SMALL)
    for index in range(3):
        bench.add(f"n{index}", [index, 4], n=2)
        bench.add(f"p{index}", [index, 5], num_prompt_logprobs=0)
    bench.run()
    assert all(ran_on == [1] for ran_on in bench.ran_on.values())


def test_the_head_is_passed_over_for_a_bounded_time() -> None:
    """The head waits for an executor whose memory is taken; the other one has no room for long, and takes shorter ones.

    Once it has room, and the head has waited long enough, it admits the head first.
    """
    policies = Policies(prefix_caching=True, order=PriorityOrder())
    bench = FleetBench(spec(max_num_seqs=1, num_slots=2), spec(max_num_seqs=1, num_slots=2), policies=policies)
    bench.add("busy 0", [1, 2], 120)
    bench.add("busy 1", [3, 4], 40)
    bench.step()
    bench.add("head", [5, 6], 5, priority=-1)
    bench.step()
    head = bench.group("head")
    asked = 0
    while head.lane_id is None:
        bench.add(f"other {asked}", [asked % 50, 8, 8], 3, priority=5)
        asked += 1
        bench.step()
        assert bench.now - head.arrival <= MAX_PASS_OVER_S + 45 * bench.tick
    bench.run()


def test_an_idle_executor_takes_what_waits_for_a_busy_one() -> None:
    bench = FleetBench(spec(max_num_seqs=1, num_slots=2), SMALL, policies=Policies(placement=RoundRobin()))
    assert bench.core.lanes.keys() == {0, 1}
    bench = FleetBench(spec(max_num_seqs=1, num_slots=2))
    for index in range(5):
        bench.add(f"r{index}", [index, 3], 60)
    bench.step()
    joined = bench.join(SMALL)
    bench.step()
    bench.step()
    assert len(bench.core.lanes[joined].running) >= 3
    bench.run()


def test_round_robin() -> None:
    bench = FleetBench(SMALL, SMALL, SMALL, policies=Policies(placement=RoundRobin()))
    for index in range(6):
        bench.add(f"r{index}", SHARED)
        bench.step()
    bench.run()
    assert [bench.ran_on[f"r{index}"] for index in range(6)] == [[0], [1], [2], [0], [1], [2]]


def test_an_idle_lane_that_wakes_for_the_head_of_the_queue_takes_it() -> None:
    bench = FleetBench(SMALL, SMALL)
    bench.now = 0.021
    bench.add("head")
    assert not bench.plan(1), "it waits for the other one, which is expected to be as fast"
    due = bench.core.wakes_at(1, bench.now)
    assert due is not None
    assert due - bench.now < MAX_PASS_OVER_S, "as floats"
    bench.now = due
    assert bench.plan(1)


def test_one_plan_looks_up_a_bounded_part_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.core.placement.lookups._MAX_LOOKED_UP", 16 * 100)
    num_tokens, size = 2401, 4
    long = spec(num_blocks=2000, max_model_len=6000, max_num_batched_tokens=6000)
    bench = FleetBench(long, long)
    for index in range(2):
        bench.core.drain_executor(1 - index, True, 0.0)
        bench.add(f"warm {index}", num_tokens, 1)
        bench.run()
        bench.core.drain_executor(1 - index, False, 0.0)
    packed: list[int] = []
    pack = prefix_lookups.pack_blocks
    monkeypatch.setattr(
        prefix_lookups,
        "pack_blocks",
        lambda ids, each: packed.append(len(ids) // each) or pack(ids, each),
    )
    bench.add("a", num_tokens, 1)
    bench.add("b", 3, 1)
    num_plans = 0
    while bench.group("a").placed_on is None and not bench.ran_on["a"]:
        packed.clear()
        # In real calls it is looked ahead for admissions at any time: that must not change when a group is placed.
        list(bench.core.look_ahead(num_plans % 2, bench.now))
        packed.clear()
        planned = bench.plan(num_plans % 2)
        assert sum(packed) <= 100
        assert planned == bool(bench.ran_on["a"]), "it goes first"
        assert planned or bench.core.wakes_at(0, bench.now) == bench.now, "the next plan goes on at once"
        num_plans += 1
    assert num_plans >= 2 * (num_tokens - 1) // size // 100
    bench.run()


def test_lookups_end_with_their_request_or_lane() -> None:
    long = spec(num_blocks=6000, max_model_len=20_000, max_num_batched_tokens=20_000)
    bench = FleetBench(long, long)
    bench.add("warm", 18_000, 1)
    bench.run()
    for name in ("a", "b"):
        bench.add(name, 18_000, 1)
    assert not bench.plan(0), "the lookup of a 4,500th block is another plan's"
    bench.take(bench.core.abort(("", "a"), FinishDetail.ABORTED))
    bench.core.check_integrity()
    del bench.specs["a"]
    assert not bench.plan(0)
    bench.remove(1)
    bench.run()
