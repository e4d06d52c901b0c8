"""The executor's mirror of the scheduler's sequences, by the debug digest, after each of many random steps."""

from __future__ import annotations

import random

import pytest

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from scheduler_svc.core.types import RequestSpec
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.executor.digest import check_mirror, lane_digest

VOCAB = 60


def new_bench(seed: int, count: int) -> tuple[Bench, CoreExecutor]:
    rng = random.Random(seed)
    bench = Bench(num_blocks=14, max_num_batched_tokens=16)
    bench.executor = executor = CoreExecutor(bench.spec, VOCAB)
    for index in range(count):
        spec = RequestSpec(
            request_id=f"r{index}",
            prompt_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))),
            sampling=core_sampling(temperature=1.0, seed=rng.randrange(2**64), stop_token_ids=(rng.randrange(VOCAB),)),
            max_tokens=rng.randint(1, 20),
        )
        bench.core.add_request(spec, 0.0)
        bench.tokens[spec.request_id] = []
    return bench, executor


def next_result(bench: Bench) -> StepResult | None:
    """The next step's result, with a digest; None when all is done."""
    plan = bench.plan()
    if plan is None:
        return None
    plan.debug_digest = True
    return bench.apply()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_mirror_is_the_truth_after_every_step(seed: int) -> None:
    bench, executor = new_bench(seed, 40)
    num_whole = num_steps = 0
    while (result := next_result(bench)) is not None:
        num_whole += check_mirror(bench.core.lanes[0], executor.inner.slots, result.debug_digest)
        num_steps += 1
    assert bench.core.num_preemptions > 0
    assert num_steps > num_whole > num_steps / 4


def test_every_part_of_a_sequence_counts() -> None:
    """Or the comparison would prove nothing about it."""
    bench, executor = new_bench(0, 3)
    result = next_result(bench)
    assert result is not None
    lane = bench.core.lanes[0]
    assert check_mirror(lane, executor.inner.slots, result.debug_digest)
    sequence = next(iter(lane.running))
    prompt_ids = sequence.prompt_ids
    sequence.prompt_ids = (prompt_ids[0] + 1, *prompt_ids[1:])
    assert lane_digest(lane) != result.debug_digest
    sequence.prompt_ids = prompt_ids
    sequence.block_ids[0] += 1
    assert lane_digest(lane) != result.debug_digest
    sequence.block_ids[0] -= 1
    sequence.num_prompt_tokens -= 1
    assert lane_digest(lane) != result.debug_digest
    sequence.num_prompt_tokens += 1
    assert lane_digest(lane) == result.debug_digest


def test_the_same_plans_give_the_same_results_times_included() -> None:
    """So a core that goes by measured rates makes the same plans again."""

    def run() -> tuple[list[StepPlan], list[StepResult]]:
        bench, _ = new_bench(7, 20)
        plans, results = [], []
        while (plan := bench.plan()) is not None:
            plans.append(plan)
            results.append(bench.apply())
        return plans, results

    first, second = run(), run()
    assert first == second
    assert all(result.timings.device_ns > 0 for result in first[1])
