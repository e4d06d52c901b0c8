"""Samples of one request: what they share, when they part, and what becomes of them under preemption."""

from __future__ import annotations

from collections import Counter

import pytest

from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import PriorityOrder
from scheduler_svc.core.types import FinishDetail, SequenceState
from tests.helpers.core.core_bench import Bench


def holders(bench: Bench, request_id: str) -> list[int]:
    """How many sequences hold each block of the first sample."""
    counts = bench.lane.blocks.pool.num_holders
    return [counts[block_id] for block_id in bench.sequences(request_id)[0].block_ids]


def until_forked(bench: Bench, request_id: str) -> None:
    while not bench.core.groups["", request_id].forked:
        bench.step(depth=1)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 21])
def test_each_sample_gets_its_own_tokens(num_prompt: int, depth: int) -> None:
    bench = Bench()
    bench.add("r", num_prompt, max_tokens=12, n=3)
    bench.run(depth)
    known = [bench.known("r", index) for index in range(3)]
    assert [bench.samples["r", index] for index in range(3)] == known
    assert len(set(map(tuple, known))) == 3, "or the comparison would say less"


def test_the_prompt_is_computed_once() -> None:
    bench = Bench()
    bench.add("r", 21, max_tokens=6, n=4)
    bench.run()
    assert bench.num_computed_tokens == 21 + 4 * 5, "and of each sample all tokens but the last"


def test_full_blocks_of_the_prompt_are_shared() -> None:
    bench = Bench()
    bench.add("r", 10, max_tokens=6, n=3)  # two blocks of four, and half a one
    until_forked(bench, "r")
    assert holders(bench, "r") == [3, 3, 3]
    bench.plan()
    assert holders(bench, "r") == [3, 3, 1]
    tables = [sequence.block_ids for sequence in bench.sequences("r")]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3


def test_the_partial_block_is_copied_in_the_next_plan() -> None:
    bench = Bench()
    bench.add("r", 10, max_tokens=6, n=3)
    first = bench.plan()
    assert first is not None
    assert len(first.fork_slots) == 2
    assert not first.copies, "what is copied must have been computed"
    partial = bench.sequences("r")[0].block_ids[2]
    second = bench.plan()
    assert second is not None
    assert {source for source, _ in second.copies} == {partial}
    assert len(second.copies) == 2, "the last holder keeps the block"
    assert sorted(second.append_slots) == sorted(first.fork_slots), "the plan appends the copies"


def test_on_a_block_border_nothing_is_copied() -> None:
    bench = Bench()
    bench.add("r", 8, max_tokens=6, n=3)
    while (plan := bench.plan()) is not None:
        assert not plan.copies
        bench.apply()
    assert [bench.samples["r", index] for index in range(3)] == [bench.known("r", index) for index in range(3)]


def test_the_memory_saved_is_reported() -> None:
    bench = Bench()
    bench.add("r", 10, max_tokens=6, n=3)
    until_forked(bench, "r")
    bench.plan()
    assert bench.lane.blocks.num_shared_refs == 4, "two blocks, each held by two more"
    assert bench.lane.num_stored_tokens == 8 + 3 * 3, "shared tokens count once"
    bench.run()
    assert bench.lane.blocks.num_shared_refs == 0


def test_the_first_sample_may_end_with_its_first_token() -> None:
    bench = Bench()
    probe = bench.add("probe", 6, max_tokens=8, n=3)
    firsts = [bench.known("probe", index)[0] for index in range(3)]
    assert firsts.count(firsts[0]) == 1, "or the others would end too"
    bench.core.abort(probe.key, FinishDetail.ABORTED)
    bench.add("r", 6, max_tokens=8, n=3, stop_token_ids=(firsts[0],))
    bench.run()
    assert bench.samples["r", 0] == firsts[:1]
    assert bench.ends["r", 0] is FinishDetail.STOP_TOKEN
    for index in (1, 2):
        assert bench.samples["r", index] == bench.known("r", index)
        assert len(bench.samples["r", index]) > 1


