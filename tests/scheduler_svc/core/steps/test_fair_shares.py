"""Shares of tenants under the fair order: preemption for a share, and the bounds of a plan."""

from __future__ import annotations

from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import FairOrder
from scheduler_svc.core.steps.budget import MAX_ADMITTED_SEQUENCES, SINGLE_WEIGHT
from tests.helpers.core.core_bench import Bench


def test_a_victim_that_would_come_back_at_once_is_not_preempted() -> None:
    """Its tenant was served less than the one whose group waits, so it would be the next to be admitted."""
    limits = {"num_blocks": 512, "num_slots": 8, "max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 512}
    bench = Bench(Policies(order=FairOrder()), **limits)
    for index in range(3):
        bench.add(f"b{index}", 40, 400, tenant="b")
    bench.step(1)
    bench.add("a0", 300, 200, tenant="a")
    bench.step(1)
    bench.add("a1", 300, 50, tenant="a")
    computed, outputs = bench.num_computed_tokens, bench.core.num_output_tokens
    for _ in range(40):
        bench.step(1)
    assert bench.core.num_preemptions == 0
    assert bench.num_computed_tokens - computed == bench.core.num_output_tokens - outputs == 160


def test_a_plan_has_one_budget_of_admissions() -> None:
    """Groups are admitted before each prompt that has begun, and after all of them."""
    weights = {f"long {index}": 0.1 for index in range(5)}
    bench = Bench(
        Policies(order=FairOrder(weights), long_prefill_token_threshold=64),
        num_blocks=40_000, num_slots=1024, max_num_seqs=1024, max_num_batched_tokens=65_536, max_model_len=4096,
    )  # fmt: skip
    for index in range(5):
        bench.add(f"long {index}", 2000, 2, tenant=f"long {index}")
    bench.step(1)
    for index in range(800):
        bench.add(f"short {index}", 2, 4, tenant=f"short {index % 400}")
    plan = bench.plan()
    assert plan is not None
    assert len(plan.admitted) == MAX_ADMITTED_SEQUENCES // SINGLE_WEIGHT


def test_an_overdue_prompt_that_has_begun_goes_on() -> None:
    """However small its tenant's weight: it holds its slot and blocks meanwhile."""
    bench = Bench(
        Policies(order=FairOrder({"slow": 0.001}), max_wait_s=20.0),
        num_blocks=512, num_slots=16, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=512,
    )  # fmt: skip
    bench.add("slow", 200, 2, tenant="slow")
    bench.step(1)
    for number in range(60):
        bench.add(f"quick {number}", 14, 1, tenant="quick")
        bench.step(1)
    assert bench.tokens["slow"]
