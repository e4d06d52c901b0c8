"""What a request that joins and ends costs the core, in calls of Python functions: other load does not change it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from benchmarks.common import core_load
from benchmarks.common.scheduler_load import Case
from benchmarks.lane_scaling import LaneCase, LaneLoad

NUM_STEPS = 20


class Calls:
    """Counts calls while it is active."""

    def __init__(self) -> None:
        self.count = 0

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        self.count += event == "call"

    @contextmanager
    def counting(self) -> Iterator[None]:
        former = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(former)


@pytest.mark.parametrize(("prefix_cache", "most"), [(False, 85), (True, 140)])
def test_a_request_that_joins_and_ends_takes_few_calls(prefix_cache: bool, most: int) -> None:
    """Adding, planning and applying; what the step itself takes is spread over ten requests, and it asks a few times
    whether there are states. Decision 0026 records how they became fewer: there were 266 and 311, then 181 and 225."""
    case = Case(200, 0.05, prefix_cache, context_len=40)
    core = core_load.empty_core(case, NUM_STEPS)
    core_load.start(core, case.prompts(0))
    churn = core_load._Churn(case, 0)
    core_load._plan(core)
    calls = Calls()
    for _ in range(NUM_STEPS):
        calls.count = 0
        with calls.counting():
            churn.join(core)
            core_load._plan(core)
        result = churn.result(core)
        with calls.counting():
            core_load._apply(core, result)
    assert calls.count / case.num_changing <= most


def placing_calls(num_lanes: int) -> float:
    """Calls of functions for each request that is placed on one of so many executors."""
    load = LaneLoad(LaneCase(num_lanes, 8), seed=1)
    load.fill()
    load._add(16)
    placer, calls = load.core._requests.placer, Calls()
    with calls.counting():
        while placer.num_unplaced:
            placer.place(0.0)
    assert sum(placer.num_placed(executor_id) for executor_id in load.core.lanes) == 16
    return calls.count / 16


def test_one_more_executor_adds_little_to_a_placement() -> None:
    """An expected time, and a sixteenth of a look at the lane. Decision 0055 records how they became fewer: there were
    23 for each."""
    few, many = placing_calls(4), placing_calls(20)
    assert (many - few) / 16 <= 2.5
    assert few <= 70
