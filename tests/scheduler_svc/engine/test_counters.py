"""Counters count since the scheduler's start: a lost, restarted or changed executor never sets them back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.plan_loop.gauges import Load
from scheduler_svc.plan_loop.ports import ModelDescription
from tests.helpers.scheduler.fake_clock import TimedExecutor
from tests.helpers.scheduler.virtual_engine import MODEL, STEP_S, World, started

COUNTERS = (
    "num_steps",
    "num_output_tokens",
    "num_preemptions",
    "num_prefix_queries",
    "num_prefix_hits",
    "num_prefix_host_hits",
    "num_drafts",
    "num_accepted_drafts",
)
SMALL = replace(MODEL, num_device_blocks=12, num_host_blocks=64)


def counts_of(load: Load) -> list[int]:
    return [getattr(load, name) for name in COUNTERS]


class Watched:
    """A world whose counters are read after each step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.last = counts_of(world.engine.load())
        self.last_step_id = 0

    async def run(self, num_steps: int) -> None:
        """Let this much time pass; no counter may decrease."""
        for _ in range(num_steps):
            await self.world.clock.advance(STEP_S)
            now, last_step_id = counts_of(self.world.engine.load()), self.world.engine.executor_infos()[0].last_step_id
            assert all(count >= before for count, before in zip(now, self.last, strict=True)), (self.last, now)
            assert last_step_id >= self.last_step_id
            self.last, self.last_step_id = now, last_step_id

    async def serve(self, prefix: str) -> list[int]:
        """Serve requests that make every counter grow; returns by how much."""
        before = self.last
        for index in range(4):
            self.world.submit(60, num_prompt_tokens=100, request_id=f"{prefix}{index}")
            await self.run(10)
        await self.run(300)
        assert not self.world.core.groups
        return [count - start for count, start in zip(self.last, before, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("model", [SMALL, replace(SMALL, num_device_blocks=11)], ids=["same", "changed"])
async def test_no_counter_decreases_when_the_executor_comes_back(model: ModelDescription) -> None:
    policies = Policies(prefix_caching=True, preemption="swap")
    async with started(model=SMALL, policies=policies) as world:
        watched = Watched(world)
        grown = await watched.serve("before")
        assert all(grown[:5]), dict(zip(COUNTERS, grown, strict=True))
        assert world.executor.stream is not None
        world.executor.model = model
        world.executor.stream.break_off()
        await watched.run(30)
        assert world.engine.connected
        world.executor.lane = world.core.lanes[0]
        assert world.engine.load().num_device_blocks == model.num_device_blocks
        grown = await watched.serve("after")
        assert all(grown[:5]), dict(zip(COUNTERS, grown, strict=True))


async def test_steps_are_counted_from_the_schedulers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor has run a thousand steps for an earlier scheduler: step ids go on from there."""
    monkeypatch.setattr(TimedExecutor, "num_steps_before", 1000)
    async with started() as world:
        world.submit(4)
        await world.clock.advance(10 * STEP_S)
        assert 4 <= world.engine.load().num_steps < 10
        assert world.engine.executor_infos()[0].last_step_id > 1000
