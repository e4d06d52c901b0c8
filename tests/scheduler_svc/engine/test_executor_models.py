"""Executors of different models, numerics and sizes behind one engine, on virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_svc.core.errors import ModelChangedError
from tests.helpers.scheduler.changing_executor import OTHER_NUMERICS, STEP_S
from tests.helpers.scheduler.fleet_world import fleet

OTHER_MODEL = {"fingerprint": OTHER_NUMERICS["fingerprint"], "numerics": OTHER_NUMERICS["numerics"]}
OTHER_KERNELS = {"fingerprint": OTHER_NUMERICS["fingerprint"], "numerics": (("weights", "1111"), ("kernels", "b"))}


@pytest.mark.slow
async def test_another_model_is_refused_until_it_is_the_served_one(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet(models=[{}, OTHER_MODEL]) as world:
        await world.clock.advance(5.0)
        assert world.executors[1].num_described >= 5
        assert "weights 2222 is not 1111" in world.state(1).refusal
        assert sum("cannot be used" in record.message for record in caplog.records) == 1
        world.submit_mix()
        await world.run()
        world.check_tokens()
        assert world.executors[1].num_sent == 0
        world.executors[1].come_back(fingerprint=world.executors[0].model.fingerprint, numerics=(("weights", "1111"),))
        await world.clock.advance(2.0)
        assert world.state(1).connected
        assert world.state(1).refusal == ""


async def test_a_moment_without_a_session_lets_no_other_model_in() -> None:
    async with fleet(models=[{}, OTHER_MODEL]) as world:
        world.submit("a", max_tokens=100)
        await world.clock.advance(8.5 * STEP_S)
        for _ in range(5):
            world.executors[0].break_off()
            await world.clock.advance(0.9)
        await world.run()
        world.check_tokens()
        assert world.executors[1].num_sent == 0


async def test_another_model_replaces_the_served_one_when_no_executor_has_served_it_for_a_while() -> None:
    async with fleet() as world:
        world.submit("a", max_tokens=100)
        await world.clock.advance(8.5 * STEP_S)
        for executor in world.executors:
            executor.die()
        world.executors[1].come_back(**OTHER_MODEL)
        await world.clock.advance(1.5)
        assert not world.live["a"].ended
        await world.clock.advance(2.0)
        assert isinstance(world.live["a"].error, ModelChangedError)
        assert world.engine.model.numerics == OTHER_MODEL["numerics"]
        world.executors[0].come_back()
        await world.clock.advance(2.0)
        assert "another model" in world.state(0).refusal


@pytest.mark.slow
async def test_executors_of_different_sizes_serve_together() -> None:
    sizes = [{"max_model_len": 64, "num_device_blocks": 24, "block_size": 8, "max_num_seqs": 2}, {}]
    async with fleet(models=sizes) as world:
        assert (world.engine.model.max_model_len, world.engine.model.max_num_seqs) == (128, 4)
        world.submit("long", prompt=90, max_tokens=30)
        world.submit_mix()
        await world.run()
        world.check_tokens()
        assert world.executors[0].num_sent > 0


async def test_a_request_that_only_a_removed_executor_could_hold_ends_with_the_limit() -> None:
    async with fleet(models=[{"max_model_len": 64}, {}]) as world:
        world.submit("long", prompt=90, max_tokens=30)
        world.submit("short")
        await world.engine.executors.remove("e:1")
        assert "no executor that is left can hold it: 90 prompt tokens" in str(world.live["long"].error)
        await world.run()
        world.check_tokens(but=["long"])
        assert world.engine.model.max_model_len == 64


@pytest.mark.slow
async def test_what_one_executor_lacks_goes_to_the_other() -> None:
    async with fleet(models=[{"gives_candidates": False, "can_fork": False}, {}]) as world:
        world.submit_mix(16)
        await world.run()
        world.check_tokens()
        assert all(executor.num_sent for executor in world.executors)


async def test_an_executor_with_fewer_logprobs_waits_for_the_requests_that_want_more() -> None:
    async with fleet(dead=[1]) as world:
        world.submit("a", max_tokens=100, num_logprobs=20)
        await world.clock.advance(8.5 * STEP_S)
        world.executors[1].come_back(max_logprobs=5)
        await world.clock.advance(0.1)
        assert "at most 5 logprobs" in world.state(1).refusal
        await world.run()
        await world.clock.advance(2.0)
        assert world.state(1).connected
        assert world.engine.model.max_logprobs == 5


# --- numerics --------------------------------------------------------------------------------------------------------


async def test_requests_with_output_stay_with_their_numerics() -> None:
    """A request of the executor with other kernels waits for it, and ends when it is gone for good."""
    async with fleet(models=[{}, OTHER_KERNELS]) as world:
        for index in range(6):
            world.submit(f"r{index}", max_tokens=100)
        await world.clock.advance(12.5 * STEP_S)
        held = [name for name in world.live if world.holder(name) == 1]
        assert held
        world.executors[1].die()
        await world.clock.advance(20.0)
        assert not any(world.live[name].ended for name in held)
        await world.engine.executors.remove("e:1")
        assert all(isinstance(world.live[name].error, ModelChangedError) for name in held)
        await world.run()
        world.check_tokens(but=held)


@pytest.mark.slow
async def test_requests_move_between_numerics_where_that_is_allowed() -> None:
    async with fleet(models=[{}, OTHER_KERNELS], allow_fingerprint_change=True) as world:
        world.submit_mix(max_tokens=60)
        await world.clock.advance(12.5 * STEP_S)
        world.executors[1].die()
        await world.run()
        world.check_tokens()


async def test_with_a_journal_other_numerics_are_refused(tmp_path: Path) -> None:
    async with fleet(models=[{}, OTHER_KERNELS], journal=str(tmp_path)) as world:
        assert "a journal (--journal) in exact mode knows one fingerprint only" in world.state(1).refusal
