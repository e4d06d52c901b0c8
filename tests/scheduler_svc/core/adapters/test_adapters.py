"""What executors get to load and unload, and for how long a group waits for its adapter's turn."""

from __future__ import annotations

import dataclasses

import pytest

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.adapters.events import (
    AdapterFailure,
    AdapterLoaded,
    AdapterRegistered,
    AdapterRemoved,
    AdapterUnloaded,
)
from scheduler_svc.core.adapters.turns import MAX_PASSED, MAX_PASSED_S
from scheduler_svc.core.errors import InvariantError, RequestRejectedError
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import FairOrder, FcfsOrder, PriorityOrder
from scheduler_svc.core.types import RequestSpec
from tests.helpers.core.adapter_rig import Rig


def test_adapters_with_names_are_loaded_while_there_are_places_a_few_at_once() -> None:
    rig = Rig(max_cpu_loras=5)
    rig.register(*range(1, 9))
    assert rig.commands() == ([1, 2, 3, 4], [])
    assert rig.commands() == ([], [])
    rig.core.adapter_event(AdapterLoaded(2, b"2"))
    assert rig.commands() == ([5], [])
    for index in (1, 3, 4, 5):
        rig.core.adapter_event(AdapterLoaded(index, b"%d" % index))
    assert rig.commands() == ([], []), "there are no more places"


def test_an_adapter_that_an_operator_loads_takes_a_place_like_a_request() -> None:
    rig = Rig(max_cpu_loras=2)
    rig.register(1, 2)
    rig.load_all()
    rig.core.adapter_event(AdapterRegistered(3, "a3", "/a", wanted=True))
    assert rig.commands() == ([], [1])
    rig.core.adapter_event(AdapterUnloaded(1))
    assert rig.commands() == ([3], [])
    rig.core.adapter_event(AdapterLoaded(3, b"3"))
    assert rig.commands() == ([], [])
    rig.add(1)
    assert rig.commands() == ([], [2])


def test_no_more_adapters_are_unloaded_than_places_are_short() -> None:
    """Also while the answers to earlier unloads are on their way."""
    rig = Rig(max_cpu_loras=4)
    rig.register(*range(1, 8))
    rig.load_all()
    unloads = []
    for index in (5, 6, 7):
        rig.add(index)
        unloads += rig.commands()[1]
    assert unloads == [1, 2, 3]


def test_the_last_request_of_an_adapter_without_a_name_ends_before_the_engine_knows() -> None:
    rig = Rig()
    rig.register(1)
    rig.load_all()
    name = rig.add(1)
    rig.step()
    rig.core.adapter_event(AdapterRemoved(1))
    rig.end(name)
    assert rig.core.adapter_refusal(1) is None


def test_a_request_that_waits_for_another_lane_takes_no_turn_of_this_one() -> None:
    """The oldest request is overdue, and every lane looks at it first: the turn of lane 1 is its own request's."""
    rig = Rig(max_loras=1, max_cpu_loras=8, num_lanes=2)
    rig.register(1, 2, 3, 4)
    for lane in (0, 1):
        rig.load_all(lane)
    first, second = rig.add(1), rig.add(2)
    rig.step(0)
    rig.step(1)
    here, there = (rig.group(name).lane_id for name in (first, second))
    assert {here, there} == {0, 1}
    rig.add(3)
    rig.step(here)
    rig.now += 1.5
    waiting = rig.add(4)
    for _ in range(3):
        rig.step(here)
        rig.step(there)
    for lane in (0, 1):
        turn = rig.core.lanes[lane].adapters.turns.waits
        assert turn is None or turn.placed_on == lane
    placed = rig.group(waiting).placed_on
    assert placed is not None
    assert rig.core.lanes[placed].adapters.turns.waits is not None


