"""The driver against a target in this process: when requests are sent, their outcomes, and that nothing shifts the
clock."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from array import array

import numpy as np
import pytest

from cadenza_loadtest.driving import driver, timer
from cadenza_loadtest.driving.driver import drive, present_objects_left_out
from cadenza_loadtest.driving.live import Recorder, RequestInFlight
from cadenza_loadtest.driving.timer import Timer
from cadenza_loadtest.measures.columns import RequestColumns
from tests.helpers.loadtest.driver_target import FakePrompts, FakeTarget, at, shape

pytestmark = pytest.mark.slow

# ---------------------------------------------------------------- open loop


async def test_every_request_is_sent_at_its_time_and_none_before() -> None:
    target = FakeTarget()
    schedule = at(*(0.004 * index for index in range(50)))
    columns = await drive(schedule, target, FakePrompts())
    assert columns.due_s == pytest.approx([due_s for due_s, _ in schedule], abs=1e-9)
    assert (columns.sent_s >= columns.due_s).all()
    assert (columns.sent_s - columns.due_s).min() < 0.02, "those for which the machine had time: of 0.1 ms or so"
    assert columns.ok.all()
    assert target.started == list(range(50))


async def test_a_slow_server_does_not_slow_its_load() -> None:
    """No coordinated omission: none of the 40 ends before the last was sent, and each one's wait counts in full."""
    target = FakeTarget()
    target.going.clear()
    schedule = at(*(0.005 * index for index in range(40)))
    running = asyncio.create_task(drive(schedule, target, FakePrompts()))
    async with asyncio.timeout(10):
        while len(target.started) < 40:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    target.going.set()
    columns = await running
    assert target.most_running == 40
    assert (columns.sent_s < columns.first_s.min()).all()
    # All were released at one time, so TTFT falls by the gaps between their due times.
    ttft_s = columns.first_s - columns.due_s
    assert ttft_s[0] - ttft_s[-1] == pytest.approx(39 * 0.005, abs=0.05)


async def test_requests_that_are_not_due_need_no_task() -> None:
    """The schedule is read lazily, so that it may have a million requests."""
    read = itertools.count()
    schedule = ((0.0 if index < 10 else 3600.0, shape(index)) for index in read)
    target = FakeTarget()
    running = asyncio.create_task(drive(schedule, target, FakePrompts(), on_cancelled=lambda: None))
    async with asyncio.timeout(10):
        while len(target.started) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert target.most_tasks < 20
    running.cancel()
    columns = await running
    assert len(columns) == 10
    assert next(read) < 1000


async def test_a_burst_goes_out_at_once_and_in_order() -> None:
    target = FakeTarget()
    target.going.clear()
    num = 2000
    running = asyncio.create_task(drive(at(*[0.0] * num), target, FakePrompts()))
    async with asyncio.timeout(20):
        while len(target.started) < num:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    target.going.set()
    columns = await running
    assert target.started == list(range(num))
    assert target.most_running == num
    assert (columns.due_s == 0).all()
    assert (np.diff(columns.sent_s) >= 0).all()


async def test_prompts_are_made_ahead_of_their_time() -> None:
    prompts, target = FakePrompts(), FakeTarget()
    made_at_start: list[int] = []
    schedule = ((index / 1000, shape(index)) for index in range(700))
    await drive(schedule, target, prompts, on_start=lambda _: made_at_start.append(len(prompts.made)))
    assert 400 < made_at_start[0] < 700
    assert prompts.made == list(range(700))


async def test_prompts_that_are_ready_have_a_limit_of_tokens() -> None:
    prompts, target = FakePrompts(), FakeTarget()
    made: list[int] = []
    schedule = [(0.0, shape(index, num_prompt_tokens=400_000)) for index in range(6)]
    await drive(schedule, target, prompts, on_start=lambda _: made.append(len(prompts.made)))
    assert made == [3]
    assert target.started == list(range(6))


async def test_the_start_is_reported_on_the_runs_clock() -> None:
    started: list[float] = []
    before = time.perf_counter()
    columns = await drive(at(0.01), FakeTarget(), FakePrompts(), on_start=started.append)
    assert before < started[0] < time.perf_counter()
    assert started[0] + columns.last_s[0] < time.perf_counter()


async def test_what_is_due_after_the_duration_is_left_out() -> None:
    endless = ((index * 0.01, shape(index)) for index in itertools.count())
    columns = await drive(endless, FakeTarget(), FakePrompts(), duration_s=0.1)
    assert columns.index.tolist() == list(range(len(columns)))
    assert len(columns) in (10, 11)


@pytest.mark.parametrize("has_timerfd", [True, False])
async def test_the_wait_for_a_moment_never_ends_early(has_timerfd, monkeypatch) -> None:
    if not has_timerfd:  # as elsewhere than on Linux
        monkeypatch.setattr(timer, "_LIBC", None)
    with Timer(time.perf_counter).set() as it:

        async def wait(wait_s: float) -> float:
            moment_s = time.perf_counter() + wait_s
            await it.wait_until(moment_s)
            return time.perf_counter() - moment_s

        waits_s = (0.02, -1.0, 0.0, 0.0003, 0.004, 0.0041, 0.011, 0.001)
        late_s = await asyncio.gather(*map(wait, waits_s))
        assert min(late_s) >= 0
        assert min(late_s) < 0.02
        given_up = asyncio.create_task(wait(0.01))
        later = asyncio.create_task(wait(0.02))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await later >= 0