def test_samples_of_one_token_need_no_blocks_of_their_own() -> None:
    bench = Bench()
    bench.add("r", 6, max_tokens=1, n=4)
    plan = bench.plan()
    assert plan is not None
    assert bench.lane.blocks.num_free == bench.spec.num_blocks
    bench.run()
    assert [bench.samples["r", index] for index in range(4)] == [bench.known("r", index) for index in range(4)]


def test_a_sample_that_was_put_out_alone_comes_back_sharing() -> None:
    bench = Bench(num_blocks=11)
    bench.add("r", 8, max_tokens=24, n=3)
    while not bench.core.num_preemptions:
        bench.step(depth=1)
    states = Counter(sequence.state for sequence in bench.sequences("r"))
    assert states == {SequenceState.RUNNING: 2, SequenceState.WAITING: 1}
    out = next(sequence for sequence in bench.sequences("r") if sequence.state is SequenceState.WAITING)
    others = [sequence for sequence in bench.sequences("r") if sequence is not out]
    bench.core.stop_sample(others[-1].group.key, others[-1].sample_index)
    while out.state is SequenceState.WAITING:
        bench.step(depth=1)
    assert out.block_ids[:2] == others[0].block_ids[:2], "the prompt's blocks, which are computed"
    bench.run()
    assert bench.samples["r", out.sample_index] == bench.known("r", out.sample_index)


def test_samples_put_out_together_compute_what_they_share_once() -> None:
    bench = Bench(Policies(order=PriorityOrder()), num_blocks=16, max_num_seqs=3)
    bench.add("r", 16, max_tokens=12, n=3, priority=1)
    until_forked(bench, "r")
    bench.step()
    before = bench.num_computed_tokens
    bench.add("urgent", 8, max_tokens=3, n=3, priority=0)
    bench.step()
    assert all(sequence.slot is None for sequence in bench.sequences("r"))
    bench.run()
    assert [bench.samples["r", index] for index in range(3)] == [bench.known("r", index) for index in range(3)]
    assert bench.num_computed_tokens - before == (8 + 3 * 2) + (16 + 3 * 11), "no prompt twice"


def test_a_stopped_sample_leaves_the_others_alone() -> None:
    bench = Bench()
    spec = bench.add("r", 6, max_tokens=9, n=3)
    until_forked(bench, "r")
    bench.step()
    num_reported = len(bench.samples["r", 1])
    bench.core.stop_sample(spec.key, 1)
    bench.run()
    assert len(bench.samples["r", 1]) == num_reported, "no further outputs"
    assert [bench.samples["r", index] for index in (0, 2)] == [bench.known("r", index) for index in (0, 2)]
    assert bench.lane.blocks.num_free == bench.spec.num_blocks


def test_prompt_logprobs_are_reported_once_for_all_samples() -> None:
    bench = Bench(max_num_batched_tokens=7)
    bench.add("r", 20, max_tokens=4, n=3, num_prompt_logprobs=1)
    bench.run()
    assert [(part.start, part.end) for part in bench.prompt_logprobs["r"]] == [(1, 8), (8, 15), (15, 20)]


def test_more_samples_than_may_run_are_refused() -> None:
    bench = Bench()
    with pytest.raises(RequestRejectedError, match="5 sequences exceed max_num_seqs = 4"):
        bench.add("r", 3, n=5)
    with pytest.raises(RequestRejectedError, match="3 sequences need 65 KV blocks of 4 tokens; the pool has 64"):
        Bench(max_model_len=400).add("r", 250, n=3)


def test_a_lost_executor_costs_no_sample_a_token() -> None:
    bench = Bench()
    bench.add("r", 10, max_tokens=20, n=3)
    for life in range(1, 6):
        for _ in range(life):
            bench.step()
        bench.lose_executor()
    bench.run()
    assert [bench.samples["r", index] for index in range(3)] == [bench.known("r", index) for index in range(3)]
