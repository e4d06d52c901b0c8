"""Subscriptions to KV events. Without any, the prefix caches note nothing and nothing runs here.

Hashes and events are made by a task of their own, in slices, after the next plan is sent: a step never waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator

from scheduler_svc.core.errors import PreconditionError
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine.kv_events.cache_view import CacheView
from scheduler_svc.engine.kv_events.events import Change, Cleared, Event, KvEventBatch, StatePart, grouped, net
from scheduler_svc.plan_loop.clock import Clock, ScheduledCall

_LOG = logging.getLogger(__name__)
_MAX_KEPT = 4096
"""Batches that are kept for subscribers that come back."""
_MAX_KEPT_EVENTS = 65_536
"""Events of these batches."""
_MAX_PENDING = 1024
"""Batches that wait for a subscriber; one with more gets the present state instead."""
_MANY = 1024
"""More changes at a time are compared in a thread."""
_FLUSH_SLICE = 512
"""Blocks that are removed before the event loop runs other callbacks."""
_LINGER_S = 30.0
"""How long changes are noted after the last subscriber has left: one that comes back goes on where it was."""


class Subscription:
    """One subscriber's batches, in order; use it with `async for`, and close it."""

    def __init__(self, hub: KvEvents, start: int) -> None:
        """start: the first number that it has not seen; 0: it has seen none."""
        self._hub = hub
        self._start = start
        self._pending: deque[KvEventBatch] = deque()
        self._num_live = 0
        """How many of these are live batches, not parts of a state."""
        self._needs_state = False
        self._has_begun = False
        self._wake = asyncio.Event()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> KvEventBatch:
        """The next batch; raises StopAsyncIteration once the service stops."""
        while not self._pending:
            if self._hub.is_stopped:
                raise StopAsyncIteration
            if not self._has_begun or self._needs_state:
                await self._begin()
                continue
            self._wake.clear()
            await self._wake.wait()
        batch = self._pending.popleft()
        self._num_live -= batch.part is None
        return batch

    async def _begin(self) -> None:
        """Take what it has not seen: what is kept of it, or the present state; from then on `put` adds to it."""
        async with self._hub.at_rest():
            if self._hub.is_stopped:
                return
            kept = None if self._has_begun else self._hub.kept_from(self._start)
            batches = await self._hub.state() if kept is None else kept
            self._has_begun, self._needs_state = True, False
            self._num_live = 0
            for batch in batches:
                self._add(batch)

    def put(self, batch: KvEventBatch) -> None:
        """Add a batch, or drop all of a subscriber that is too slow."""
        if self._has_begun and not self._needs_state:
            self._add(batch)
            if self._num_live > _MAX_PENDING:
                self.begin_again()

    def _add(self, batch: KvEventBatch) -> None:
        self._pending.append(batch)
        self._num_live += batch.part is None
        self._wake.set()

    def begin_again(self) -> None:
        """Drop what waits: the present state comes next."""
        self._pending.clear()
        self._needs_state = True
        self._wake.set()

    def wake(self) -> None:
        """Look at the hub again."""
        self._wake.set()

    def close(self) -> None:
        """Stop taking batches."""
        self._hub.leave(self)


