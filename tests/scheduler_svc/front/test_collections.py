"""The garbage collector does not walk over a step's joins and ends: they make no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from benchmarks.common import core_load
from benchmarks.common.scheduler_load import Case
from scheduler_svc.front.process_memory import collect_rarely

NUM_STEPS = 12


@pytest.fixture(autouse=True)
def own_thresholds() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


def num_collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_steps_with_churn_cause_few_collections() -> None:
    case = Case(800, 0.05, context_len=20)
    core = core_load.empty_core(case, NUM_STEPS)
    core_load.start(core, case.prompts(0))
    churn = core_load._Churn(case, 0)
    core_load._plan(core)
    collect_rarely()
    gc.collect()
    before = num_collections()
    for _ in range(NUM_STEPS):
        churn.join(core)
        core_load._plan(core)
        core_load._apply(core, churn.result(core))
    # With the default thresholds there is one in each step.
    assert num_collections() - before <= NUM_STEPS // 4
