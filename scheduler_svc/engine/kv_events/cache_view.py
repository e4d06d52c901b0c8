"""What the prefix caches of all lanes hold together, block by block: made from what they note."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.memory import prefix_cache
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.engine.kv_events.blocks import Block, Tier, first_block, next_block
from scheduler_svc.engine.kv_events.events import Change, parents_first

_SLICE = 256
"""Nodes that are looked at before the event loop runs other callbacks."""


class _LaneView:
    """The nodes of one prefix cache that a lookup can reach, as blocks.

    A node whose parent leaves is never reached again: another parent of the same tokens has an id and children of its
    own.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.blocks: dict[int, Block] = {}
        self.tiers: dict[int, Tier] = {}
        self._children: dict[bytes, set[int]] = {}
        """Nodes by the hash of the block before them."""

    def add(self, node: int, block: Block, tier: Tier) -> None:
        """A new node, whose parent is here or which begins a text."""
        self.blocks[node] = block
        self.tiers[node] = tier
        if block.parent is not None:
            self._children.setdefault(block.parent.digest, set()).add(node)

    def cut(self, node: int) -> Iterator[tuple[Block, Tier]]:
        """Take away a node and all that follow it, one at a time; nothing if it was taken away with an earlier one."""
        leaving = [node] if node in self.blocks else []
        if leaving and (parent := self.blocks[node].parent) is not None:
            siblings = self._children[parent.digest]
            siblings.discard(node)
            if not siblings:
                del self._children[parent.digest]
        while leaving:
            node = leaving.pop()
            block = self.blocks.pop(node)
            leaving += self._children.pop(block.digest, ())
            yield block, self.tiers.pop(node)


class CacheView:
    """Blocks by hash, each with how often each tier holds it: several lanes may, and count as one cache.

    What no lookup reaches, since a block before it has left, is left out.
    """

    def __init__(self) -> None:
        self._lanes: dict[int, _LaneView] = {}
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
                view = self._lanes[lane_id] = _LaneView(cache)
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

    def _apply(self, view: _LaneView, noted: Iterable[prefix_cache.Change]) -> Iterator[list[Change]]:
        """What the noted changes come to, in parts that take about equal time."""
        for node, key, place in noted:
            yield []
            if place is None:
                yield from self._remove(view, node)
                continue
            tier = Tier.DEVICE if place >= 0 else Tier.HOST
            if key is not None:
                block = _block_of(key, view.blocks)
                if block is not None:
                    block = self._blocks.setdefault(block.digest, block)
                    view.add(node, block, tier)
                    yield self._count(block, tier)
            elif node in view.blocks and tier is not view.tiers[node]:
                block, before = view.blocks[node], view.tiers[node]
                view.tiers[node] = tier
                yield self._count(block, tier) + self._uncount(block, before)

    def _remove(self, view: _LaneView, node: int) -> Iterator[list[Change]]:
        return (self._uncount(block, tier) for block, tier in view.cut(node))

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