async def test_moments_that_are_far_away_cost_nothing() -> None:
    """The clock is read a few times for each wait, not in a loop."""
    readings = itertools.count()

    def clock() -> float:
        next(readings)
        return time.perf_counter()

    with Timer(clock).set() as it:
        for _ in range(5):
            await it.wait_until(time.perf_counter() + 0.02)
    assert next(readings) < 40


# ---------------------------------------------------------------- closed loop


async def test_a_closed_loop_keeps_its_concurrency() -> None:
    target = FakeTarget(takes_s=0.03)
    columns = await drive(at(*[0.0] * 20), target, FakePrompts(), concurrency=4)
    assert target.most_running == 4
    assert columns.ok.all()
    # Due when it was taken: a user waits for its own requests only.
    ends = np.sort(columns.last_s)
    dues = np.sort(columns.due_s)
    assert (dues[:4] < ends[0]).all()
    assert (dues[4:] >= ends[:16]).all()


async def test_a_closed_loop_ends_with_its_duration() -> None:
    endless = ((0.0, shape(index)) for index in itertools.count())
    columns = await drive(endless, FakeTarget(takes_s=0.02), FakePrompts(), concurrency=3, duration_s=0.1)
    assert 3 <= len(columns) <= 18
    assert columns.ok.all(), "what was sent is waited for"
    assert columns.due_s.max() <= 0.1


# ---------------------------------------------------------------- columns


def columns_of(*ended: RequestInFlight, start_s: float = 0.0) -> RequestColumns:
    recorder = Recorder()
    for live in ended:
        recorder.add(live)
    return recorder.columns(start_s)


def test_columns_are_by_index_and_keep_their_gaps() -> None:
    first = RequestInFlight(shape(5, kind="long", tenant="a", n=2), 100.5, 7)
    first.sent_s = 100.75
    for now_s in (101.0, 101.5, 103.5):
        first.tokens(now_s, 2)
    second = RequestInFlight(shape(3, session=4, turn=2), 100.0, 2)
    second.failed("TIMEOUT")
    second.failed("CANCELLED")
    third = RequestInFlight(shape(4), 100.25, 2)
    third.tokens(100.5, 1)
    third.tokens(100.75, 1)
    third.num_cached_tokens, third.queue_s = 16, 0.125
    columns = columns_of(first, second, third, start_s=100.0)
    assert columns.index.tolist() == [3, 4, 5]
    assert columns.due_s.tolist() == [0.0, 0.25, 0.5]
    assert columns.sent_s.tolist()[2] == 0.75
    assert columns.first_s.tolist()[1:] == [0.5, 1.0]
    assert columns.last_s.tolist()[1:] == [0.75, 3.5]
    assert np.isnan([columns.first_s[0], columns.last_s[0], columns.queue_s[0], columns.server_first_s[2]]).all()
    assert columns.num_gaps.tolist() == [0, 1, 2]
    assert columns.gap_s.tolist() == [0.25, 0.5, 2.0]
    assert columns.gap_s.dtype == np.float32
    assert columns.num_output_tokens.tolist() == [0, 2, 6]
    assert columns.num_samples.tolist() == [1, 1, 2]
    assert columns.num_prompt_tokens.tolist() == [2, 2, 7]
    assert columns.num_cached_tokens.tolist() == [-1, 16, -1]
    assert columns.queue_s[1] == 0.125
    assert columns.error.tolist() == ["TIMEOUT", "", ""]
    assert columns.kind.tolist() == ["", "", "long"]
    assert columns.tenant.tolist() == ["", "", "a"]
    assert (columns.session[0], columns.turn[0]) == (4, 2)
    assert columns.select(columns.ok).gap_s.tolist() == [0.25, 0.5, 2.0]
    assert columns.index.dtype == columns.num_gaps.dtype == np.int64


def test_gaps_may_be_left_out() -> None:
    live = RequestInFlight(shape(0), 0.0, 2, keep_gaps=False)
    live.tokens(1.0, 1)
    live.tokens(2.0, 1)
    columns = columns_of(live)
    assert (columns.first_s[0], columns.last_s[0], columns.num_gaps[0], len(columns.gap_s)) == (1.0, 2.0, 0, 0)
    assert live.times == array("d")


def test_columns_of_nothing() -> None:
    columns = columns_of()
    assert len(columns) == 0
    assert columns.ok.tolist() == columns.gap_s.tolist() == []


def test_what_a_caller_has_left_out_of_collections_stays_so() -> None:
    gc.unfreeze()
    driver._anything_left_out.cache_clear()
    try:
        with present_objects_left_out():
            with present_objects_left_out():
                assert gc.get_freeze_count()
            assert gc.get_freeze_count(), "the outer one goes on"
        assert not gc.get_freeze_count()
    finally:
        gc.freeze()  # as for the whole suite (tests/conftest.py)
        driver._anything_left_out.cache_clear()
    with present_objects_left_out():
        pass
    assert gc.get_freeze_count()
