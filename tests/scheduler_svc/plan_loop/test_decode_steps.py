"""A step that decodes only: the plan loop makes no work that it does not need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.scheduler.virtual_engine import MODEL, STEP_S, started


async def test_a_step_that_decodes_only_needs_no_timeout_and_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both cost more than the planning itself."""
    async with started() as world:
        lives = [world.submit(100, request_id=str(index)) for index in range(4)]
        await world.clock.advance(3 * STEP_S)
        calls: list[str] = []

        def counted(owner: Any, name: str) -> None:
            function = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *args: (calls.append(name), function(*args))[1])

        counted(world.clock, "timeout")
        counted(world.core, "look_ahead")
        num_steps = world.core.num_steps
        await world.clock.advance(20 * STEP_S)
        assert world.core.num_steps - num_steps == 20
        assert calls == []
        # One that waits may need a lookup.
        lives.append(world.submit(5, request_id="waits"))
        await world.clock.advance(2 * STEP_S)
        assert "look_ahead" in calls


async def test_the_pacer_tells_steps_with_drafts_from_those_without() -> None:
    """A step of two sequences with three drafts each is one of eight tokens: it takes longer than one of two."""
    model = replace(MODEL, num_slots=16, max_num_seqs=16, max_drafts=3)
    async with started(model=model) as world:
        pacer = world.engine.executors._members[0].loop._pacer
        for request_id in "ab":
            world.submit(30, request_id=request_id)
        await world.clock.advance(10 * STEP_S)
        with_drafts, without = (8).bit_length(), (2).bit_length()
        assert with_drafts in pacer._steps
        assert without not in pacer._steps
        # One step without drafts, as a probe of their number makes: it says nothing of the others.
        pacer.observe(2, STEP_S / 4)
        assert pacer.predict(2) == STEP_S / 4
        assert pacer.predict(8) == pytest.approx(STEP_S)
