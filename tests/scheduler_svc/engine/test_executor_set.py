"""Several executors behind one engine, on virtual time: they join, die, hang, drain, leave and come back.

The executors simulate KV: a request that moves has exactly the tokens of one executor alone, or the test fails.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scheduler_svc.core.errors import LimitsError, WaitingQueueFullError
from scheduler_svc.engine.fleet.executor_member import (
    MOVE_AFTER_S,
    ExecutorExistsError,
    LastExecutorError,
    UnknownExecutorError,
)
from scheduler_svc.plan_loop.ports import ExecutorFencedError
from scheduler_svc.replay.__main__ import main as replay
from tests.helpers.scheduler.changing_executor import OTHER_NUMERICS, STEP_S
from tests.helpers.scheduler.fleet_world import fleet

OTHER_MODEL = {"fingerprint": OTHER_NUMERICS["fingerprint"], "numerics": OTHER_NUMERICS["numerics"]}
OTHER_KERNELS = {"fingerprint": OTHER_NUMERICS["fingerprint"], "numerics": (("weights", "1111"), ("kernels", "b"))}


@pytest.mark.slow
async def test_requests_are_spread_over_the_executors() -> None:
    async with fleet(3) as world:
        world.submit_mix()
        await world.run()
        world.check_tokens()
        assert [state.index for state in world.engine.executor_infos()] == [0, 1, 2]
        assert all(state.load.num_output_tokens > 0 for state in world.engine.executor_infos())
        total = world.engine.load()
        assert total.num_steps == sum(state.load.num_steps for state in world.engine.executor_infos())
        assert total.num_device_blocks == 3 * 64


@pytest.mark.slow
async def test_one_executor_is_enough_to_start_and_the_others_join() -> None:
    async with fleet(dead=[0]) as world:
        assert world.engine.healthy
        assert [state.connected for state in world.engine.executor_infos()] == [False, True]
        world.submit_mix(max_tokens=60)
        await world.clock.advance(10 * STEP_S)
        assert world.executors[0].num_sent == 0
        world.executors[0].come_back()
        await world.run()
        world.check_tokens()
        assert world.executors[0].num_sent > 0


@pytest.mark.slow
async def test_requests_of_a_dead_executor_move_without_a_lost_or_repeated_token() -> None:
    async with fleet() as world:
        world.submit_mix(max_tokens=60)
        await world.clock.advance(12.5 * STEP_S)
        held = [name for name in world.live if world.holder(name) == 0]
        assert held
        world.executors[0].die()
        await world.clock.advance(MOVE_AFTER_S - STEP_S)
        assert [name for name in held if not world.live[name].ended and world.holder(name) == 0]
        await world.clock.advance(2 * STEP_S)
        assert not [name for name in held if not world.live[name].ended and world.holder(name) == 0]
        assert world.engine.healthy
        await world.run()
        world.check_tokens()
        assert not world.state(0).connected


async def test_a_session_that_is_opened_again_at_once_keeps_its_requests() -> None:
    async with fleet() as world:
        world.submit("a", prompt=60, max_tokens=30)
        await world.clock.advance(8.5 * STEP_S)
        holder = world.holder("a")
        assert holder is not None
        world.executors[holder].break_off()
        await world.run()
        world.check_tokens()
        assert world.executors[1 - holder].num_sent == 0


async def test_requests_of_a_stopped_executor_move_at_once() -> None:
    async with fleet() as world:
        world.submit("a", max_tokens=100)
        await world.clock.advance(8.5 * STEP_S)
        holder = world.holder("a")
        assert holder is not None
        world.executors[holder].die(stopped=True)
        await world.clock.advance(2 * STEP_S)
        assert world.holder("a") == 1 - holder
        await world.run()
        world.check_tokens()


@pytest.mark.slow
async def test_all_die_and_one_comes_back() -> None:
    async with fleet(3) as world:
        world.submit_mix(max_tokens=60)
        await world.clock.advance(12.5 * STEP_S)
        for executor in world.executors:
            executor.die()
        await world.clock.advance(5.0)
        assert not world.engine.healthy
        assert not all(live.ended for live in world.live.values())
        world.executors[2].come_back()
        await world.clock.advance(1.0)
        assert world.engine.healthy
        await world.run()
        world.check_tokens()


@pytest.mark.slow
async def test_requests_of_an_executor_that_hangs_move() -> None:
    async with fleet() as world:
        world.submit_mix(max_tokens=50)
        await world.clock.advance(12.5 * STEP_S)
        world.executors[0].goes_on.clear()
        await world.run()
        world.check_tokens()
        world.executors[0].goes_on.set()
        await world.clock.advance(1.0)
        assert world.state(0).connected


async def test_the_only_executor_that_hangs_keeps_its_session() -> None:
    async with fleet(dead=[1]) as world:
        world.submit("a")
        await world.clock.advance(8.5 * STEP_S)
        world.executors[0].goes_on.clear()
        await world.clock.advance(5.0)
        assert world.state(0).connected
        assert world.state(0).stalled_step_id
        assert not world.engine.healthy
        world.executors[1].come_back()
        await world.run()
        world.check_tokens()


@pytest.mark.slow
async def test_a_drained_executor_is_left_without_requests_until_it_is_resumed() -> None:
    async with fleet() as world:
        world.submit_mix(max_tokens=60)
        await world.clock.advance(12.5 * STEP_S)
        draining = asyncio.create_task(world.engine.executors.drain("e:0", None))
        await world.clock.advance(0)
        assert not draining.done()
        assert world.state(0).draining
        await world.clock.advance(20 * STEP_S)
        assert await draining == 0
        assert world.engine.healthy
        num_sent = world.executors[0].num_sent
        await world.run()
        assert world.executors[0].num_sent == num_sent
        world.engine.executors.resume("e:0")
        world.submit_mix()
        await world.run()
        world.check_tokens()
        assert world.executors[0].num_sent > num_sent


async def test_a_drain_without_another_executor_ends_at_its_timeout() -> None:
    async with fleet(dead=[1]) as world:
        world.submit("a", max_tokens=100)
        await world.clock.advance(8.5 * STEP_S)
        draining = asyncio.create_task(world.engine.executors.drain("e:0", 0.1))
        await world.clock.advance(0.2)
        assert await draining == 1
        assert not world.engine.healthy
        await world.run()
        world.check_tokens()


@pytest.mark.slow
async def test_the_requests_of_a_removed_executor_move() -> None:
    async with fleet() as world:
        world.submit_mix(max_tokens=60)
        await world.clock.advance(12.5 * STEP_S)
        steps = world.engine.load().num_steps
        await world.engine.executors.remove("e:0")
        assert [state.target for state in world.engine.executor_infos()] == ["e:1"]
        assert world.executors[0].is_closed
        assert world.engine.load().num_steps >= steps
        await world.run()
        world.check_tokens()
        with pytest.raises(LastExecutorError):
            await world.engine.executors.remove("e:1")
        with pytest.raises(UnknownExecutorError):
            await world.engine.executors.remove("e:0")
        with pytest.raises(ExecutorExistsError):
            world.engine.executors.add("e:1")
        world.engine.executors.add("e:0")
        await world.clock.advance(0)
        assert [(state.target, state.index, state.connected) for state in world.engine.executor_infos()] == [
            ("e:1", 1, True),
            ("e:0", 2, True),
        ]
        world.submit_mix()
        await world.run()
        world.check_tokens()


@pytest.mark.slow
async def test_an_executor_that_has_never_served_does_not_count_as_another_one() -> None:
    async with fleet(dead=[1]) as world:
        with pytest.raises(LastExecutorError):
            await world.engine.executors.remove("e:0")
        world.executors[0].die()
        await world.clock.advance(1.0)
        with pytest.raises(LastExecutorError):
            await world.engine.executors.retire("e:0")
        assert not world.state(0).draining, "it serves again when it comes back"
        await world.engine.executors.remove("e:1")
        world.executors[0].come_back()
        await world.clock.advance(1.0)
        assert world.engine.healthy
        world.submit_mix()
        await world.run()
        world.check_tokens()


# --- executors that cannot be used ------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_an_executor_that_another_scheduler_has_does_not_stop_the_service() -> None:
    async with fleet() as world:
        world.submit_mix(max_tokens=60)
        await world.clock.advance(12.5 * STEP_S)
        world.executors[0].fences = True
        world.executors[0].break_off()
        await world.run()
        world.check_tokens()
        assert world.engine.failure is None
        assert world.state(0).refusal == "another scheduler holds it"
        with pytest.raises(LastExecutorError):
            await world.engine.executors.remove("e:1")
        world.executors[1].fences = True
        world.executors[1].break_off()
        await world.clock.advance(1.0)
        assert isinstance(world.engine.failure, ExecutorFencedError)
        assert world.engine.fenced.is_set()


async def test_an_executor_serves_again_when_the_other_scheduler_has_stopped(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet() as world:
        world.executors[0].fences = True
        world.executors[0].break_off()
        await world.clock.advance(4.0)
        assert world.executors[0].num_described >= 4
        assert world.state(0).refusal == "another scheduler holds it"
        assert sum("tries again every second" in record.message for record in caplog.records) == 1
        world.executors[0].fences = False
        await world.clock.advance(1.1)
        assert (world.state(0).connected, world.state(0).refusal) == (True, "")
        world.submit_mix()
        await world.run()
        world.check_tokens()
        assert world.executors[0].num_sent > 0


async def test_an_executor_that_died_while_another_scheduler_had_it_is_not_held_any_more() -> None:
    async with fleet() as world:
        world.executors[0].fences = True
        world.executors[0].break_off()
        await world.clock.advance(2.0)
        world.executors[0].die()
        await world.clock.advance(6.0)
        assert world.state(0).refusal == ""
        world.executors[1].fences = True
        world.executors[1].break_off()
        await world.clock.advance(2.0)
        assert world.engine.failure is None, "the other one may come back free"
        world.executors[0].come_back()
        await world.clock.advance(2.0)
        assert isinstance(world.engine.failure, ExecutorFencedError)


@pytest.mark.slow
@pytest.mark.parametrize("at_start", [True, False], ids=["at the start", "added later"])
async def test_a_second_name_of_an_executor_is_refused(at_start: bool) -> None:
    same = [{}, {"incarnation": 1}, {}]
    async with fleet(models=same, dead=[] if at_start else [1]) as world:
        world.submit_mix(max_tokens=60)
        await world.clock.advance(8.5 * STEP_S)
        world.executors[1].alive.set()
        for _ in range(5):
            # A session that is opened again is no chance for the second name either.
            world.executors[0].break_off()
            await world.clock.advance(0.9)
        assert world.state(1).refusal == "it is the executor at e:0"
        assert world.executors[1].num_described >= 4
        assert world.executors[1].num_opened == 0
        await world.run()
        world.check_tokens()
        await world.engine.executors.remove("e:0")
        await world.clock.advance(1.1)
        assert (world.state(1).connected, world.state(1).refusal) == (True, "")


async def test_limits_that_contradict_the_options_stop_the_service_only_if_all_have_them() -> None:
    async with fleet(models=[{"max_num_batched_tokens": 3}, {}]) as world:
        assert world.engine.healthy
        assert "max_num_batched_tokens (3) must be at least" in world.state(0).refusal
    with pytest.raises(LimitsError):
        async with fleet(models=[{"max_num_batched_tokens": 3}, {"max_num_batched_tokens": 2}]):
            pass


# --- figures ---------------------------------------------------------------------------------------------------------


async def test_block_tables_are_those_of_the_executor_that_runs_the_request() -> None:
    async with fleet(models=[{"block_size": 8}, {}]) as world:
        for index in range(4):
            world.submit(f"r{index}", prompt=20, max_tokens=40)
        await world.clock.advance(12.5 * STEP_S)
        holders = {name: world.holder(name) for name in world.live}
        assert set(holders.values()) == {0, 1}
        for name, holder in holders.items():
            (table,) = world.engine.block_tables("", name) or []
            block_size = (8, 4)[holder or 0]
            assert 0 <= len(table.block_ids) * block_size - table.num_computed_tokens <= block_size
            assert set(table.ref_counts) == {1}
        await world.run()


async def test_the_hint_to_come_back_counts_all_executors() -> None:
    async with fleet(models=[{}, {"max_num_seqs": 2}], max_queued_requests=60) as world:

        def fill() -> None:
            for _ in range(200):
                world.submit(f"r{len(world.live)}", max_tokens=4)

        with pytest.raises(WaitingQueueFullError) as both:
            fill()
        world.executors[0].die()
        await world.clock.advance(0)
        with pytest.raises(WaitingQueueFullError) as one:
            fill()
        assert (both.value.retry_after_s, one.value.retry_after_s) == (60 / 6, 60 / 2)
        await world.run()
        world.check_tokens()


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_plan_log_with_executors_that_join_and_leave_is_replayed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with fleet(3, dead=[2], record=str(log)) as world:
        world.submit_mix(12)
        await world.clock.advance(10.5 * STEP_S)
        world.executors[0].die()
        world.executors[2].come_back()
        await world.clock.advance(1.0)
        world.executors[0].come_back()
        draining = asyncio.create_task(world.engine.executors.drain("e:1", None))
        world.submit_mix(8)
        await world.clock.advance(0.5)
        await draining
        world.engine.executors.resume("e:1")
        await world.engine.executors.remove("e:2")
        await world.run()
        world.check_tokens()
    assert replay([str(log)]) == 0


async def test_step_records_have_the_executor_and_its_step() -> None:
    async with fleet() as world:
        async with world.engine.watch() as watch:
            await anext(watch)
            world.submit_mix(4)
            await world.run()
            records = []
            while len(records) < world.engine.load().num_steps:
                records += (await anext(watch))[0]
        for index in (0, 1):
            steps = [record.step_id for record in records if record.executor_id == index]
            assert steps == list(range(1, len(steps) + 1))
            assert steps
        assert sum(len(record.left) for record in records) == sum(len(live.samples) for live in world.live.values())
