"""How requests and runs of the driver end: timeouts, Ctrl-C, bad prompts, bugs; and what the driver reports
meanwhile."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cadenza_loadtest.driving.driver import Progress, drive
from cadenza_loadtest.requests import LoadTestError
from tests.helpers.loadtest.driver_target import FakePrompts, FakeTarget, at, shape

pytestmark = pytest.mark.slow


async def test_a_request_that_takes_too_long_is_aborted() -> None:
    """The timeout counts from the due time, and the other requests continue."""
    target = FakeTarget()
    target.going.clear()
    columns = await drive(at(0.0, 0.05), target, FakePrompts(), timeout_s=0.1)
    assert columns.error.tolist() == ["TIMEOUT", "TIMEOUT"]
    assert sorted(target.aborted) == [0, 1]
    assert np.isnan(columns.first_s).all()


async def test_a_request_in_time_is_none() -> None:
    columns = await drive(at(0.0), FakeTarget(takes_s=0.01), FakePrompts(), timeout_s=30)
    assert columns.ok.all()


async def cancelled(target: FakeTarget, **options) -> asyncio.Task:
    """A run of two that have ended, two that hang and one that is not due, cancelled."""
    target.going.clear()
    target.at_once = frozenset((0, 1))
    running = asyncio.create_task(drive(at(0.0, 0.0, 0.0, 0.0, 60.0), target, FakePrompts(), **options))
    async with asyncio.timeout(10):
        while len(target.started) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    running.cancel()
    return running


async def test_ctrl_c_aborts_what_runs_and_keeps_what_was_measured() -> None:
    target = FakeTarget()
    columns = await (await cancelled(target, on_cancelled=lambda: None))
    assert columns.error.tolist() == ["", "", "CANCELLED", "CANCELLED"]
    assert sorted(target.aborted) == [2, 3]


async def test_a_cancelled_run_is_cancelled_unless_requested_otherwise() -> None:
    target = FakeTarget()
    running = await cancelled(target)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(target.aborted) == [2, 3]


async def test_a_cancelled_closed_loop_returns_too() -> None:
    target = FakeTarget()
    target.going.clear()
    schedule = at(*[0.0] * 9)
    running = asyncio.create_task(drive(schedule, target, FakePrompts(), concurrency=2, on_cancelled=lambda: None))
    async with asyncio.timeout(10):
        while len(target.started) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    running.cancel()
    assert (await running).error.tolist() == ["CANCELLED"] * 2


@pytest.mark.parametrize("concurrency", [None, 2])
async def test_a_bad_prompt_or_schedule_ends_the_run(concurrency) -> None:
    def broken():
        yield 0.0, shape(0)
        raise LoadTestError("w.jsonl, line 2: output_len is missing")

    for schedule, prompts in ((broken(), FakePrompts()), (at(0.0, 0.0), FakePrompts(refused=1))):
        target = FakeTarget()
        target.going.clear()
        with pytest.raises(LoadTestError, match=r"line 2|no such prompt"):
            await drive(schedule, target, prompts, concurrency=concurrency)
        assert target.running == 0
        assert sorted(target.aborted) == sorted(target.started)


async def test_a_bug_in_a_target_is_not_a_result() -> None:
    class Broken(FakeTarget):
        async def run(self, shape, prompt, live):
            if shape.index == 1:
                raise KeyError("a bug")
            await super().run(shape, prompt, live)

    target = Broken()
    target.going.clear()
    with pytest.raises(KeyError, match="a bug"):
        await drive(at(0.0, 0.0, 60.0), target, FakePrompts())
    assert target.aborted == [0]


async def test_progress_counts() -> None:
    seen: list[Progress] = []
    target = FakeTarget(errors={2: "UNAVAILABLE"})
    await drive(at(*[0.0] * 4), target, FakePrompts(), on_progress=seen.append)
    last = seen[-1]
    assert (last.num_started, last.num_ended, last.num_failed, last.num_output_tokens) == (4, 4, 1, 9)
    assert last.elapsed_s > 0
