"""What GetBlockTable says of sequences whose executor has KV groups."""

from __future__ import annotations

from scheduler_svc.convert.admin import block_table_response
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.engine.lane_views import block_tables
from tests.helpers.core.core_bench import Bench


def response_of(work):
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def test_pages_are_told_by_group_from_the_window_on() -> None:
    groups = (KVGroup(0), KVGroup(1, 6, 2), KVGroup(2, 20))
    bench = Bench(kv_groups=groups, num_blocks=200)  # type: ignore[arg-type]
    bench.add("r", 38, max_tokens=20)
    for _ in range(5):
        bench.step(depth=1)
    tables = block_tables(bench.core, ("", "r"))
    (sequence,) = response_of(block_table_response(tables)).sequences
    full, first, last = sequence.block_tables
    assert [each.kv_group for each in sequence.block_tables] == [0, 1, 2]
    assert len(sequence.ref_counts) == len(full.block_ids) == -(-sequence.num_computed_tokens // 4)
    assert full.first_block == 0
    assert len(first.block_ids) == 2 * (len(full.block_ids) - first.first_block)
    assert len(last.block_ids) == len(full.block_ids) - last.first_block
    assert first.first_block > last.first_block > 0
    pages = [*first.block_ids, *full.block_ids, *last.block_ids]
    assert len(set(pages)) == len(pages)


def test_states_are_no_part_of_block_tables() -> None:
    for groups in ((), (KVGroup(0), KVGroup(1, 6, 2))):
        bench = Bench(Policies(prefix_caching=True), kv_groups=groups, num_blocks=200, pages_per_state=3)  # type: ignore[arg-type]
        bench.add("r", 38, max_tokens=20)
        for _ in range(6):
            bench.step(depth=1)
        (sequence,) = response_of(block_table_response(block_tables(bench.core, ("", "r")))).sequences
        assert len(sequence.block_tables) == max(1, len(groups))
        in_tables = {page for table in sequence.block_tables for page in table.block_ids}
        assert in_tables.isdisjoint(bench.sequences("r")[0].state_pages)


def test_who_waits_has_no_pages_in_any_group() -> None:
    bench = Bench(kv_groups=(KVGroup(0), KVGroup(1, 6)), num_blocks=100)  # type: ignore[arg-type]
    bench.add("r", 9)
    (sequence,) = response_of(block_table_response(block_tables(bench.core, ("", "r")))).sequences
    assert not any(each.block_ids for each in sequence.block_tables)
