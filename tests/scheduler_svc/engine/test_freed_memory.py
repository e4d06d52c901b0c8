"""After a burst of long prompts, free memory goes back to the system; a busy service never pauses for it."""

from __future__ import annotations

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.types import BeamSpec, RequestSpec
from scheduler_svc.engine.freed_memory import MAX_LIVE_TOKENS, MIN_FREED_TOKENS, FreedMemory
from tests.helpers.scheduler.fake_clock import FakeClock


class Burst:
    """A FreedMemory on virtual time, with requests of 10,000 prompt tokens."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.num_calls = 0
        self.freed = FreedMemory(self.clock, self._release)
        self.spec = RequestSpec("r", (5,) * 10_000, SequenceSampling(), 1)

    def _release(self) -> None:
        self.num_calls += 1

    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.freed.on_arrival(self.spec)

    def end(self, count: int) -> None:
        for _ in range(count):
            self.freed.on_ended(self.spec)


async def test_memory_is_released_once_after_a_burst() -> None:
    burst = Burst()
    burst.arrive(200)
    burst.end(200)
    await burst.clock.advance(0.5)
    assert burst.num_calls == 0, "streams still send the last outputs"
    await burst.clock.advance(10)
    assert burst.num_calls == 1
    burst.arrive(30)
    burst.end(30)
    await burst.clock.advance(2)
    assert burst.num_calls == 2, "the next burst counts from its own size"


async def test_a_few_requests_cause_a_pause_once_a_minute_at_most() -> None:
    burst = Burst()
    num_few = MIN_FREED_TOKENS // 10_000 - 1
    for _ in range(25):
        burst.arrive(num_few)
        burst.end(num_few)
        await burst.clock.advance(2)
    assert burst.num_calls == 0
    for _ in range(30):
        burst.arrive(1)
        burst.end(1)
        await burst.clock.advance(2)
    assert burst.num_calls == 1


async def test_a_busy_service_does_not_pause() -> None:
    burst = Burst()
    burst.arrive(200)
    for _ in range(500):
        burst.end(1)
        burst.arrive(1)
        await burst.clock.advance(0.1)
    burst.end(200 - MAX_LIVE_TOKENS // 10_000 - 1)
    await burst.clock.advance(5)
    assert burst.num_calls == 0, "many are left"
    burst.end(1)
    await burst.clock.advance(5)
    assert burst.num_calls == 1


async def test_a_new_burst_keeps_the_memory() -> None:
    burst = Burst()
    burst.arrive(200)
    burst.end(200)
    await burst.clock.advance(0.9)
    burst.arrive(200)
    await burst.clock.advance(5)
    assert burst.num_calls == 0
    burst.end(200)
    await burst.clock.advance(5)
    assert burst.num_calls == 1


async def test_each_sequence_counts() -> None:
    burst = Burst()
    burst.spec = RequestSpec("r", (5,) * 10_000, SequenceSampling(), 1, beams=BeamSpec(10))
    burst.arrive(3)
    burst.end(3)
    await burst.clock.advance(2)
    assert burst.num_calls == 1


async def test_nothing_is_released_after_the_stop() -> None:
    burst = Burst()
    burst.arrive(200)
    burst.end(100)
    burst.end(100)
    burst.freed.stop()
    await burst.clock.advance(5)
    assert burst.num_calls == 0
