"""Executors that fail in part or return with smaller limits, and requests that must not be affected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cadenza_common.plan.result import SlotError
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import FairOrder, PriorityOrder
from scheduler_svc.core.types import BeamSpec, FinishDetail
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.core.known import VOCAB_SIZE


def come_back(bench: Bench, **limits: int) -> None:
    """Another executor takes the place of the one that was lost."""
    bench.lose_executor()
    bench.spec = replace(bench.spec, **limits)
    bench.core.add_executor(0, bench.spec)
    bench.executor = CoreExecutor(bench.spec, VOCAB_SIZE, bench.costs)


def fail(bench: Bench, error: SlotError, slots: list[int] | None = None) -> None:
    """The oldest plan's result says that these slots have failed: all that were to sample, unless named."""
    result = bench.executor.run(bench.plans.popleft())
    if slots is None:
        slots = list(result.slots)
        result = replace(result, num_tokens=[0] * len(slots), token_ids=[])
    bench.take(
        bench.core.apply_result(0, replace(result, error_slots=slots, errors=[error] * len(slots)), bench.now)[1]
    )
    bench.core.check_integrity()


@pytest.mark.parametrize("beams", [None, BeamSpec(3)], ids=["samples", "beams"])
def test_a_group_that_an_executor_is_too_small_for_ends_and_holds_nobody_up(beams: BeamSpec | None) -> None:
    bench = Bench()
    bench.add("group", 6, n=1 if beams else 3, beams=beams)
    bench.add("other", 6)
    come_back(bench, max_num_seqs=2, num_slots=2)
    bench.run()
    assert bench.details["group"] is FinishDetail.EXECUTOR_ERROR
    assert bench.tokens["other"] == bench.known("other")


def test_samples_that_have_forked_come_back_to_a_smaller_executor_one_by_one() -> None:
    bench = Bench()
    bench.add("group", 6, max_tokens=12, n=3)
    for _ in range(4):
        bench.step(depth=1)
    come_back(bench, max_num_seqs=2, num_slots=2)
    bench.run()
    assert [bench.samples["group", index] for index in range(3)] == [bench.known("group", index) for index in range(3)]


def test_who_had_a_slot_that_is_there_no_more_can_be_aborted() -> None:
    bench = Bench()
    specs = [bench.add(f"r{index}", 3, 9) for index in range(4)]
    bench.step(depth=1)
    come_back(bench, max_num_seqs=2, num_slots=2)
    for spec in specs:
        bench.take(bench.core.abort(spec.key, FinishDetail.ABORTED))
    bench.core.check_integrity()
    assert set(bench.details.values()) == {FinishDetail.ABORTED}


def test_an_error_before_the_fork_ends_the_whole_group() -> None:
    bench = Bench()
    bench.add("group", 40, 4, n=3)
    plan = bench.plan()
    assert plan is not None
    fail(bench, SlotError.UNSPECIFIED, plan.scheduled_slots[:1])
    assert {bench.ends["group", index] for index in range(3)} == {FinishDetail.EXECUTOR_ERROR}
    assert bench.lane.blocks.num_free == bench.spec.num_blocks


@pytest.mark.parametrize("max_tokens", [5, 1], ids=["running", "retired"])
def test_kv_that_is_no_number_is_found_by_nobody(max_tokens: int) -> None:
    bench = Bench(Policies(prefix_caching=True))
    bench.add("bad", 13, max_tokens)
    bench.plan()
    fail(bench, SlotError.NON_FINITE_LOGITS)
    assert bench.details["bad"] is FinishDetail.NON_FINITE_LOGITS
    bench.add("next", 13, max_tokens)
    bench.run()
    assert bench.lane.blocks.prefix_counts.num_hits == 0


def test_a_group_that_needs_blocks_for_its_fork_preempts_a_lower_one_in_time() -> None:
    bench = Bench(
        Policies(order=PriorityOrder()), num_blocks=24, max_num_seqs=8, num_slots=16, max_num_batched_tokens=96
    )
    bench.add("low", 60, 30, priority=5)
    for _ in range(3):
        bench.step()
    bench.add("high", 10, 4, n=7, priority=0)
    steps = 0
    while "high" not in bench.details:
        bench.step()
        steps += 1
    assert steps <= 8
    bench.run()
    assert bench.tokens["low"] == bench.known("low")


def test_a_tenant_is_not_charged_for_having_been_preempted() -> None:
    bench = Bench(Policies(order=FairOrder()), num_blocks=12, watermark=0.0)
    bench.add("light", 4, 20, tenant="b")
    bench.add("light too", 4, 20, tenant="b")
    for _ in range(2):
        bench.step(depth=1)
    for index in range(3):
        bench.add(f"heavy {index}", 20, 10, tenant="a")
    served: dict[str, float] = {}
    order = bench.core._requests.policies.order
    while not bench.core.num_preemptions:
        served = {tenant: order.rank(tenant) for tenant in "ab"}
        bench.step(depth=1)
    assert order.rank("b") - served["b"] < 20, "no more than its tokens"
    bench.run()
