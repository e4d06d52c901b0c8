"""Preemption by swap: when it is chosen, what is moved, and that it never ends in a deadlock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cadenza_common.plan.plan import StepPlan
from scheduler_svc.core.policies.batching import ContinuousBatching
from scheduler_svc.core.policies.policies import Policies, Preemption
from scheduler_svc.core.queues.orders import PriorityOrder
from scheduler_svc.core.types import BeamSpec, FinishDetail, SequenceState
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.core_executor import StepCosts


def bench_of(preemption: Preemption, *, costs: StepCosts | None = None, **limits: int) -> Bench:
    """Sixteen blocks; a request of a smaller priority preempts others."""
    limits = {"num_blocks": 16, "num_host_blocks": 32, "max_num_batched_tokens": 64, **limits}
    policies = Policies(order=PriorityOrder(), preemption=preemption)
    return Bench(policies, costs=costs, **limits) if costs else Bench(policies, **limits)


def push_out(bench: Bench, request_id: str = "urgent") -> list[StepPlan]:
    """A request comes that needs fifteen of sixteen blocks; returns the plans until it has ended."""
    plans: list[StepPlan] = []
    bench.add(request_id, 57, max_tokens=2, priority=0)
    while request_id not in bench.details:
        plan = bench.plan()
        if plan is not None:
            plans.append(plan)
        bench.apply()
    return plans


def moved(plans: list[StepPlan]) -> tuple[int, int]:
    """Blocks swapped out and in."""
    return sum(len(plan.swap_out) for plan in plans), sum(len(plan.swap_in) for plan in plans)


def test_what_is_swapped_out_comes_back_and_computes_nothing_again() -> None:
    bench = bench_of("swap")
    bench.add("r", 10, max_tokens=20, priority=1)
    for _ in range(5):
        bench.step(depth=1)
    plans = push_out(bench)
    while "r" not in bench.details:
        plan = bench.plan()
        assert plan is not None
        plans.append(plan)
        bench.apply()
    assert moved(plans) == (4, 4), "ten tokens of prompt and four of output, less the newest"
    assert bench.num_computed_tokens == (10 + 19) + (57 + 1), "each token once, but for the last ones"
    assert bench.tokens["r"] == bench.known("r")
    assert bench.lane.blocks.host_pool.num_free == 32


def test_samples_that_share_blocks_share_them_in_the_host_pool() -> None:
    bench = bench_of("swap")
    bench.add("r", 16, max_tokens=12, n=3, priority=1)
    for _ in range(4):
        bench.step(depth=1)
    distinct = {block_id for sequence in bench.sequences("r") for block_id in sequence.block_ids}
    assert len(distinct) == 4 + 3
    bench.add("urgent", 57, max_tokens=2, priority=0)
    plan = bench.plan()
    assert plan is not None
    assert {source for source, _ in plan.swap_out} == distinct
    assert len(plan.swap_out) == len(distinct), "one host block for each"
    assert {sequence.state for sequence in bench.sequences("r")} == {SequenceState.SWAPPED}
    first, *others = [sequence.host_block_ids for sequence in bench.sequences("r")]
    assert all(other[:4] == first[:4] for other in others)
    bench.run()
    assert [bench.samples["r", index] for index in range(3)] == [bench.known("r", index) for index in range(3)]


def test_back_in_the_device_pool_they_share_as_before() -> None:
    bench = bench_of("swap")
    bench.add("r", 16, max_tokens=12, n=3, priority=1)
    for _ in range(4):
        bench.step(depth=1)
    push_out(bench)
    while bench.sequences("r")[0].slot is None:
        bench.step(depth=1)
    counts = bench.lane.blocks.pool.num_holders
    assert [counts[block_id] for block_id in bench.sequences("r")[0].block_ids[:4]] == [3] * 4


def test_with_a_full_host_pool_it_is_recomputed() -> None:
    bench = bench_of("swap", num_host_blocks=3)
    bench.add("r", 10, max_tokens=20, priority=1)
    for _ in range(5):
        bench.step(depth=1)
    plans = push_out(bench)
    assert bench.core.num_preemptions == 1
    assert moved(plans) == (0, 0), "it held four blocks"
    bench.run()
    assert bench.tokens["r"] == bench.known("r")


@pytest.mark.parametrize(
    ("token_us", "moved_block_us", "swaps"), [(100.0, 1.0, True), (1.0, 100.0, False)], ids=["swap", "recompute"]
)
def test_auto_goes_by_measured_rates(token_us: float, moved_block_us: float, swaps: bool) -> None:
    bench = bench_of("auto", costs=StepCosts(token_us=token_us, moved_block_us=moved_block_us))
    bench.add("measured", 40, max_tokens=1)
    bench.run()
    # What a move costs is only known once there was one.
    bench.lane.rates.observe(0, 1, 0, int(1000 * moved_block_us))
    bench.add("r", 10, max_tokens=20, priority=1)
    for _ in range(5):
        bench.step(depth=1)
    plans = push_out(bench)
    assert bench.core.num_preemptions == 1
    assert moved(plans)[0] == (4 if swaps else 0)
    bench.run()
    assert bench.tokens["r"] == bench.known("r")


def test_what_was_swapped_out_comes_back_before_later_arrivals() -> None:
    bench = bench_of("swap")
    bench.add("r", 20, max_tokens=20, priority=1)
    for _ in range(5):
        bench.step(depth=1)
    bench.add("urgent", 57, max_tokens=2, priority=0)
    bench.step(depth=1)
    bench.add("later", 40, max_tokens=4, priority=1)
    bench.add("later and shorter", 2, max_tokens=4, priority=1)
    bench.run()
    assert bench.order == ["r", "urgent", "r", "later", "later and shorter"]


def test_a_swapped_group_that_is_aborted_frees_the_host_pool() -> None:
    bench = bench_of("swap")
    spec = bench.add("r", 10, max_tokens=20, n=2, priority=1)
    for _ in range(5):
        bench.step(depth=1)
    push_out(bench)
    assert bench.core.num_swapped == 1
    assert bench.lane.blocks.num_used_host > 0
    bench.take(bench.core.abort(spec.key, FinishDetail.ABORTED))
    bench.core.check_integrity()
    assert bench.core.num_swapped == 0
    assert bench.lane.blocks.num_used_host == 0


def test_a_lost_executor_has_lost_the_host_pool_too() -> None:
    bench = bench_of("swap")
    bench.add("r", 10, max_tokens=20, priority=1)
    for _ in range(5):
        bench.step(depth=1)
    push_out(bench)
    assert bench.sequences("r")[0].state is SequenceState.SWAPPED
    bench.lose_executor()
    assert bench.sequences("r")[0].state is SequenceState.WAITING
    bench.run()
    assert bench.tokens["r"] == bench.known("r")


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_host_blocks", [1, 3, 30])
@pytest.mark.parametrize("num_blocks", [4, 6, 9])
@pytest.mark.parametrize("preemption", ["swap", "auto"])
def test_tiny_pools_never_stand_still(
    preemption: Preemption, num_blocks: int, num_host_blocks: int, depth: int
) -> None:
    bench = Bench(
        Policies(batching=ContinuousBatching(), preemption=preemption),
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        watermark=0.1,
    )
    capacity = num_blocks * bench.spec.block_size
    for index in range(12):
        more = {"n": 2} if index % 3 == 1 else {"beams": BeamSpec(2)} if index % 3 == 2 else {}
        bench.add(f"r{index}", 1 + 3 * index % 7, max_tokens=6 + 2 * index % 9, **more)
    bench.run(depth)
    assert not bench.core.groups
    assert bench.core.num_preemptions > 0
    for request_id, spec in bench.specs.items():
        longest = len(spec.prompt_token_ids) + (spec.max_tokens or 0)
        if spec.beams and bench.details[request_id] is FinishDetail.MAX_TOKENS:
            assert bench.found(request_id) == bench.known_beams(request_id)
        elif not spec.beams and longest <= capacity:
            assert [bench.samples[request_id, index] for index in range(spec.num_samples)] == [
                bench.known(request_id, index) for index in range(spec.num_samples)
            ]
    assert bench.lane.blocks.num_free == num_blocks
    assert bench.lane.blocks.num_used_host == 0


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_swapped_or_computed_again_the_tokens_are_the_same(depth: int) -> None:
    ends = []
    for preemption in ("recompute", "swap", "auto"):
        bench = Bench(Policies(preemption=preemption), num_blocks=14, num_host_blocks=10)
        for index in range(10):
            bench.add(f"r{index}", 2 + index, max_tokens=20, n=1 + index % 3)
        bench.run(depth)
        assert bench.core.num_preemptions > 0
        ends.append((dict(bench.samples), bench.ends))
    assert ends[0] == ends[1] == ends[2]


def test_a_group_swapped_by_a_former_executor_is_waiting_at_the_next() -> None:
    """One with a smaller pool, where it fits no more, ends it with the reason."""
    bench = bench_of("swap")
    bench.add("r", 30, max_tokens=20, priority=1)
    for _ in range(5):
        bench.step(depth=1)
    push_out(bench)
    bench.lose_executor()
    bench.core.add_executor(0, replace(bench.spec, num_blocks=7))
    bench.lose_executor()
    bench.run()
    assert bench.details["r"] is FinishDetail.KV_CAPACITY
    assert bench.tokens["r"] == bench.known("r")[: len(bench.tokens["r"])]
