"""The virtual event loop: what order it keeps, what it draws, and what it notices."""

from __future__ import annotations

import asyncio
import itertools
from random import Random

import pytest

from tests.simulation.loop import LoopClock, NothingLeftError, SpinningError, VirtualLoop


def _run(seed: int, latest_s: float = 0.0) -> list[str]:
    """Two callbacks at once, three timers at one moment, one timer 0.4 ms after them."""
    loop, seen = VirtualLoop(Random(seed), latest_s=latest_s), list[str]()

    async def history() -> None:
        for name in "ab":
            loop.call_soon(seen.append, name)
        for name in "def":
            loop.call_later(1.0, seen.append, name)
        loop.call_later(1.0004, seen.append, "g")
        await asyncio.sleep(2.0)

    loop.run_until_complete(history())
    loop.close()
    return seen


def test_timers_of_one_moment_run_in_any_order_and_callbacks_in_theirs() -> None:
    runs = ["".join(_run(seed)) for seed in range(40)]
    assert {run[:2] for run in runs} == {"ab"}
    assert {run[2:5] for run in runs} == {"def", "dfe", "edf", "efd", "fde", "fed"}
    assert {run[5] for run in runs} == {"g"}
    assert runs[:5] == ["".join(_run(seed)) for seed in range(5)], "a seed gives one order"


def test_a_late_turn_finds_more_timers_due() -> None:
    assert any("".join(_run(seed, latest_s=0.005)).index("g") < 5 for seed in range(40))


def test_time_passes_without_waiting_and_a_pause_makes_timers_late() -> None:
    loop = VirtualLoop(Random(0))
    clock = LoopClock(loop)

    async def history() -> None:
        begun = clock.monotonic()
        await clock.sleep(3600.0)
        assert clock.monotonic() - begun == pytest.approx(3600.0)
        loop.pause(5.0)
        await asyncio.sleep(1.0)
        assert clock.monotonic() - begun == pytest.approx(3606.0)

    loop.run_until_complete(history())
    loop.close()


def test_a_task_that_nothing_can_wake_is_noticed() -> None:
    loop = VirtualLoop(Random(0))
    forgotten = loop.create_future()
    with pytest.raises(NothingLeftError):
        loop.run_until_complete(forgotten)
    loop.close()


def test_a_task_that_spins_is_noticed() -> None:
    loop = VirtualLoop(Random(0))

    async def spin() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    task = loop.create_task(spin())
    with pytest.raises(SpinningError):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
