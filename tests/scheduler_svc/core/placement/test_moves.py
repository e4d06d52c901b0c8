"""Executors that are lost, drained, removed or changed: their requests go on elsewhere with the same tokens."""

from __future__ import annotations

import itertools

import pytest

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.policies.batching import StaticBatching
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.types import FinishDetail, RequestSpec, SessionEnd
from tests.helpers.core.fleet_bench import SMALL, FleetBench, spec


def started(*specs: object, count: int = 4, policies: Policies | None = None, **fields: object) -> FleetBench:
    """Two executors that have run some steps of some requests."""
    bench = FleetBench(*(specs or (SMALL, SMALL)), policies=policies)  # type: ignore[arg-type]
    for index in range(count):
        bench.add(f"r{index}", [index, 1, 2, 3, 4], 30, **fields)  # type: ignore[arg-type]
    for _ in range(6):
        bench.step()
    assert all(len(lane.running) for lane in bench.core.lanes.values())
    return bench


@pytest.mark.parametrize("n", [1, 2])
def test_requests_of_a_dead_executor_go_on_elsewhere(n: int) -> None:
    bench = started(count=2, n=n)
    bench.lose(0)
    assert bench.core.lanes[0].running, "its KV is not given up yet"
    bench.give_up(0)
    bench.run()
    assert all(ran_on[-1] == 1 for ran_on in bench.ran_on.values())


def test_until_it_is_given_up_they_wait_for_it() -> None:
    bench = started(count=2)
    bench.lose(0, "session")
    for _ in range(3):
        bench.step()
    assert len(bench.core.lanes[0].running) == 1
    bench.return_(0)
    bench.run()
    assert sorted(itertools.chain(*bench.ran_on.values())) == [0, 1], "nothing has moved"


def test_an_open_executor_cannot_be_given_up() -> None:
    with pytest.raises(InvariantError, match="session is open"):
        started().give_up(0)


def test_new_requests_go_to_open_executors() -> None:
    bench = started()
    bench.lose(0)
    bench.add("new")
    bench.step()
    assert bench.group("new").placed_on in (1, None)
    bench.give_up(0)
    bench.run()
    bench.return_(0)
    for index in range(4):
        bench.add(f"later {index}", [40, index])
    bench.run()
    assert {0, 1} == {bench.ran_on[f"later {index}"][0] for index in range(4)}


def test_all_are_lost_and_one_returns() -> None:
    bench = started()
    for executor_id in (0, 1):
        bench.lose(executor_id)
    bench.give_up(1)
    bench.step()
    bench.return_(1)
    bench.give_up(0)
    bench.run()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_drained_requests_move(preemption: str) -> None:
    small = spec(num_blocks=16, num_host_blocks=32)
    policies = Policies(prefix_caching=True, preemption=preemption)  # type: ignore[arg-type]
    bench = started(small, small, SMALL, count=10, policies=policies)
    bench.core.drain_executor(0, True, bench.now)
    for _ in range(4):
        bench.step()
    assert bench.core.lanes[0].is_empty
    bench.add("new")
    bench.run()
    assert bench.ran_on["new"] != [0]
    bench.core.drain_executor(0, False, bench.now)
    bench.add("back")
    bench.run()


def test_a_swapped_group_of_a_batch_is_taken_over_without_its_kv() -> None:
    batching = StaticBatching(2, window_s=0.0)
    policies = Policies(prefix_caching=True, preemption="swap", batching=batching)
    bench = FleetBench(spec(num_blocks=10, num_host_blocks=32), policies=policies)
    bench.add("a", 6, 20, n=2)
    bench.add("b", [9, 8, 7, 6, 5], 20)
    while not bench.core.lanes[0].swapped:
        bench.step()
    bench.join(SMALL)
    bench.run()
    assert bench.ran_on["b"] == [0, 1]


def test_a_single_draining_executor_ends_what_it_has_and_begins_nothing() -> None:
    bench = FleetBench(spec(num_blocks=12))
    for name in ("a", "b"):
        bench.add(name, 8, 30, seed=ord(name))
    bench.step()
    bench.core.drain_executor(0, True, bench.now)
    bench.add("new")
    for _ in range(200):
        bench.step()
    assert set(bench.core.groups) == {("", "new")}
    assert bench.core.num_preemptions, "what is preempted comes back"
    assert bench.core.lanes[0].is_empty
    assert "new" not in bench.ran_on
    bench.core.drain_executor(0, False, bench.now)
    bench.run()


