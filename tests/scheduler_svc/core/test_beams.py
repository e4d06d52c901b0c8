"""Beams in the core: their blocks, their slots, and that nothing else waits for them. Their algorithm: test_beams."""

from __future__ import annotations

import pytest

from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.policies.policies import Policies, Preemption
from scheduler_svc.core.queues.orders import PriorityOrder
from scheduler_svc.core.types import BeamSpec, FinishDetail
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.known import known_cuts
from tests.helpers.executor.digest import check_mirror

THREE = BeamSpec(3)


def rounds(bench: Bench, request_id: str) -> int:
    """Tokens that each running beam has been given."""
    beams = bench.core.groups["", request_id].beams
    return len(beams[0].token_ids) - len(bench.specs[request_id].prompt_token_ids) if beams else 0


def until_round(bench: Bench, request_id: str, count: int) -> None:
    while rounds(bench, request_id) < count:
        bench.step(depth=1)


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("early_stopping", [True, False, None])
@pytest.mark.parametrize(("length_penalty", "num_returned"), [(1.0, 3), (0.0, 1), (-1.0, 2), (2.0, 3)])
def test_the_best_are_returned_at_the_end(
    length_penalty: float, num_returned: int, early_stopping: bool | None, depth: int
) -> None:
    bench = Bench()
    spec = BeamSpec(3, length_penalty, early_stopping)
    bench.add("r", 7, max_tokens=14, beams=spec, n=num_returned, stop_token_ids=(3, 9), eos=(3,), min_tokens=2)
    bench.run(depth)
    assert bench.found("r") == bench.known_beams("r")
    assert len(bench.found("r")) == num_returned
    assert bench.tokens["r"] == list(bench.found("r")[0].token_ids)


def test_nothing_is_reported_before_the_end() -> None:
    bench = Bench()
    bench.add("r", 7, max_tokens=8, beams=THREE, n=3)
    until_round(bench, "r", 7)
    assert bench.samples["r", 0] == []
    bench.run()
    assert {len(bench.samples["r", index]) for index in range(3)} == {8}


def test_the_blocks_of_dropped_beams_are_free_with_the_result() -> None:
    """After each result the group holds the blocks that its running beams read, and no others."""
    bench = Bench(block_size=1)
    bench.add("r", 3, max_tokens=12, beams=THREE)
    num_dropped = 0
    while bench.plan() is not None:
        before = {tuple(beam.token_ids) for beam in bench.core.groups["", "r"].beams} if bench.core.groups else set()
        bench.apply()
        if not bench.core.groups:
            break
        beams = bench.core.groups["", "r"].beams
        num_dropped += len(before - {tuple(beam.token_ids[:-1]) for beam in beams})
        held = {block_id for beam in beams for block_id in beam.block_ids}
        assert bench.spec.num_blocks - bench.lane.blocks.num_free == len(held)
        # One token a block: what beams have in common they hold in common.
        assert len(held) == len(
            {tuple(beam.token_ids[: end + 1]) for beam in beams for end in range(len(beam.block_ids))}
        )
    assert num_dropped > 0, "what this test is about"
    bench.run()
    assert bench.lane.blocks.num_free == bench.spec.num_blocks


def test_others_go_on_while_a_group_waits_for_its_candidates() -> None:
    bench = Bench()
    bench.add("beams", 4, max_tokens=20, beams=THREE)
    bench.add("plain", 4, max_tokens=20)
    until_round(bench, "beams", 3)
    assert bench.plan() is not None
    waiting = bench.plan()
    assert waiting is not None
    assert waiting.decode_ready, "the other sequence computes a token in each plan"
    assert waiting.given_slots == waiting.scheduled_slots == [], "beams get their tokens when all results are in"
    bench.run(depth=2)
    assert bench.tokens["plain"] == bench.known("plain")
    assert bench.found("beams") == bench.known_beams("beams")


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("pushed_out_at", [0, 1, 6])
@pytest.mark.parametrize("depth", [1, 3])
def test_preempted_beams_come_to_the_same_end(preemption: Preemption, pushed_out_at: int, depth: int) -> None:
    bench = Bench(Policies(order=PriorityOrder(), preemption=preemption), num_blocks=16, num_host_blocks=32)
    bench.add("beams", 13, max_tokens=15, beams=THREE, n=3, stop_token_ids=(3,), priority=1)
    bench.plan()
    until_round(bench, "beams", pushed_out_at)
    bench.add("urgent", 50, max_tokens=4, priority=0)
    bench.run(depth)
    assert bench.order == ["beams", "urgent", "beams"]
    assert bench.found("beams") == bench.known_beams("beams")
    assert bench.tokens["urgent"] == bench.known("urgent")


