"""The plan runner against the simulated executor of the service, and what it notices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cadenza_common.plan.plan import AdmittedSequence, BlockMoves, StepPlan
from tests.helpers.scheduler.changing_executor import MODEL
from tests.simulation.catalogue import KnownTokens, catalogue
from tests.simulation.executor.plan_runner import PlanRunner
from tests.simulation.executor.pools import PlanError
from tests.simulation.history import run_history
from tests.simulation.scenario import draw_scenario

_ONE_RUNNER = ("other numerics", "poison", "failed step", "out of memory")
"""Faults that only the plan runner has, or that leave another state behind."""


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_both_executors_give_the_same_history(seed: int) -> None:
    """The same plans have the same results, so the same things happen at the same moments."""
    scenario = draw_scenario(seed)
    faults = tuple(fault for fault in scenario.faults if fault.kind not in _ONE_RUNNER)
    ours = replace(scenario, faults=faults, is_real=False)
    services = replace(ours, is_real=True)
    assert run_history(seed, trace=True, scenario=ours).trace == run_history(seed, trace=True, scenario=services).trace


def _admitted(slot: int, num_computed: int, blocks: tuple[int, ...]) -> AdmittedSequence:
    spec = catalogue()[0].spec
    return AdmittedSequence(slot, (1, 2, 3, 4, 5, 6), 6, num_computed, blocks, spec.sampling, 0)


def _plan(step_id: int, **fields: object) -> StepPlan:
    return StepPlan(step_id, 0, **fields)  # type: ignore[arg-type]


def test_kv_that_is_not_there_is_noticed() -> None:
    runner = PlanRunner(MODEL, KnownTokens())
    computes = {"scheduled_slots": [0], "scheduled_num_tokens": [6], "scheduled_samples": [True]}
    assert runner.run(_plan(1, admitted=[_admitted(0, 0, (3, 4))], **computes)).slots == [0]
    shares = {"scheduled_slots": [1], "scheduled_num_tokens": [2], "scheduled_samples": [True]}
    assert runner.run(_plan(2, admitted=[_admitted(1, 4, (3, 5))], **shares)).slots == [1]
    with pytest.raises(PlanError, match="positions 0 to 3 from page 4, which does not hold its KV"):
        runner.run(_plan(3, released_slots=[1], admitted=[_admitted(1, 4, (4, 6))], **shares))


def test_a_failed_plan_spoils_what_it_writes() -> None:
    runner = PlanRunner(MODEL, KnownTokens())
    computes = {"scheduled_slots": [0], "scheduled_num_tokens": [6], "scheduled_samples": [True]}
    runner.spoil(_plan(1, admitted=[_admitted(0, 0, (3, 4))], **computes))
    runner.clear()
    shares = {"scheduled_slots": [1], "scheduled_num_tokens": [2], "scheduled_samples": [True]}
    with pytest.raises(PlanError, match="does not hold its KV"):
        runner.run(_plan(2, admitted=[_admitted(1, 4, (3, 5))], **shares))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"released_slots": [5]}, "released slot 5 is not admitted"),
        ({"copies": BlockMoves([1, 2], [2, 3])}, "source and destination"),
        ({"swap_out": BlockMoves([1], [2]), "swap_in": BlockMoves([2], [3])}, "a block that is swapped in"),
        ({"scheduled_slots": [4], "scheduled_num_tokens": [1], "scheduled_samples": [False]}, "slot 4 is not admitted"),
    ],
)
def test_a_plan_that_contradicts_the_slots_is_noticed(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlanRunner(MODEL, KnownTokens()).run(_plan(1, **fields))