def test_a_request_takes_the_place_of_the_least_recently_used() -> None:
    rig = Rig(max_cpu_loras=3)
    rig.register(1, 2, 3, 4)
    rig.load_all()
    names = [rig.add(index) for index in (1, 2)]
    rig.step()
    rig.add(4)
    assert len(rig.core.adapters.parked) == 1
    assert rig.commands() == ([], [3]), "1 and 2 are in use"
    assert rig.commands() == ([], []), "the place is free only when the executor says so"
    rig.core.adapter_event(AdapterUnloaded(3))
    assert rig.commands() == ([4], [])
    rig.core.adapter_event(AdapterLoaded(4, b"4"))
    assert not rig.core.adapters.parked
    for name in names:
        rig.end(name)
    rig.step()
    assert rig.running == {"r3"}
    # Unloaded adapters are loaded anew when they are needed: 1 was used before 2.
    rig.add(3)
    assert rig.commands() == ([], [1])


def test_an_adapter_without_a_name_is_unloaded_after_its_last_request() -> None:
    rig = Rig()
    rig.register(1, 2)
    rig.load_all()
    name = rig.add(1)
    rig.core.adapter_event(AdapterRemoved(1))
    rig.core.adapter_event(AdapterRemoved(2))
    assert rig.commands() == ([], [2])
    rig.step()
    assert rig.running == {name}
    rig.end(name)
    assert rig.commands() == ([], [1])
    with pytest.raises(RequestRejectedError, match="unloaded"):
        rig.add(1)
    with pytest.raises(InvariantError, match="used again"):
        rig.register(2)


def test_a_request_runs_where_its_adapter_is_and_is_refused_where_it_fails_everywhere() -> None:
    rig = Rig(num_lanes=2)
    rig.register(1)
    assert rig.commands(0) == rig.commands(1) == ([1], [])
    name = rig.add(1)
    rig.step(0)
    rig.step(1)
    assert not rig.running
    error = AdapterFailure(3, "tensor x is wrong")
    rig.core.adapter_event(AdapterLoaded(1, error=error), 0)
    assert rig.core.adapter_refusal(1) is None
    rig.core.adapter_event(AdapterLoaded(1, b"one"), 1)
    rig.step(0)
    rig.step(1)
    assert rig.running == {name}
    assert rig.core.groups["", name].lane_id == 1
    assert rig.core.adapter_refusal(1, b"one") is None
    assert "have changed" in rig.core.adapter_refusal(1, b"other").message  # type: ignore[union-attr]
    rig.end(name)
    num_answers = rig.core.adapters.num_answers
    rig.core.remove_executor(1, rig.now)
    assert rig.core.adapter_refusal(1) == error
    assert rig.core.adapters.num_answers > num_answers, "the engine looks at waiting requests again"


def test_another_content_is_refused_and_unloaded() -> None:
    rig = Rig(num_lanes=2)
    rig.register(1)
    rig.load_all(0)
    assert rig.commands(1) == ([1], [])
    rig.core.adapter_event(AdapterLoaded(1, b"another"), 1)
    assert not rig.core.lanes[1].adapters.has(1)
    assert rig.commands(1) == ([], [1])
    rig.core.adapter_event(AdapterUnloaded(1), 1)
    assert rig.commands(1) == ([], []), "it is not loaded again"
    assert rig.core.adapter_refusal(1) is None, "the other executor has it"


def test_no_more_adapters_run_than_may_and_those_without_pass() -> None:
    rig = Rig(max_loras=2)
    rig.register(1, 2, 3)
    rig.load_all()
    names = [rig.add(index) for index in (1, 2, 3, 1, 0, 3)]
    rig.step()
    assert rig.running == {names[0], names[1], names[3], names[4]}
    rig.end(names[1])
    rig.step()
    assert rig.running == {names[0], names[3], names[4], names[2], names[5]}


@pytest.mark.parametrize("order", [FcfsOrder, PriorityOrder, FairOrder])
def test_many_that_find_no_place_hide_nobody(order: type[FcfsOrder | PriorityOrder | FairOrder]) -> None:
    rig = Rig(max_loras=1, policies=Policies(order=order()))
    rig.register(1, 2)
    rig.load_all()
    first = rig.add(1)
    rig.step()
    for _ in range(600):
        rig.add(2)
    plain, another = rig.add(0), rig.add(1)
    rig.step()
    assert rig.running == {first, plain, another}


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_a_group_is_passed_over_so_many_times_at_most(order: str) -> None:
    """Requests of the adapter that runs come again and again, and the smallest priority goes first."""
    rig = Rig(max_loras=1, policies=Policies(order=PriorityOrder()) if order == "priority" else None)
    rig.register(1, 2)
    rig.load_all()
    running = [rig.add(1)]
    rig.step()
    waits = rig.add(2)
    num_passed = 0
    for _ in range(3 * MAX_PASSED):
        running.append(rig.add(1, priority=-1))
        rig.step()
        if waits in rig.running:
            break
        num_passed += running[-1] in rig.running
        # The oldest ends: there is always one that runs, unless the others have to wait.
        rig.end(next(name for name in running if name in rig.running))
    assert waits in rig.running
    # In the order of priority the first of them is admitted before the group heads the queue.
    assert num_passed == MAX_PASSED + (order == "priority")
    rig.end(waits)
    rig.step()
    assert running[-1] in rig.running, "what had to wait goes on"


