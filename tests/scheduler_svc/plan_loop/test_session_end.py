"""What the plan loop states about the end of a session: whether KV is kept, which step failed, which had begun."""

from __future__ import annotations

from pathlib import Path

from executor_svc.simulated.injection import Poison
from scheduler_svc.core.types import RequestSpec
from scheduler_svc.replay.__main__ import main as replay
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.core.known import known_sample
from tests.helpers.scheduler.changing_executor import STEP_S, ChangingWorld, changing_world


def check_tokens(world: ChangingWorld) -> None:
    for live in world.live.values():
        assert live.samples[0].token_ids == known_sample(live.request.spec, world.executor.model.max_model_len)[0]


async def test_a_broken_stream_costs_the_steps_in_flight_alone() -> None:
    """The prompt has 96 tokens and takes six steps; it is not computed again."""
    num_steps = []
    for breaks in (False, True):
        async with changing_world() as world:
            world.submit("r", prompt=96, max_tokens=20)
            await world.clock.advance(11.5 * STEP_S)
            if breaks:
                world.executor.break_off()
            await world.run()
            check_tokens(world)
            num_steps.append(world.core.num_steps)
    assert num_steps[1] <= num_steps[0] + 2


async def test_kv_is_lost_to_another_scheduler() -> None:
    """It had a session in between: the pools are full of its own."""
    async with changing_world() as world:
        world.submit("r", prompt=96, max_tokens=20)
        await world.clock.advance(11.5 * STEP_S)
        world.executor.sole_since_epoch = 2**62
        world.executor.break_off()
        await world.run()
        check_tokens(world)
        assert world.core.num_steps >= 6 + 19 + 6


async def test_another_process_computes_all_again() -> None:
    async with changing_world() as world:
        world.submit("r", prompt=96, max_tokens=20)
        await world.clock.advance(11.5 * STEP_S)
        world.executor.become()
        await world.run()
        check_tokens(world)
        assert world.core.num_steps >= 6 + 19 + 6


async def test_a_step_that_fails_is_blamed_on_its_requests(tmp_path: Path) -> None:
    """Each step with the poisonous request fails, in an executor that lives on: it alone ends, and the log replays."""
    log = tmp_path / "log"
    async with changing_world(record=str(log)) as world:
        world.executor.poison = Poison(token_id=40, position=8)
        world.executor.break_off()
        for index, prompt in enumerate((6, 9, 12)):
            world.submit(f"r{index}", prompt=prompt, max_tokens=25)
        sampling = core_sampling(temperature=1.0, seed=3)
        world.add(RequestSpec("poison", (7, 40, 41), sampling, max_tokens=25))
        await world.run(60)
        assert world.details("poison") == ["EXECUTOR_ERROR"]
        assert [world.details(f"r{index}") for index in range(3)] == [["MAX_TOKENS"]] * 3
        assert world.executor.num_failed <= 1 + 2 + 1
    assert replay([str(log)]) == 0


async def test_a_log_with_kept_and_lost_kv_replays(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with changing_world(record=str(log), enable_prefix_caching=True) as world:
        for index in range(6):
            world.submit(f"r{index}", prompt=20 + index, max_tokens=30)
        for number in range(6):
            await world.clock.advance(8.5 * STEP_S)
            world.executor.break_off() if number % 3 else world.executor.become()
            await world.clock.advance(0.5)
        await world.run(60)
        check_tokens(world)
    assert replay([str(log)]) == 0
