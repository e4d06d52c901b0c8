"""The number of drafts that the core chooses by what steps cost and accept, over the simulated executor."""

from __future__ import annotations

import pytest

from executor_svc.simulated.costs import StepCosts
from executor_svc.simulated.drafts import AcceptanceSource
from executor_svc.speculation.drafting import Drafting
from tests.helpers.core_bench import Bench
from tests.helpers.known import VOCAB_SIZE

NUM_TOKENS = 110
CHEAP = StepCosts(step_us=1000, token_us=10)
"""Rows cost next to nothing: drafts pay."""
DEAR = StepCosts(step_us=100, token_us=1000)
"""Each row costs ten times a step: they do not."""


def chosen(costs: StepCosts, acceptance: float) -> list[int]:
    """The numbers of drafts of all plans of a few requests, one after the other."""
    bench = Bench(
        costs=costs, max_drafts=4, adaptive_drafts=True, num_slots=32, max_num_seqs=32, max_num_batched_tokens=64
    )
    inner = bench.executor.inner
    inner._drafting = Drafting(inner.slots, AcceptanceSource(VOCAB_SIZE, acceptance))
    numbers = []
    for index in range(6):
        bench.add(f"r{index}", 5, NUM_TOKENS, seed=index)
        while True:
            while len(bench.plans) < 2 and (plan := bench.plan()) is not None:
                numbers.append(plan.max_drafts)
            if not bench.plans:
                break
            bench.apply()
        assert bench.tokens[f"r{index}"] == bench.known(f"r{index}")
    return numbers


def test_drafts_that_pay_are_made() -> None:
    later = chosen(CHEAP, 0.9)[100:]
    assert sum(later) / len(later) > 2


@pytest.mark.parametrize(("costs", "acceptance"), [(DEAR, 0.3), (CHEAP, 0.0)])
def test_drafts_that_do_not_pay_are_off_but_for_probes(costs: StepCosts, acceptance: float) -> None:
    later = chosen(costs, acceptance)[100:]
    assert sum(number > 0 for number in later) < 0.2 * len(later)


def test_the_same_results_give_the_same_choices() -> None:
    assert chosen(CHEAP, 0.6) == chosen(CHEAP, 0.6)
