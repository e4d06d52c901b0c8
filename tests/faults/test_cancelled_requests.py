"""Requests that clients cancel leave nothing in the scheduler's process, with an executor and after it was killed."""

from __future__ import annotations

import asyncio

import pytest

from tests.helpers.scheduler.cancelled import measure, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
MAX_GROWTH_MB = 10.0


@pytest.mark.long
async def test_memory_does_not_grow_with_cancelled_requests() -> None:
    """One prompt in four has 8,000 tokens: kept, they would take 25 MB and more."""
    found = await measure(400, long_every=4, warm_up=200)
    growth = {name: value for name, value in found.items() if name.endswith("_growth_mb")}
    assert len(growth) == 4
    assert max(growth.values()) < MAX_GROWTH_MB, growth


async def test_a_burst_of_long_prompts_gives_its_memory_back() -> None:
    """200 prompts of 8,000 tokens at once take about 90 MB; after their end it does not stay with the process."""
    async with served(long_every=1) as scheduler:
        await scheduler.lose_executor()
        await scheduler.cancel_calls(20)
        before = await scheduler.resident_bytes()
        await scheduler.cancel_calls(200)
        async with asyncio.timeout(20):
            while await scheduler.resident_bytes() > before + 30e6:
                pass
