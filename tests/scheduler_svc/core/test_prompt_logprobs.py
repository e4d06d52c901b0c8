"""Prompt logprobs through the core: chunks, plans in flight, preemption, lost executors; nothing missing or twice."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from cadenza_common.plan.result import LogprobColumns, SlotError
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.types import FinishDetail
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.known import known_prompt_logprobs


def joined(parts: list[LogprobColumns]) -> LogprobColumns:
    """One after the other: nothing missing, nothing twice."""
    for before, after in pairwise(parts):
        assert after.start == before.end
    return LogprobColumns(
        start=parts[0].start,
        logprobs=[x for part in parts for x in part.logprobs],
        ranks=[x for part in parts for x in part.ranks],
        num_top=parts[0].num_top,
        top_token_ids=[x for part in parts for x in part.top_token_ids],
        top_logprobs=[x for part in parts for x in part.top_logprobs],
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_prompt", [2, 4, 16, 17, 40])
def test_prompt_logprobs_come_in_order_and_before_the_end(num_prompt: int, depth: int) -> None:
    bench = Bench(max_num_batched_tokens=7)
    bench.add("r", num_prompt, max_tokens=1, num_prompt_logprobs=3)
    bench.run(depth)
    assert joined(bench.prompt_logprobs["r"]) == known_prompt_logprobs(range(1, num_prompt + 1), 3)
    assert bench.details["r"] is FinishDetail.MAX_TOKENS


def test_a_prompt_of_one_token_has_no_prompt_logprobs() -> None:
    bench = Bench()
    bench.add("r", 1, num_prompt_logprobs=3)
    plan = bench.plan()
    assert plan is not None
    assert plan.admitted[0].sampling.num_prompt_logprobs is None
    bench.run()
    assert bench.prompt_logprobs == {}
    assert bench.details["r"] is FinishDetail.MAX_TOKENS


def test_prompt_logprobs_that_are_known_are_not_requested_again() -> None:
    bench = Bench()
    bench.add("r", 6, max_tokens=20, num_prompt_logprobs=1)
    bench.plan()
    bench.apply()
    bench.lose_executor()
    plan = bench.plan()
    assert plan is not None
    assert plan.admitted[0].sampling.num_prompt_logprobs is None
    bench.run()
    assert joined(bench.prompt_logprobs["r"]) == known_prompt_logprobs(range(1, 7), 1)
    assert bench.tokens["r"] == bench.known("r")


def test_prompt_logprobs_that_are_half_known_come_once() -> None:
    """The executor is lost in the middle of a prompt: its beginning is computed again, and not reported again."""
    bench = Bench(max_num_batched_tokens=8)
    bench.add("r", 20, num_prompt_logprobs=2)
    bench.plan()
    bench.apply()
    bench.plan()
    bench.lose_executor()
    bench.run()
    assert joined(bench.prompt_logprobs["r"]) == known_prompt_logprobs(range(1, 21), 2)
    assert bench.prompt_logprobs["r"][0].end == 9


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("num_blocks", [11, 12, 13])
def test_late_prompt_logprobs_of_a_preempted_sequence_count(num_blocks: int, depth: int) -> None:
    """A prompt's chunk is in flight when its sequence is preempted; it may be back when the result comes."""
    bench = Bench(block_size=1, num_blocks=num_blocks, max_num_batched_tokens=6)
    bench.add("old", 3, max_tokens=6)
    bench.add("young", 8, max_tokens=3, num_prompt_logprobs=2)
    num_late = 0
    while bench.core.groups or bench.plans:
        while len(bench.plans) < depth and bench.plan() is not None:
            *earlier, newest = bench.core.lanes[0].inflight
            if newest.preempted:
                num_late += sum(len(step.prompt_logprobs) for step in earlier)
        bench.apply()
    assert num_late > 0, "what this test is about"
    assert joined(bench.prompt_logprobs["young"]) == known_prompt_logprobs(range(1, 9), 2)
    assert bench.tokens["young"] == bench.known("young")


def test_an_aborted_request_has_the_prompt_logprobs_that_were_known() -> None:
    bench = Bench(max_num_batched_tokens=8)
    spec = bench.add("r", 20, num_prompt_logprobs=0)
    bench.plan()
    bench.plan()
    bench.apply()
    bench.take(bench.core.abort(spec.key, FinishDetail.ABORTED))
    bench.apply()
    assert joined(bench.prompt_logprobs["r"]).end == 9, "later rows are not reported"
    bench.run()


def test_prompt_logprobs_must_be_those_of_the_plan() -> None:
    bench = Bench()
    bench.add("r", 5, num_prompt_logprobs=1)
    bench.plan()
    good = bench.executor.run(bench.plans[0])
    (slot,) = good.slots
    columns = good.prompt_logprobs[slot]
    for bad in (
        {},
        {slot + 1: columns},
        {slot: columns.rows(1, 4)},
        {slot: columns._replace(start=2)},
        {slot: columns._replace(num_top=2)},
    ):
        with pytest.raises(InvariantError, match="prompt logprobs"):
            bench.core.apply_result(0, replace(good, prompt_logprobs=bad), 0.0)
    failed = replace(
        good, num_tokens=[0], token_ids=[], prompt_logprobs={}, error_slots=[slot], errors=[SlotError.NON_FINITE_LOGITS]
    )
    bench.take(bench.core.apply_result(0, failed, 0.0)[1])
    assert bench.details["r"] is FinishDetail.NON_FINITE_LOGITS, "a slot that fails need not give any"
