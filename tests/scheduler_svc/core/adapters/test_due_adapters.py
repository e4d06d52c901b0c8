"""Adapters that requests have waited for long: whose place they take, and whom they keep from beginning."""

from __future__ import annotations

from scheduler_svc.core.adapters.events import AdapterDue, AdapterLoaded, AdapterUnloaded
from tests.helpers.core.adapter_rig import Rig


def test_a_due_adapter_takes_the_place_of_one_whose_requests_only_wait() -> None:
    rig = Rig(max_loras=1, max_cpu_loras=2)
    rig.register(1, 2, 3)
    rig.load_all()
    first, second = rig.add(1), rig.add(2)
    rig.step()
    third = rig.add(3)
    assert rig.commands() == ([], []), "both are in use"
    rig.core.adapter_event(AdapterDue(3))
    assert rig.commands() == ([], [2])
    assert {group.key[1] for group in rig.core.adapters.parked} == {second, third}
    rig.core.adapter_event(AdapterUnloaded(2))
    rig.load_all()
    rig.end(first)
    rig.step()
    assert rig.running == {third}
    assert rig.commands() == ([], [1]), "nobody uses it any more"
    rig.core.adapter_event(AdapterUnloaded(1))
    rig.load_all()
    rig.end(third)
    rig.step()
    assert rig.running == {second}


def test_where_all_adapters_run_a_due_one_keeps_others_from_beginning() -> None:
    rig = Rig(max_loras=2, max_cpu_loras=2)
    rig.register(1, 2, 3)
    rig.load_all()
    first, second = rig.add(1), rig.add(2)
    rig.step()
    late, plain, third = rig.add(1), rig.add(0), rig.add(3)
    rig.core.adapter_event(AdapterDue(3))
    assert rig.commands() == ([], [])
    rig.step()
    assert rig.running == {first, second, plain}, "one without an adapter takes no place"
    rig.end(first)
    rig.step()
    assert late not in rig.running
    assert rig.commands() == ([], [1])
    rig.core.adapter_event(AdapterUnloaded(1))
    rig.load_all()
    rig.step()
    assert rig.running == {second, plain, third}
    assert {group.key[1] for group in rig.core.adapters.parked} == {late}


def test_a_due_adapter_whose_requests_end_bars_nobody() -> None:
    rig = Rig(max_loras=1, max_cpu_loras=1)
    rig.register(1, 2)
    rig.load_all()
    first = rig.add(1)
    rig.step()
    waiting = rig.add(2)
    rig.core.adapter_event(AdapterDue(2))
    rig.commands()
    late = rig.add(1)
    rig.step()
    assert rig.running == {first}
    rig.end(waiting)
    rig.step()
    assert rig.running == {first, late}


def test_a_due_adapter_takes_a_place_of_a_lane_where_its_requests_do_not_run() -> None:
    rig = Rig(max_loras=1, max_cpu_loras=1, num_lanes=2)
    rig.register(1, 2)
    for lane in (0, 1):
        rig.load_all(lane)
    rig.add(1)
    rig.step()
    waiting = rig.add(2)
    assert [rig.commands(lane) for lane in (0, 1)] == [([], [])] * 2, "a request uses it"
    rig.core.adapter_event(AdapterDue(2))
    assert [rig.commands(lane) for lane in (0, 1)] == [([], []), ([], [1])]
    rig.core.adapter_event(AdapterUnloaded(1), 1)
    rig.load_all(1)
    rig.step(1)
    assert waiting in rig.running


def test_due_adapters_take_turns_and_each_has_a_request_that_begins() -> None:
    """Commands go before plans: the next due adapter must not take the place before a request of this one begins."""
    rig = Rig(max_loras=1, max_cpu_loras=1)
    rig.register(1, 2, 3, 4)
    rig.load_all()
    running = rig.add(1)
    rig.step()
    waiting = {index: [rig.add(index), rig.add(index)] for index in (2, 3, 4)}
    for index in waiting:
        rig.core.adapter_event(AdapterDue(index))
    last = 1
    for index, (first, second) in waiting.items():
        rig.end(running)
        assert rig.commands() == ([], [last])
        rig.core.adapter_event(AdapterUnloaded(last))
        assert rig.commands() == ([index], [])
        rig.core.adapter_event(AdapterLoaded(index, b"%d" % index))
        assert rig.commands() == ([], []), "no request of it has begun yet"
        rig.step()
        assert first in rig.running
        rig.end(second)
        running, last = first, index


def test_a_due_adapter_takes_the_place_of_one_whose_turn_ended_without_a_request() -> None:
    rig = Rig(max_loras=1, max_cpu_loras=1)
    rig.register(1, 2, 3)
    rig.load_all()
    first = rig.add(1)
    rig.step()
    second, third = rig.add(2), rig.add(3)
    for index in (2, 3):
        rig.core.adapter_event(AdapterDue(index))
    rig.end(first)
    rig.commands()
    rig.core.adapter_event(AdapterUnloaded(1))
    rig.load_all()
    rig.end(second)
    assert rig.commands() == ([], [2])
    rig.core.adapter_event(AdapterUnloaded(2))
    rig.load_all()
    rig.step()
    assert rig.running == {third}
