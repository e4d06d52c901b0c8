"""What one plan may admit, and how far it computes prompts with logprobs: planning it must not hold the event loop."""

from __future__ import annotations

from scheduler_svc.core.policies.batching import StaticBatching
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.steps.budget import (
    MAX_ADMITTED_SEQUENCES,
    MAX_ADMITTED_TOKENS,
    MAX_PROMPT_LOGPROBS,
    SINGLE_WEIGHT,
    AdmissionBudget,
    StepBudget,
)
from tests.helpers.core.core_bench import Bench

MANY = 3 * MAX_ADMITTED_SEQUENCES


def large_bench(policies: Policies | None = None) -> Bench:
    limits = {"max_num_seqs": MANY, "num_slots": 2 * MANY, "num_blocks": 2 * MANY, "max_num_batched_tokens": 8 * MANY}
    return Bench(policies, **limits)


def test_a_burst_is_admitted_by_several_plans_in_order() -> None:
    bench = large_bench()
    names = [f"r{index}" for index in range(MANY)]
    for name in names:
        bench.add(name, 2, max_tokens=4)
    for index in range(3):
        plan = bench.plan()
        assert plan is not None
        assert len(plan.admitted) == MAX_ADMITTED_SEQUENCES
        assert len(bench.lane.running) == (index + 1) * MAX_ADMITTED_SEQUENCES, "the next plan goes on at once"
    assert bench.order == names
    bench.run(depth=4)
    assert all(bench.tokens[name] == bench.known(name)[:4] for name in names)


def test_a_static_batch_that_is_larger_goes_on_in_the_next_plan() -> None:
    bench = large_bench(Policies(batching=StaticBatching(MAX_ADMITTED_SEQUENCES + 10)))
    for index in range(MANY):
        bench.add(f"r{index}", 2, max_tokens=9)
    admitted = [len(plan.admitted) for _ in range(3) if (plan := bench.plan()) is not None]
    assert admitted == [MAX_ADMITTED_SEQUENCES, 10, 0]
    bench.apply()
    plan = bench.plan()
    assert plan is not None
    assert not plan.admitted, "the next batch waits for the end of this one"


def test_a_group_that_is_larger_alone_is_admitted_whole() -> None:
    bench = large_bench()
    bench.add("small", 2)
    bench.add("large", 2, n=MAX_ADMITTED_SEQUENCES + 1)
    bench.add("last", 2)
    assert bench.plan() is not None
    assert bench.order == ["small"]
    assert bench.plan() is not None
    assert bench.order == ["small", "large"]
    assert bench.plan() is not None
    assert bench.order == ["small", "large", "last"]


def test_sequences_that_are_not_admitted_together_count_for_more() -> None:
    bench = large_bench()
    for index in range(MANY):
        bench.add(f"r{index}", 2, max_tokens=1)
    assert (plan := bench.plan()) is not None
    assert len(plan.admitted) == MAX_ADMITTED_SEQUENCES // SINGLE_WEIGHT


def test_the_tokens_that_a_plan_admits_are_bounded() -> None:
    bench = Bench()
    bench.add("a", 100)
    (group,) = bench.core.groups.values()
    budget = AdmissionBudget(10, num_tokens=250)
    for allowed in (True, True, False):
        assert budget.allows(group) is allowed
        budget.spend(group)
    assert AdmissionBudget(10, num_tokens=1).allows(group), "the first always"
    assert MAX_ADMITTED_TOKENS >= 131_072, "the longest prompt"


def test_a_step_computes_a_bounded_number_of_prompt_logprobs() -> None:
    num_top = 20
    most = MAX_PROMPT_LOGPROBS // (num_top + 1)
    num_tokens = most + 50
    bench = Bench(num_blocks=num_tokens, max_num_batched_tokens=2 * num_tokens, max_model_len=2 * num_tokens)
    bench.add("first", num_tokens, num_prompt_logprobs=num_top)
    bench.add("second", num_tokens, num_prompt_logprobs=num_top)
    plans = [bench.core.plan_step(0, 0.0) for _ in range(2)]
    assert [plan.scheduled_num_tokens for plan in plans if plan is not None] == [[most], [50, most - 50]]


def test_a_token_with_more_logprobs_than_a_step_may_have_is_computed_alone() -> None:
    budget = StepBudget(10, 10)
    assert budget.take_prompt_logprobs(5, MAX_PROMPT_LOGPROBS + 1) == 1
    assert budget.take_prompt_logprobs(5, 1) == 0
