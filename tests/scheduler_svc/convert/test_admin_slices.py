"""Block tables of many long sequences become messages slice by slice, since a group may have 131,072 blocks in all."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from cadenza_common.plan.result import StepResult
from cadenza_common.serving.slices import SLICE_ITEMS
from scheduler_svc.convert.admin import block_table_response, watch_response
from scheduler_svc.plan_loop.ports import BlockTableChange, SequenceBlockTable, StepRecord

TABLES = [tuple(range(index, index + 2048)) for index in range(64)]


def counted(work: Generator[None, None, Any]) -> tuple[Any, int]:
    """The result of some work, and the number of its slices."""
    num_slices = 1
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, num_slices
        num_slices += 1


def test_block_tables_of_a_large_group_are_sent_in_slices() -> None:
    tables = [SequenceBlockTable(index, ids, ids[::-1], 9, False) for index, ids in enumerate(TABLES)]
    response, num_slices = counted(block_table_response(tables))
    assert num_slices >= 64 * 2048 * 2 / SLICE_ITEMS
    assert [tuple(each.block_tables[0].block_ids) for each in response.sequences] == TABLES
    assert [tuple(each.ref_counts) for each in response.sequences] == [ids[::-1] for ids in TABLES]
    assert [(each.sample_index, each.num_computed_tokens) for each in response.sequences] == [(i, 9) for i in range(64)]


def test_step_records_with_the_blocks_of_a_large_group_are_sent_in_slices() -> None:
    changes = [BlockTableChange(index, ids, index % 2 == 0) for index, ids in enumerate(TABLES)]
    records = [StepRecord(step_id, 0, 0, 0, StepResult(step_id), block_changes=changes) for step_id in (1, 2)]
    response, num_slices = counted(watch_response(records, 3, block_tables=True))
    assert num_slices >= 2 * 64 * 2048 / SLICE_ITEMS
    assert ([record.step_id for record in response.records], response.num_dropped) == ([1, 2], 3)
    for record in response.records:
        assert [(each.sequence_id, tuple(each.appended), each.cleared) for each in record.block_changes] == [
            change[:3] for change in changes
        ]
    without, num_slices = counted(watch_response(records, 0, block_tables=False))
    assert (num_slices, [len(record.block_changes) for record in without.records]) == (1, [0, 0])


def test_step_records_of_many_sequences_are_sent_in_slices() -> None:
    ids = list(range(1024))
    columns = {"sequence_ids": ids, "num_tokens": ids, "context_lens": ids, "num_sampled": ids}
    records = [StepRecord(step_id, 0, 0, 0, StepResult(step_id), **columns) for step_id in range(64)]
    response, num_slices = counted(watch_response(records, 0, block_tables=False))
    assert num_slices >= 4 * 64 * 1024 / SLICE_ITEMS
    assert [record.step_id for record in response.records] == list(range(64))
    assert all(list(getattr(record, name)) == ids for record in response.records for name in columns)
