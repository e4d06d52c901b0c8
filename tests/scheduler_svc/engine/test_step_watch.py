"""A watcher's records: in small messages, and none of them waits for the watcher."""

from __future__ import annotations

from dataclasses import fields

from cadenza_common.plan.result import StepResult
from scheduler_svc.engine.lane_views import step_load
from scheduler_svc.engine.step_watch import StepRecordWatch
from scheduler_svc.plan_loop.gauges import current_load
from scheduler_svc.plan_loop.ports import StepRecord
from tests.helpers.core.core_bench import Bench


def record(step_id: int) -> StepRecord:
    return StepRecord(step_id, 0, 0, 0, StepResult(step_id))


async def test_a_watcher_that_is_far_behind_gets_its_records_in_small_messages() -> None:
    """Thousands in one would hold up the event loop, and pass what a client takes by default (4 MB)."""
    async with StepRecordWatch(set(), include_block_tables=False) as watch:
        assert await anext(watch) == ([], 0), "the first comes at once"
        for step_id in range(5000):
            watch.put(record(step_id))
        seen: list[int] = []
        while len(seen) < 4096:
            records, num_dropped = await anext(watch)
            assert 0 < len(records) <= 256
            assert num_dropped == 5000 - 4096
            seen += [each.step_id for each in records]
        assert seen == list(range(4096)), "in order; the newest are lost"
        watch.put(record(5000))
        records, _ = await anext(watch)
        assert [each.step_id for each in records] == [5000]


def test_a_steps_load_is_that_of_the_service() -> None:
    bench = Bench(max_num_seqs=2)
    for index in range(5):
        bench.add(str(index), [index + 3] * 9, max_tokens=8)
    for _ in range(4):
        bench.step()
    whole, found = current_load(bench.core), step_load(bench.core)
    assert (found.num_waiting, found.num_running) == (3, 2)
    for each in fields(found):
        if getattr(found, each.name):
            assert getattr(found, each.name) == getattr(whole, each.name), each.name
    assert min(found.num_device_blocks, found.num_used_device_blocks, found.num_stored_tokens) > 0
