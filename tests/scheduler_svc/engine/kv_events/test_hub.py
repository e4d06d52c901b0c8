"""Subscriptions: the present state, what changes, gaps, slow subscribers, and nothing at all without any."""

from __future__ import annotations

import asyncio

import pytest

from scheduler_svc.core.errors import PreconditionError
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.engine.kv_events import hub as module
from scheduler_svc.engine.kv_events.events import Cleared, KvEventBatch, Removed, Stored
from scheduler_svc.engine.kv_events.hub import KvEvents, Subscription
from tests.helpers.core.core_bench import Bench
from tests.helpers.scheduler.fake_clock import FakeClock


class Rig:
    """A core whose every step is reported."""

    def __init__(self) -> None:
        self.bench = Bench(Policies(prefix_caching=True), num_blocks=24)
        self.clock = FakeClock()
        self.hub = KvEvents(self.bench.core, self.clock)
        self.num_requests = 0

    def serve(self, *ids: int) -> None:
        """Run a request with a prompt of 17 times these tokens."""
        self.num_requests += 1
        self.bench.add(str(self.num_requests), list(ids) * 17, max_tokens=1)
        self.bench.run()
        self.hub.on_change()

    @property
    def watches(self) -> bool:
        return self.bench.lane.blocks.tiers.cache._noted is not None


async def take(subscription: Subscription) -> KvEventBatch:
    async with asyncio.timeout(5):
        return await anext(subscription)


def num_stored(batch: KvEventBatch) -> int:
    return sum(len(event.blocks) for event in batch.events if isinstance(event, Stored))


async def test_nothing_is_noted_without_subscribers() -> None:
    rig = Rig()
    rig.serve(1)
    assert not rig.watches
    subscription = rig.hub.subscribe()
    await take(subscription)
    assert rig.watches
    subscription.close()
    await rig.clock.advance(100)
    assert not rig.watches
    rig.serve(2)
    assert rig.hub._task is None
    rig.hub.stop()


async def test_a_subscriber_gets_the_present_state_and_then_what_changes() -> None:
    rig = Rig()
    rig.serve(1)
    subscription = rig.hub.subscribe()
    state = await take(subscription)
    assert state.part is not None
    assert (state.part.index, state.part.count, state.part.num_blocks) == (0, 1, 4)
    assert isinstance(state.events[0], Cleared)
    assert num_stored(state) == 4
    rig.serve(2)
    batch = await take(subscription)
    assert (batch.number, batch.part, num_stored(batch)) == (state.number + 1, None, 4)
    for ids in ((3, 4), (5, 6), (7, 8)):
        rig.serve(*ids)
        batch = await take(subscription)
    assert any(isinstance(event, Removed) for event in batch.events), "24 blocks hold three of these"
    rig.hub.stop()
    with pytest.raises(StopAsyncIteration):
        await anext(subscription)


async def test_who_comes_back_goes_on_where_it_was_and_others_get_the_state() -> None:
    rig = Rig()
    first = rig.hub.subscribe()
    number = (await take(first)).number
    first.close()
    rig.serve(1)
    again = rig.hub.subscribe(number + 1)
    batch = await take(again)
    assert (batch.number, batch.part, num_stored(batch)) == (number + 1, None, 4)
    for start in (number + 100, number - 100, 1):
        other = rig.hub.subscribe(start)
        assert (await take(other)).part is not None
    again.close()
    other.close()
    rig.hub.stop()


async def test_who_comes_back_after_changes_were_not_noted_gets_the_state() -> None:
    rig = Rig()
    first = rig.hub.subscribe()
    number = (await take(first)).number
    first.close()
    await rig.clock.advance(100)
    rig.serve(1)
    again = rig.hub.subscribe(number + 1)
    batch = await take(again)
    assert batch.part is not None
    assert batch.number > number
    assert num_stored(batch) == 4
    rig.hub.stop()


async def test_a_slow_subscriber_gets_the_state_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PENDING", 2)
    rig = Rig()
    slow, fast = rig.hub.subscribe(), rig.hub.subscribe()
    await take(slow)
    await take(fast)
    for index in range(4):
        rig.serve(index + 1)
        assert (await take(fast)).part is None
    batch = await take(slow)
    assert batch.part is not None
    assert batch.part.num_blocks == num_stored(batch) == 16
    rig.serve(9)
    assert (await take(slow)).number == batch.number + 1
    rig.hub.stop()


async def test_the_caches_are_emptied_only_while_nothing_runs() -> None:
    rig = Rig()
    rig.serve(1)
    subscription = rig.hub.subscribe()
    await take(subscription)
    rig.bench.add("runs", [2] * 17, max_tokens=1)
    with pytest.raises(PreconditionError, match="1 requests run or wait"):
        await rig.hub.flush()
    rig.bench.run()
    rig.hub.on_change()
    assert num_stored(await take(subscription)) == 4
    assert await rig.hub.flush() == 8
    (event,) = (await take(subscription)).events
    assert isinstance(event, Removed)
    assert len(event.blocks) == 8
    rig.bench.core.check_integrity()
    rig.hub.stop()
