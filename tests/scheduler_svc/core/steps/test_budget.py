"""What one step may hold."""

from __future__ import annotations

import pytest

from scheduler_svc.core.steps.budget import MAX_ADMITTED_VALUES, StepBudget
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.known import VOCAB_SIZE


def test_the_description_of_the_first_sequence_always_fits() -> None:
    budget = StepBudget(10, 10)
    assert budget.take_values(MAX_ADMITTED_VALUES + 1)
    assert not budget.take_values(1)


@pytest.mark.slow
def test_descriptions_that_would_make_a_plan_too_large_wait_for_the_next() -> None:
    stop_ids = (*range(VOCAB_SIZE),) * (16_000 // VOCAB_SIZE)
    fitting = MAX_ADMITTED_VALUES // (len(stop_ids) + 2)
    names = [f"r{index}" for index in range(fitting + 1)]
    bench = Bench(max_num_seqs=len(names), num_slots=len(names), max_num_batched_tokens=3 * len(names))
    for name in names:
        bench.add(name, 2, max_tokens=1, stop_token_ids=stop_ids)
    plans = [bench.plan(), bench.plan()]
    assert [len(plan.admitted) for plan in plans if plan is not None] == [fitting, 1]
    assert bench.order == names
    bench.run()
    assert all(len(tokens) == 1 for tokens in bench.tokens.values())
