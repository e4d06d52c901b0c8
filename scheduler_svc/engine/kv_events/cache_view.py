"""What the prefix caches of all lanes hold together, block by block: made from what they note."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.memory import prefix_cache
from scheduler_svc.engine.kv_events.blocks import Block, Tier, first_block, next_block
from scheduler_svc.engine.kv_events.events import Change, parents_first
from scheduler_svc.engine.kv_events.lane_view import LaneView, WindowedView

_SLICE = 256
"""Nodes that are looked at before the event loop runs other callbacks."""


class CacheView:
    """Blocks by hash, each with how often each tier holds it: several lanes may, and count as one cache.

    What no lookup reaches, since a block before it has left, is left out.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, LaneView] = {}
        self._blocks: dict[bytes, Block] = {}
        self._counts: Counter[tuple[bytes, Tier]] = Counter()
        """By hash and tier."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks, each counted in every tier that has it."""
        return len(self._counts)

    def present(self) -> list[Change]:
        """All blocks as stored now, parents first."""
        return parents_first((self._blocks[digest], tier, True) for digest, tier in self._counts)

    def collect(self, lanes: Mapping[int, Lane]) -> Iterator[list[Change]]:
        """Take what the lanes' caches have noted; yields what changes for all of them together, slice by slice."""
        for lane_id in list(self._lanes):
            lane = lanes.get(lane_id)
            if lane is None or lane.blocks.tiers.cache is not self._lanes[lane_id].cache:
                yield from self._forget(lane_id)
        for lane_id, lane in list(lanes.items()):
            view, cache = self._lanes.get(lane_id), lane.blocks.tiers.cache
            if view is None:
                view = self._lanes[lane_id] = _view_of(lane)
                first_uncertain = lane.inflight[0].first_node if lane.inflight else cache.next_node
                noted = cache.watch(first_uncertain)
            else:
                noted = cache.take_noted(lane.inflight[0].first_change if lane.inflight else cache.num_noted)
            yield from _in_slices(self._apply(view, noted))

    def end(self) -> None:
        """Stop the watch: the caches note no changes."""
        for view in self._lanes.values():
            view.cache.end_watch()

    def _forget(self, lane_id: int) -> Iterator[list[Change]]:
        """A lane has gone, or its cache was emptied at once."""
        view = self._lanes.pop(lane_id)
        view.cache.end_watch()
        return _in_slices(chain.from_iterable(self._remove(view, node) for node in list(view.blocks)[::-1]))

    def _apply(
        self, view: LaneView, noted: Iterable[prefix_cache.Change | prefix_cache.WindowsChange]
    ) -> Iterator[list[Change]]:
        """What the noted changes come to, in parts that take about equal time."""
        for change in noted:
            yield []
            if isinstance(change, prefix_cache.WindowsChange):
                yield self._take(view.set_windows(change.node, change.groups))
                continue
            node, key, place = change
            if place is None:
                yield from self._remove(view, node)
                continue
            tier = Tier.DEVICE if place >= 0 else Tier.HOST
            if key is None:
                yield self._take(view.move(node, tier))
                continue
            block = _block_of(key, view.blocks)
            if block is not None:
                block = self._blocks.get(block.digest, block)
                yield self._take(view.add(node, block, tier, key[0] if isinstance(key[0], int) else None))

    def _remove(self, view: LaneView, node: int) -> Iterator[list[Change]]:
        return (self._take([change]) for change in view.cut(node))

    def _take(self, changes: list[Change]) -> list[Change]:
        """What the changes of one lane's blocks come to for all lanes."""
        found = list[Change]()
        for block, tier, is_stored in changes:
            found += self._count(block, tier) if is_stored else self._uncount(block, tier)
        return found

    def _count(self, block: Block, tier: Tier) -> list[Change]:
        self._counts[block.digest, tier] += 1
        self._blocks[block.digest] = block
        return [(block, tier, True)] if self._counts[block.digest, tier] == 1 else []

    def _uncount(self, block: Block, tier: Tier) -> list[Change]:
        name = block.digest, tier
        self._counts[name] -= 1
        if self._counts[name]:
            return []
        del self._counts[name]
        if not any((block.digest, each) in self._counts for each in Tier):
            del self._blocks[block.digest]
        return [(block, tier, False)]


def _view_of(lane: Lane) -> LaneView:
    cache, sizes = lane.blocks.tiers.cache, lane.blocks.sizes
    if sizes is None or not sizes.extra_reads:
        return LaneView(cache)
    return WindowedView(cache, list(sizes.extra_reads))


def _in_slices(changes: Iterator[list[Change]]) -> Iterator[list[Change]]:
    """The changes of _SLICE nodes at a time."""
    while part := list(islice(changes, _SLICE)):
        yield list(chain.from_iterable(part))


def _block_of(key: prefix_cache.Key, blocks: Mapping[int, Block]) -> Block | None:
    """The block of a new node; None if its chain is cut."""
    before, content = key
    if isinstance(before, tuple):
        return first_block(before, content)
    parent = blocks.get(before)
    return None if parent is None else next_block(parent, content)