class KvEvents:
    """Makes batches while there are subscriptions."""

    def __init__(self, core: Scheduler, clock: Clock) -> None:
        self._core = core
        self._clock = clock
        self._number = 0
        """Of the last batch; 0: nobody has subscribed yet."""
        self._view = CacheView()
        self._kept: deque[KvEventBatch] = deque()
        self._num_kept_events = 0
        self._subscriptions: set[Subscription] = set()
        self._task: asyncio.Task[None] | None = None
        self._linger: ScheduledCall | None = None
        self._changed = asyncio.Event()
        self._collecting = asyncio.Lock()
        self._is_new = True
        """Whether nothing was collected since the caches note changes."""
        self._begun = asyncio.Event()
        self.is_stopped = False

    def subscribe(self, start: int = 0) -> Subscription:
        """A subscription from this number on; 0, or a number that is not kept: the present state comes first."""
        subscription = Subscription(self, start)
        self._subscriptions.add(subscription)
        if not self._number:
            # Batches of an earlier process had smaller numbers, unless it made over 1,000 a second for long.
            self._number = self._clock.wall_time_ns() // 1_000_000
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._task is None and not self.is_stopped:
            self._task = asyncio.create_task(self._run(), name="kv-events")
            self._changed.set()
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """End a subscription; after the last one, changes are noted for a while yet."""
        self._subscriptions.discard(subscription)
        if not self._subscriptions and self._task is not None and self._linger is None:
            self._linger = self._clock.call_later(_LINGER_S, self._end)

    def on_change(self) -> None:
        """A step was planned or applied, or a session has ended. Takes no time without subscriptions."""
        if self._task is not None:
            self._changed.set()

    async def flush(self) -> int:
        """Empty the prefix caches; returns the number of blocks removed. Raises PreconditionError if requests run."""
        num_removed = 0
        while True:
            if self._core.groups:
                raise PreconditionError("prefix_cache", f"{len(self._core.groups)} requests run or wait")
            removed = self._core.flush_prefix_caches(_FLUSH_SLICE)
            num_removed += removed
            if not removed:
                return num_removed
            self.on_change()
            await asyncio.sleep(0)

    def stop(self) -> None:
        """End all subscriptions."""
        self.is_stopped = True
        self._end()
        for each in self._subscriptions:
            each.wake()

    @contextlib.asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """In the body, what was published and the state agree."""
        await self._begun.wait()
        async with self._collecting:
            yield

    def kept_from(self, start: int) -> list[KvEventBatch] | None:
        """The batches from this number on; None if some of them are not kept."""
        first = self._kept[0].number if self._kept else self._number + 1
        if not start or not first <= start <= self._number + 1:
            return None
        return [batch for batch in self._kept if batch.number >= start]

    async def state(self) -> list[KvEventBatch]:
        """The present state in parts, while `at_rest`; the last one has the number of the last batch."""
        parts = await asyncio.to_thread(_parts, self._view)
        now_ns, count = self._clock.wall_time_ns(), len(parts)
        return [
            KvEventBatch(
                self._number - count + 1 + index, now_ns, events, StatePart(index, count, self._view.num_blocks)
            )
            for index, events in enumerate(parts)
        ]

    async def _run(self) -> None:
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                async with self._collecting:
                    await self._collect()
                self._begun.set()
        except Exception:
            _LOG.exception("KV events have failed: subscriptions end")
            self.stop()

    async def _collect(self) -> None:
        changes: list[Change] = []
        for part in self._view.collect(self._core.lanes):
            changes += part
            await asyncio.sleep(0)
        is_new, self._is_new = self._is_new, False
        if is_new:
            return  # whoever subscribes gets the state
        few = len(changes) <= _MANY
        for events in grouped(net(changes) if few else await asyncio.to_thread(net, changes)):
            self._publish(events)
            await asyncio.sleep(0)

    def _publish(self, events: list[Event]) -> None:
        self._number += 1
        batch = KvEventBatch(self._number, self._clock.wall_time_ns(), events)
        self._kept.append(batch)
        self._num_kept_events += len(events)
        while len(self._kept) > _MAX_KEPT or self._num_kept_events > _MAX_KEPT_EVENTS:
            self._num_kept_events -= len(self._kept.popleft().events)
        for each in self._subscriptions:
            each.put(batch)

    def _end(self) -> None:
        """Stop noting changes, and drop what is kept."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._task is not None:
            task, self._task = self._task, None
            if task is not asyncio.current_task():
                task.cancel()
        self._view.end()
        self._view = CacheView()
        self._kept.clear()
        self._num_kept_events = 0
        self._number += 1  # a number that no batch has: whoever waits for it has missed something
        self._is_new = True
        self._begun.clear()
        if self.is_stopped:
            self._begun.set()


def _parts(view: CacheView) -> list[list[Event]]:
    parts: list[list[Event]] = list(grouped(view.present())) or [[]]
    parts[0].insert(0, Cleared())
    return parts
