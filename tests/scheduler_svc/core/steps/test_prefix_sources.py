"""Samples and beams take their prompt from the slot of another one: it travels once."""

from __future__ import annotations

import pytest

from cadenza_common.plan.plan import PrefixSource, StepPlan
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.steps.budget import MAX_ADMITTED_VALUES, MAX_GROUP_TOKENS
from scheduler_svc.core.types import BeamSpec, FinishDetail
from tests.helpers.core.core_bench import Bench


def plans_of(bench: Bench) -> list[StepPlan]:
    """Run all requests to their ends; returns the plans."""
    plans: list[StepPlan] = []
    plan_step = bench.core.plan_step

    def recorded(executor_id: int, now: float) -> StepPlan | None:
        if (plan := plan_step(executor_id, now)) is not None:
            plans.append(plan)
        return plan

    bench.core.plan_step = recorded  # type: ignore[method-assign]
    bench.run()
    return plans


def test_samples_after_the_first_have_no_tokens_of_their_own() -> None:
    bench = Bench()
    bench.add("a", 11, n=3)
    admitted = [each for plan in plans_of(bench) for each in plan.admitted]
    first = admitted[0]
    assert (len(first.token_ids), first.source) == (11, None)
    assert [(each.token_ids, each.source) for each in admitted[1:]] == [((), PrefixSource(first.slot, 11, 2))] * 2
    assert all(bench.samples["a", index] == bench.known("a", index) for index in range(3))


def test_beams_send_their_output_only() -> None:
    bench = Bench()
    bench.add("a", 11, n=2, beams=BeamSpec(width=3))
    admitted = [each for plan in plans_of(bench) for each in plan.admitted]
    assert all(each.source is not None and len(each.token_ids) <= 5 for each in admitted[1:])
    assert bench.found("a") == bench.known_beams("a")


def test_a_preempted_sample_takes_the_prompt_from_one_that_runs() -> None:
    """Memory runs short: one sample is preempted after its fork, and comes back with output of its own."""
    bench = Bench(num_blocks=10, max_num_seqs=3)
    bench.add("a", 10, n=3, max_tokens=16)
    admitted = [each for plan in plans_of(bench) for each in plan.admitted]
    came_back = [each for each in admitted[3:] if each.source is not None]
    assert bench.core.num_preemptions
    assert came_back
    assert all(each.token_ids and each.source is not None and each.source.num_tokens == 10 for each in came_back)
    assert all(bench.samples["a", index] == bench.known("a", index) for index in range(3))
    assert set(bench.ends.values()) == {FinishDetail.MAX_TOKENS}


def test_a_group_has_a_limit_of_prompt_tokens_and_one_of_numbers() -> None:
    bench = Bench(max_model_len=2**20, num_blocks=2**18, max_num_seqs=64, max_num_batched_tokens=64, num_slots=128)
    with pytest.raises(RequestRejectedError, match=f"64 sequences of 32769 prompt tokens have over {MAX_GROUP_TOKENS}"):
        bench.add("a", MAX_GROUP_TOKENS // 64 + 1, n=64)
    bench.add("a", MAX_GROUP_TOKENS // 64, n=64)
    numbers = tuple(range(MAX_ADMITTED_VALUES // 64))
    with pytest.raises(RequestRejectedError, match=f"64 sequences with 4096 numbers each .* {MAX_ADMITTED_VALUES}"):
        bench.add("b", 1, n=64, allowed_token_ids=numbers)
