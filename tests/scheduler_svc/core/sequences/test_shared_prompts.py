"""What a group costs does not grow with its sequences times its prompt: one prompt, one count for its blocks.

These tests count objects and writes, not time. The times are in docs/decisions/0025.
"""

from __future__ import annotations

from collections import Counter

import pytest

from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import PriorityOrder
from scheduler_svc.core.types import BeamSpec, FinishDetail, SequenceState
from scheduler_svc.engine.lane_views import block_tables
from tests.helpers.core.core_bench import Bench

NUM = 16
"""Sequences of the group."""
NUM_BLOCKS = 100
"""Full blocks of its prompt, and four tokens each."""
NUM_PROMPT = NUM_BLOCKS * 4 + 2


class CountedWrites(list[int]):
    """Ref counts that count how often one is written."""

    num_writes = 0

    def __setitem__(self, index: int, value: int) -> None:  # type: ignore[override]
        self.num_writes += 1
        super().__setitem__(index, value)


def bench_of(preemption: str = "recompute") -> Bench:
    policies = Policies(order=PriorityOrder(), preemption=preemption, prefix_caching=True)  # type: ignore[arg-type]
    return Bench(
        policies,
        num_blocks=480,
        num_host_blocks=300 if preemption == "swap" else 0,
        num_slots=40,
        max_num_seqs=20,
        max_num_batched_tokens=512,
        max_model_len=2048,
    )


def counted(pool: BlockPool) -> CountedWrites:
    """Let a pool count the writes to its ref counts from now on."""
    pool.ref_counts = counts = CountedWrites(pool.ref_counts)
    return counts


def add(bench: Bench, *, beams: bool = False, max_tokens: int = 7) -> None:
    if beams:
        bench.add("r", NUM_PROMPT, max_tokens=max_tokens, n=2, beams=BeamSpec(width=NUM), priority=1)
    else:
        bench.add("r", NUM_PROMPT, max_tokens=max_tokens, n=NUM, priority=1)


@pytest.mark.parametrize("beams", [False, True], ids=["samples", "beams"])
def test_all_sequences_have_the_prompt_of_the_request_itself(beams: bool) -> None:
    bench = bench_of()
    add(bench, beams=beams)
    prompt = bench.specs["r"].prompt_token_ids
    first = bench.plan()
    assert first is not None
    assert first.admitted[0].token_ids is prompt, "nor does the plan copy it"
    for _ in range(4):
        sequences = bench.sequences("r")
        assert len(sequences) == NUM
        assert all(sequence.prompt_ids is prompt for sequence in sequences)
        assert all(len(sequence.output_ids) < 7 for sequence in sequences)
        bench.step(depth=1)
    assert any(sequence.output_ids for sequence in bench.sequences("r"))


@pytest.mark.parametrize("beams", [False, True], ids=["samples", "beams"])
def test_blocks_of_the_prompt_are_counted_a_few_times_in_the_life_of_a_group(beams: bool) -> None:
    bench = bench_of()
    counts = counted(bench.lane.blocks.pool)
    add(bench, beams=beams)
    bench.step(depth=1)
    bench.step(depth=1)
    shared = {sequence.shared_blocks for sequence in bench.sequences("r") if sequence.block_ids}
    assert [each and len(each.block_ids) for each in shared] == [NUM_BLOCKS], "one for the group"
    assert [bench.lane.blocks.pool.num_holders[block_id] for block_id in bench.sequences("r")[0].block_ids[:2]] == [
        NUM
    ] * 2
    bench.run()
    assert counts.num_writes < NUM * NUM_BLOCKS / 2
    assert (bench.lane.blocks.num_free, bench.lane.blocks.num_shared_refs) == (480, 0)


def test_an_abort_counts_them_once() -> None:
    bench = bench_of()
    add(bench)
    for _ in range(3):
        bench.step(depth=1)
    counts = counted(bench.lane.blocks.pool)
    bench.core.abort(bench.specs["r"].key, FinishDetail.ABORTED)
    assert NUM_BLOCKS <= counts.num_writes <= NUM_BLOCKS + 2 * NUM
    assert bench.lane.blocks.num_free == 480


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempting_samples_and_admitting_them_again_counts_them_a_few_times(preemption: str) -> None:
    bench = bench_of(preemption)
    add(bench, max_tokens=20)
    for _ in range(4):
        bench.step(depth=1)
    counts, host_counts = counted(bench.lane.blocks.pool), counted(bench.lane.blocks.host_pool)
    bench.add("urgent", 478 * 4, max_tokens=2, priority=0)
    bench.step(depth=1)
    state = SequenceState.SWAPPED if preemption == "swap" else SequenceState.WAITING
    assert sum(sequence.state is state for sequence in bench.sequences("r")) >= NUM - 4
    before = counts.num_writes
    assert before < NUM * NUM_BLOCKS
    while any(sequence.slot is None for sequence in bench.sequences("r")):
        bench.step(depth=1)
    assert counts.num_writes - before < NUM * NUM_BLOCKS
    assert host_counts.num_writes < NUM * NUM_BLOCKS
    bench.run()
    assert [bench.samples["r", index] for index in range(NUM)] == [bench.known("r", index) for index in range(NUM)]


@pytest.mark.parametrize("swapped", [False, True])
def test_block_tables_show_every_sequence_as_a_holder(swapped: bool) -> None:
    bench = bench_of("swap")
    add(bench, max_tokens=20)
    for _ in range(4):
        bench.step(depth=1)
    if swapped:
        bench.add("urgent", 478 * 4, max_tokens=2, priority=0)
        bench.step(depth=1)
    tables = block_tables(bench.core, bench.specs["r"].key)
    assert tables is not None
    assert [table.swapped for table in tables] == [swapped] * NUM
    held = Counter(block_id for table in tables for block_id in table.block_ids)
    assert all(table.ref_counts == tuple(held[block_id] for block_id in table.block_ids) for table in tables)
    assert tables[0].ref_counts[:NUM_BLOCKS] == (NUM,) * NUM_BLOCKS
