"""An executor that makes no progress is noticed, on virtual time, and no other is."""

from __future__ import annotations

import logging

import pytest

from scheduler_svc.plan_loop.progress import FIRST_STEP_S, MIN_ALLOWED_S
from tests.helpers.scheduler.virtual_engine import STEP_S, World, started

TICK_S = 0.05


def reported_health(world: World) -> list[tuple[float, bool]]:
    """(moment, healthy), for each report from now on; virtual seconds."""
    reports: list[tuple[float, bool]] = []
    world.engine.add_health_listener(lambda healthy: reports.append((world.clock.monotonic(), healthy)))
    return reports


async def test_a_hung_step_is_not_healthy_after_two_seconds() -> None:
    async with started() as world:
        reports = reported_health(world)
        live = world.submit(20)
        await world.clock.advance(5.5 * STEP_S)
        world.executor.hangs = True
        hung_since = 1.0 + 5 * STEP_S
        await world.clock.advance(MIN_ALLOWED_S - STEP_S)
        assert world.engine.healthy
        await world.clock.advance(STEP_S)
        assert not world.engine.healthy
        assert reports == [(pytest.approx(hung_since + MIN_ALLOWED_S), False)]
        await world.clock.advance(7.0)
        (state,) = world.engine.executor_infos()
        assert (state.connected, state.stalled_step_id, state.last_step_id) == (True, 6, 5)
        assert state.stalled_s == pytest.approx(world.clock.monotonic() - hung_since)
        assert (live.num_completion_tokens, live.ended) == (5, False), "its requests wait"
        assert len(reports) == 1


async def test_when_the_step_ends_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    async with started() as world:
        live = world.submit(20)
        await world.clock.advance(5.5 * STEP_S)
        world.executor.hangs = True
        with caplog.at_level(logging.INFO, "scheduler_svc"):
            await world.clock.advance(10.0)
            reports = reported_health(world)
            world.executor.go_on()
            await world.clock.advance(0)
        assert [healthy for _, healthy in reports] == [True]
        assert world.engine.executor_infos()[0].stalled_step_id == 0
        await world.clock.advance(1.0)
        assert live.ended
        assert live.num_completion_tokens == 20
        assert len(world.executor.opened_at) == 1, "the session went on"
        assert [record.getMessage() for record in caplog.records if record.name.endswith("progress")] == [
            "executor virtual makes no progress: step 6 has run for 2.0 s; requests wait for it",
            "executor virtual makes progress again: step 6 took 10.0 s",
        ]


async def test_a_step_may_take_three_times_as_long_as_predicted() -> None:
    async with started(step_s=4.0) as world:
        reports = reported_health(world)
        world.submit(100)
        await world.clock.advance(5 * 4.0)
        world.executor.step_s = 11.0
        await world.clock.advance(5 * 11.0)
        assert reports == []
        world.executor.hangs = True
        await world.clock.advance(150.0)
        assert [healthy for _, healthy in reports] == [False]
        (state,) = world.engine.executor_infos()
        since = world.clock.monotonic() - state.stalled_s
        assert reports[0][0] - since == pytest.approx(33.0)


async def test_a_long_prompt_may_take_its_share_more() -> None:
    """Decodes of one token take 0.1 s; 200 tokens of a prompt are predicted to take at most 200 times as long."""
    async with started(step_s=0.1) as world:
        reports = reported_health(world)
        world.submit(200)
        await world.clock.advance(2.0)
        world.executor.step_s = 19.0
        world.submit(2, num_prompt_tokens=200, request_id="long")
        await world.clock.advance(60.0)
        assert reports == []


async def test_first_steps_may_take_longer() -> None:
    async with started() as world:
        reports = reported_health(world)
        world.submit(3)
        world.executor.hangs = True
        await world.clock.advance(FIRST_STEP_S - TICK_S)
        assert reports == []
        await world.clock.advance(2 * TICK_S)
        assert [healthy for _, healthy in reports] == [False]


@pytest.mark.parametrize("restarted", [True, False])
async def test_first_steps_of_another_incarnation_may_take_longer_again(restarted: bool) -> None:
    """A new session with the same process may not: its steps are known."""
    async with started() as world:
        world.submit(200)
        await world.clock.advance(10.5 * STEP_S)
        assert world.executor.stream is not None
        world.executor.incarnation += restarted
        world.executor.stream.break_off()
        await world.clock.advance(0.1)
        reports = reported_health(world)
        world.executor.hangs = True
        await world.clock.advance(FIRST_STEP_S - 1.0)
        assert [healthy for _, healthy in reports] == [True] + [False] * (not restarted)


async def test_an_idle_executor_makes_no_progress_and_is_healthy() -> None:
    async with started() as world:
        reports = reported_health(world)
        live = world.submit(20)
        await world.clock.advance(100.0)
        assert live.ended
        assert reports == []
        assert world.engine.healthy


async def test_a_session_that_breaks_ends_the_stall() -> None:
    """Not connected, and so not healthy: health never says SERVING in between."""
    async with started() as world:
        live = world.submit(20)
        await world.clock.advance(5.5 * STEP_S)
        world.executor.hangs = True
        await world.clock.advance(3.0)
        reports = reported_health(world)
        assert world.executor.stream is not None
        world.executor.hangs = False
        world.executor.stream.break_off()
        await world.clock.advance(0.1)
        assert [healthy for _, healthy in reports] == [False]
        assert world.engine.executor_infos()[0].stalled_step_id == 0
        await world.clock.advance(1.0)
        assert [healthy for _, healthy in reports] == [False, True]
        assert (live.ended, live.num_completion_tokens) == (True, 20)


async def test_a_scheduler_that_was_suspended_does_not_blame_the_executor() -> None:
    """The step ended meanwhile, but its result is not read yet when the timer runs."""
    async with started() as world:
        reports = reported_health(world)
        live = world.submit(20)
        await world.clock.advance(5.5 * STEP_S)
        world.executor.hangs = True
        await world.clock.advance(1.0)
        world.clock.suspend(60.0)
        await world.clock.advance(0.0)
        assert reports == []
        world.executor.go_on()
        await world.clock.advance(1.0)
        assert live.ended
        assert reports == []
