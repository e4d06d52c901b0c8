"""What a new request waits for: no more plans in flight than steps of their length need, and its first token first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.types import StepPlan
from tests.helpers.virtual_engine import MODEL, started


@pytest.mark.parametrize(("step_s", "most"), [(0.0003, 1), (0.002, 2)])
async def test_very_short_steps_follow_each_other_one_by_one(step_s: float, most: int) -> None:
    async with started(step_s=step_s) as world:
        world.submit(100)
        await world.clock.advance(10 * step_s)
        found = set()
        for _ in range(20):
            await world.clock.advance(step_s / 2)
            found.add(len(world.core.lanes[0].inflight))
        assert max(found) == most


@pytest.mark.parametrize(("num_others", "plans_first"), [(0, False), (40, True)])
async def test_a_first_token_is_delivered_before_the_next_plan_is_made(num_others: int, plans_first: bool) -> None:
    """Beside many other tokens it is not: delivering these takes too long."""
    events: list[str] = []
    model = replace(MODEL, num_slots=64, max_num_seqs=64)
    async with started(model=model, step_s=0.005) as world:
        for index in range(num_others):
            world.submit(50, request_id=f"other {index}")
        await world.clock.advance(0.1)
        plan_step = world.core.plan_step

        def planning(executor_id: int, now: float) -> StepPlan | None:
            events.append("plan")
            return plan_step(executor_id, now)

        world.core.plan_step = planning  # type: ignore[method-assign]
        live = world.submit(5)
        live.subscribe(lambda _: events.append("token"))
        while "token" not in events:
            events.clear()
            await world.clock.advance(0.001)
    assert (events.index("plan") < events.index("token")) == plans_first
