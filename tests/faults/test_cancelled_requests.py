"""Requests that clients cancel leave nothing in the scheduler's process, with an executor and after it was killed."""

from __future__ import annotations

import pytest

from benchmarks.cancel_memory import measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
NUM_CANCELS = 2000
MAX_GROWTH_MB = 10.0


async def test_memory_does_not_grow_with_cancelled_requests() -> None:
    """One prompt in ten has 8,000 tokens: kept, they would take 50 MB and more."""
    found = await measure(NUM_CANCELS, long_every=10, warm_up=1000)
    growth = {name: value for name, value in found.items() if name.endswith("_growth_mb")}
    assert len(growth) == 4
    assert max(growth.values()) < MAX_GROWTH_MB, growth
