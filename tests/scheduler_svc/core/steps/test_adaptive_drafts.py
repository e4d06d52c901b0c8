"""The number of drafts that the core chooses by what steps cost and accept, over the simulated executor."""

from __future__ import annotations

import pytest

from executor_svc.simulated.costs import StepCosts
from executor_svc.simulated.drafts import AcceptanceSource
from executor_svc.speculation.drafting import Drafting
from scheduler_svc.core.lanes.drafted_step import DraftedStep
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.known import VOCAB_SIZE

NUM_TOKENS = 110
CHEAP = StepCosts(step_us=1000, token_us=10)
"""Rows cost next to nothing: drafts pay."""
DEAR = StepCosts(step_us=100, token_us=1000)
"""Each row costs ten times a step: they do not."""


def adaptive(costs: StepCosts, acceptance: float) -> Bench:
    bench = Bench(
        costs=costs, max_drafts=4, adaptive_drafts=True, num_slots=32, max_num_seqs=32, max_num_batched_tokens=64
    )
    inner = bench.executor.inner
    inner._drafting = Drafting(inner.slots, AcceptanceSource(VOCAB_SIZE, acceptance))
    return bench


def chosen(costs: StepCosts, acceptance: float) -> list[int]:
    """The numbers of drafts of all plans of a few requests, one after the other."""
    bench = adaptive(costs, acceptance)
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


@pytest.mark.slow
@pytest.mark.parametrize(("costs", "acceptance"), [(DEAR, 0.3), (CHEAP, 0.0)])
def test_drafts_that_do_not_pay_are_off_but_for_probes(costs: StepCosts, acceptance: float) -> None:
    later = chosen(costs, acceptance)[100:]
    assert sum(number > 0 for number in later) < 0.2 * len(later)


@pytest.mark.slow
def test_the_same_results_give_the_same_choices() -> None:
    assert chosen(CHEAP, 0.6) == chosen(CHEAP, 0.6)


def test_without_drafts_no_more_blocks_are_taken_ahead() -> None:
    """What was taken before is filled: a sequence then has as many blocks as one that never had drafts."""
    bench = adaptive(DEAR, 0.3)
    bench.add("a", 5, NUM_TOKENS)
    (sequence,) = bench.sequences("a")
    surplus = {0: 0, 1: 0}
    num_plain = 0
    while (plan := bench.plan()) is not None:
        num_plain = 0 if plan.max_drafts else num_plain + 1
        needed = -(-sequence.num_planned_tokens // bench.spec.block_size)
        most = surplus[int(num_plain > 8)]
        surplus[int(num_plain > 8)] = max(most, len(sequence.block_ids) - needed)
        bench.apply()
    assert surplus == {0: 2, 1: 0}


def test_only_decodes_count() -> None:
    """Neither prompts nor other tokens change the size of the batch that the number is chosen for."""
    bench = adaptive(CHEAP, 0.9)
    asked: list[int] = []
    control = bench.lane.draft_control
    choose = control.choose
    control.choose = lambda num_decodes, scopes: asked.append(num_decodes) or choose(num_decodes, scopes)  # type: ignore[method-assign, func-returns-value]
    bench.add("a", 5, 30)
    bench.step(depth=1)
    bench.add("long", 100, 5)
    for _ in range(2):
        plan = bench.plan()
        assert plan is not None
        assert plan.scheduled_num_tokens, "a chunk of the prompt"
        bench.apply()
    assert asked == [1, 1]
    observed = control._buckets
    assert set(observed) == {1}
    assert not control._costs._cells, "steps with prompts say nothing of what decodes cost"


def test_each_scope_in_a_batch_has_its_own_acceptance() -> None:
    """Three sequences of two tenants decode together: results are told apart by their slots."""
    bench = adaptive(CHEAP, 0.9)
    for index, tenant in enumerate(("x", "y", "y")):
        bench.add(f"r{index}", 5, 60, seed=index, tenant=tenant)
    control, batch = bench.lane.draft_control, bench.lane.decode_batch
    seen: list[dict[int, int]] = []
    observe = control.observe

    def watched(step: DraftedStep) -> None:
        seen.append({scope: drafts.num_drafting for scope, drafts in step.by_scope.items()})
        observe(step)

    control.observe = watched  # type: ignore[method-assign]
    counts: list[list[int]] = []
    while bench.plan() is not None:
        counts.append(sorted(batch.draft_scopes.values()))
        bench.apply()
    assert [1, 2] in counts
    assert [1, 2] in [sorted(found.values()) for found in seen]
    assert len(control._by_scope) == 2
    assert not batch.draft_scopes, "all have left"
