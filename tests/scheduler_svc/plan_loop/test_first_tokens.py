"""A first token does not wait for the next plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cadenza_common.plan.plan import StepPlan
from tests.helpers.scheduler.virtual_engine import MODEL, started


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