def test_what_a_draining_executor_preempts_and_no_other_can_hold_ends_there() -> None:
    bench = FleetBench(spec(num_blocks=12), spec(max_model_len=20))
    for name in ("a", "b"):
        bench.add(name, 8, 30, seed=ord(name))
    bench.step()
    bench.core.drain_executor(0, True, bench.now)
    bench.add("new", 30)
    for _ in range(200):
        bench.step()
    assert set(bench.core.groups) == {("", "new")}
    assert bench.core.num_preemptions
    bench.join(SMALL)
    bench.run()
    assert bench.ran_on["new"] == [2]


def test_what_no_other_can_hold_finishes_on_the_draining_one() -> None:
    bench = FleetBench(SMALL, spec(num_blocks=4))
    bench.add("large", 60, 20)
    for _ in range(8):
        bench.step()
    bench.core.drain_executor(0, True, bench.now)
    bench.add("small", [1, 2], 5)
    bench.run()
    assert (bench.ran_on["large"], bench.ran_on["small"]) == ([0], [1])


def test_what_another_can_hold_less_far_finishes_on_the_draining_one() -> None:
    """Else it would be placed there again, and a beam search would never go on."""
    bench = FleetBench(spec(max_model_len=60), spec(max_model_len=50))
    bench.add("long", 20, 200)
    bench.add("short", [1, 2], 5)
    for _ in range(8):
        bench.step()
    bench.core.drain_executor(0, True, bench.now)
    bench.run()
    assert bench.ran_on["long"] == [0]
    assert not bench.core.num_preemptions


def test_a_removed_executor() -> None:
    bench = started()
    bench.remove(0)
    bench.run()
    assert bench.core.lanes.keys() == {1}
    assert bench.core.num_output_tokens == 4 * 30, "counts do not go back"


def test_output_moves_between_equal_numerics_only() -> None:
    bench = started(spec(numerics=b"x"), spec(numerics=b"y"))
    bench.core.add_request(RequestSpec("new", (5, 6), bench.specs["r0"].sampling, 3), bench.now)
    with_output = [key for key, group in bench.core.groups.items() if group.lane_id == 0 and group.has_output]
    assert with_output
    bench.lose(0)
    bench.give_up(0)
    for _ in range(40):
        bench.step()
    assert set(with_output) == set(bench.core.groups), "they wait for the executor with their numerics"
    assert bench.core.stranded == [], "which may come back"
    third = bench.join(spec(numerics=b"x"))
    for _ in range(60):
        bench.step()
    assert not bench.core.groups
    assert all(bench.ran_on[key[1]][-1] == third for key in with_output)


def test_stranded_requests_are_named() -> None:
    bench = started(spec(numerics=b"x"), spec(numerics=b"y"))
    with_output = {key for key, group in bench.core.groups.items() if group.lane_id == 0}
    bench.remove(0)
    assert set(bench.core.stranded) == with_output
    for key in with_output:
        bench.take(bench.core.abort(key, FinishDetail.EXECUTOR_ERROR))
    while bench.core.groups:
        bench.step()


def test_a_request_that_kills_executors_kills_few() -> None:
    """It is tried alone on each executor that it comes to."""
    bench = FleetBench(SMALL, SMALL)
    for index in range(6):
        bench.add(f"r{index}", [index, 1, 2], 12)
    poisons, num_deaths = {("", "r2"): 8}, 0
    for _ in range(400):
        bench.now += bench.tick
        for executor_id, rig in bench.rigs.items():
            while len(rig.plans) < 2 and bench.plan(executor_id):
                pass
            if rig.plans and rig.dies_in_next_step(poisons):
                num_deaths += 1
                step_id = rig.plans[0].step_id
                bench.take(rig.lose("process", 0, bench.now, SessionEnd(begun_step_id=step_id)))
                bench.give_up(executor_id)
                bench.return_(executor_id)
            elif rig.plans:
                bench.apply(executor_id)
    assert not bench.core.groups
    assert bench.details.pop(("r2", 0)) is FinishDetail.EXECUTOR_ERROR
    assert num_deaths <= 7
    del bench.specs["r2"]
    for request_id in bench.specs:
        bench.check(request_id)