@pytest.mark.parametrize("order", ["fair", "priority"])
def test_earlier_groups_pass_no_longer_than_later_ones(order: str) -> None:
    """Many requests came before, and the order puts the one that lacks a place between them."""
    rig = Rig(max_loras=1, policies=Policies(order=FairOrder() if order == "fair" else PriorityOrder()))
    rig.register(1, 2)
    rig.load_all()
    before = [rig.add(1, tenant="x") for _ in range(3 * MAX_PASSED)]
    rig.step()
    first = len(rig.running)
    assert first < len(before)
    waits = rig.add(2, tenant="y", priority=-1)
    num_steps = 0
    while waits not in rig.running:
        num_steps += 1
        assert num_steps <= MAX_PASSED + first + 1
        rig.end(next(name for name in before if name in rig.running))
        rig.step()


def test_a_group_is_passed_over_for_so_long_at_most() -> None:
    rig = Rig(max_loras=1)
    rig.register(1, 2)
    rig.load_all()
    first = rig.add(1)
    rig.step()
    waits = rig.add(2)
    rig.step()
    rig.now += MAX_PASSED_S / 2
    passes = rig.add(1)
    rig.step()
    assert rig.running == {first, passes}
    rig.now += MAX_PASSED_S / 2
    late, base = rig.add(1), rig.add(0)
    rig.step()
    assert rig.running == {first, passes, base}, "only those without an adapter pass from now on"
    rig.end(first)
    rig.end(passes)
    rig.step()
    assert rig.running == {base, waits}
    rig.end(waits)
    rig.step()
    assert rig.running == {base, late}


def test_a_turn_ends_with_its_group() -> None:
    rig = Rig(max_loras=1)
    rig.register(1, 2)
    rig.load_all()
    first = rig.add(1)
    rig.step()
    waits = rig.add(2)
    rig.step()
    rig.now += MAX_PASSED_S
    late = rig.add(1)
    rig.step()
    assert rig.running == {first}
    rig.end(waits)
    rig.step()
    assert rig.running == {first, late}


def test_what_only_executors_without_its_adapter_can_hold_is_named() -> None:
    """The larger executor cannot load it. A request that fits nowhere is refused as any other."""
    rig = Rig(num_lanes=2)
    small = dataclasses.replace(rig.core.lanes[1].spec, max_num_seqs=2)
    rig.core.add_executor(1, small)
    rig.register(1)
    assert rig.commands(0) == rig.commands(1) == ([1], [])
    three = RequestSpec("three", (1, 2, 3), SequenceSampling(), 10, num_samples=3, adapter_index=1)
    assert rig.core.adapter_misfit(three) is None
    rig.core.add_request(three, rig.now)
    rig.core.adapter_event(AdapterLoaded(1, b"one"), 1)
    rig.core.adapter_event(AdapterLoaded(1, error=AdapterFailure(3, "broken")), 0)
    assert rig.core.adapter_refusal(1) is None
    for found in (rig.core.adapter_misfit(three), rig.core.misfit(three.key)):
        assert found is not None
        assert str(found) == "3 sequences exceed max_num_seqs = 2"
    assert rig.core.adapter_misfit(dataclasses.replace(three, adapter_index=0)) is None
    assert rig.core.adapter_misfit(dataclasses.replace(three, num_samples=99)) is None
    with pytest.raises(RequestRejectedError, match="99 sequences"):
        rig.core.add_request(dataclasses.replace(three, request_id="many", num_samples=99), rig.now)