def test_swapped_beams_compute_nothing_again() -> None:
    bench = Bench(Policies(order=PriorityOrder(), preemption="swap"), num_blocks=16, num_host_blocks=32)
    bench.add("beams", 13, max_tokens=15, beams=THREE, priority=1)
    until_round(bench, "beams", 6)
    bench.add("urgent", 50, max_tokens=4, priority=0)
    while "urgent" not in bench.details:
        bench.step(depth=1)
    before = bench.num_computed_tokens
    until_round(bench, "beams", 8)
    assert bench.num_computed_tokens - before <= 3 * 3, "one token for each beam and round"


def test_beams_that_outgrow_the_pool_finish_early_and_are_returned() -> None:
    bench = Bench(num_blocks=6)
    spec = bench.add("r", 8, max_tokens=60, beams=THREE, n=2)
    bench.run()
    assert bench.details["r"] is FinishDetail.KV_CAPACITY
    assert bench.found("r") in known_cuts(spec, bench.spec.max_model_len, FinishDetail.KV_CAPACITY)
    assert len(bench.tokens["r"]) >= 4, "as far as six blocks reach for three beams"
    assert bench.lane.blocks.num_free == 6


def test_a_beam_without_an_allowed_token_is_out_and_the_others_go_on() -> None:
    """After a 4 nothing is allowed: that beam has no candidates, and the one that ends in 7 has two children."""
    bench = Bench()
    bench.add("r", 5, max_tokens=6, beams=BeamSpec(2), n=2, allowed_token_ids=(4, 7), bad_words=((4, 4), (4, 7)))
    bench.run()
    assert {found.token_ids for found in bench.found("r")} == {(7,) * 6, (*(7,) * 5, 4)}
    assert bench.found("r") == bench.known_beams("r")


def test_beams_for_which_no_token_is_allowed_end_with_the_reason() -> None:
    bench = Bench()
    bench.add("r", 5, beams=BeamSpec(2), n=2, allowed_token_ids=(4,), bad_words=((4,),))
    bench.run()
    assert bench.ends == {("r", 0): FinishDetail.NO_ALLOWED_TOKEN, ("r", 1): FinishDetail.NO_ALLOWED_TOKEN}
    assert bench.samples["r", 0] == bench.samples["r", 1] == []


def test_beams_end_at_once_when_they_are_aborted() -> None:
    bench = Bench()
    spec = bench.add("r", 7, max_tokens=20, beams=THREE)
    until_round(bench, "r", 4)
    bench.plan()
    bench.take(bench.core.abort(spec.key, FinishDetail.ABORTED))
    assert bench.details["r"] is FinishDetail.ABORTED
    assert bench.lane.blocks.num_free == bench.spec.num_blocks
    bench.run()
    assert not bench.executor.slots


def test_a_lost_executor_costs_beams_nothing() -> None:
    bench = Bench()
    bench.add("r", 9, max_tokens=16, beams=THREE, n=3)
    for life in range(1, 6):
        for _ in range(life):
            bench.step()
        bench.lose_executor()
    bench.run()
    assert bench.found("r") == bench.known_beams("r")


def test_the_executor_knows_the_beams_that_run() -> None:
    bench = Bench()
    bench.add("r", 9, max_tokens=20, beams=THREE, n=3)
    bench.add("other", 5, max_tokens=20, n=1)
    num_stale = 0
    while (plan := bench.plan()) is not None:
        plan.debug_digest = True
        result = bench.apply()
        check_mirror(bench.lane, bench.executor.inner.slots, result.debug_digest)
        num_stale += len(bench.lane.stale_slots)
    assert num_stale > 0, "beams were described anew"


def test_wider_than_may_run_is_refused() -> None:
    with pytest.raises(RequestRejectedError, match="5 sequences exceed max_num_seqs = 4"):
        Bench().add("r", 3, beams=BeamSpec(5))


def test_an_aborted_search_returns_its_beams_as_they_are() -> None:
    bench = Bench()
    spec = bench.add("b", 6, max_tokens=12, n=2, beams=BeamSpec(3))
    while len(bench.sequences("b")[0].token_ids) < 6 + 4:
        bench.step(depth=1)
    beams = [list(beam.token_ids[6:]) for beam in bench.core.groups[spec.key].beams]
    bench.take(bench.core.abort(spec.key, FinishDetail.ABORTED))
    assert {bench.ends["b", index] for index in (0, 1)} == {FinishDetail.ABORTED}
    assert [bench.samples["b", 0], bench.samples["b", 1]] == beams[:2]
    bench.core.check_integrity()


def test_results_that_there_are_none_of_have_no_logprob() -> None:
    bench = Bench()
    bench.add("b", 6, max_tokens=1, n=3, beams=BeamSpec(3), allowed_token_ids=(5,))
    bench.run()
    assert [output.token_ids for output in bench.hypotheses] == [(5,), (), ()]
    assert [output.cumulative_logprob is None for output in bench.hypotheses] == [False, True, True]
    assert bench.ends["b", 2] is FinishDetail.NO_ALLOWED_TOKEN
