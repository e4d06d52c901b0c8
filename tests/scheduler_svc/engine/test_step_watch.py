"""A watcher's records: in small messages, and none of them waits for the watcher."""

from __future__ import annotations

from scheduler_svc.core.types import StepResult
from scheduler_svc.engine.step_watch import StepWatch
from scheduler_svc.plan_loop.ports import StepRecord


def record(step_id: int) -> StepRecord:
    return StepRecord(step_id, 0, 0, 0, StepResult(step_id))


async def test_a_watcher_that_is_far_behind_gets_its_records_in_small_messages() -> None:
    """Thousands in one would hold up the event loop, and pass what a client takes by default (4 MB)."""
    async with StepWatch(set(), include_block_tables=False) as watch:
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
