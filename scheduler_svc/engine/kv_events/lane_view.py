"""What a lookup can reach of one prefix cache, as blocks."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.engine.kv_events.blocks import Block, Tier
from scheduler_svc.engine.kv_events.events import Change


class LaneView:
    """The nodes of one prefix cache that a lookup can reach, as blocks. What changes of them is returned.

    A node whose parent leaves is never reached again: another parent of the same tokens has an id and children of its
    own.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.blocks: dict[int, Block] = {}
        self.tiers: dict[int, Tier] = {}
        self._children: dict[bytes, set[int]] = {}
        """Nodes by the hash of the block before them."""

    def add(self, node: int, block: Block, tier: Tier, parent: int | None) -> list[Change]:
        """A new node, whose parent is here, or which begins a text."""
        self.blocks[node] = block
        self.tiers[node] = tier
        if block.parent is not None:
            self._children.setdefault(block.parent.digest, set()).add(node)
        return [(block, tier, True)]

    def move(self, node: int, tier: Tier) -> list[Change]:
        """A node may have moved to another tier."""
        before = self.tiers.get(node, tier)
        if tier is before:
            return []
        self.tiers[node] = tier
        return [(self.blocks[node], tier, True), (self.blocks[node], before, False)]

    def set_windows(self, node: int, groups: int) -> list[Change]:
        """A node has pages in these window groups."""
        return []

    def cut(self, node: int) -> Iterator[Change]:
        """Take away a node and all that follow it, one at a time; nothing if it was taken away with an earlier one."""
        return (change for _, change in self._leaving(node))

    def _leaving(self, node: int) -> Iterator[tuple[int, Change]]:
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
            yield node, (block, self.tiers.pop(node), False)


class WindowedView(LaneView):
    """The same where KV groups have windows, or sequences a state, whose snapshots count as one more window of a block:
    nodes behind the last one where a hit may end count as not there."""

    def __init__(self, cache: PrefixCache, num_read: list[int]) -> None:
        """num_read: by window group, the most blocks that the row after a full block reads."""
        super().__init__(cache)
        self._num_read = num_read
        self._parents: dict[int, int | None] = {}
        self._groups: dict[int, int] = {}
        self._runs: dict[int, tuple[int, ...]] = {}
        """By node and window group, how many blocks up to this one have their pages, in a row; at most those that are
        read, and these where all do from the beginning on."""
        self._num_reasons: dict[int, int] = {}
        """Why a node counts: a hit may end there, and behind how many of its children."""

    def add(self, node: int, block: Block, tier: Tier, parent: int | None) -> list[Change]:
        super().add(node, block, tier, parent)
        self._parents[node], self._groups[node], self._num_reasons[node] = parent, 0, 0
        self._runs[node] = (0,) * len(self._num_read)
        # Of a window of one position nothing is read before the next row.
        return self._set_runs(node, self._runs_of(node), is_new=True)

    def move(self, node: int, tier: Tier) -> list[Change]:
        changes = super().move(node, tier)
        return changes if self._num_reasons.get(node) else []

    def set_windows(self, node: int, groups: int) -> list[Change]:
        if node not in self.blocks or groups == self._groups[node]:
            return []
        self._groups[node] = groups
        changes, changed = list[Change](), [node]
        while changed:
            node = changed.pop()
            runs = self._runs_of(node)
            if runs != self._runs[node]:
                changes += self._set_runs(node, runs)
                changed += self._children.get(self.blocks[node].digest, ())
        return changes

    def _leaving(self, node: int) -> Iterator[tuple[int, Change]]:
        if node in self.blocks and self._num_reasons[node]:
            for change in self._count(self._parents[node], -1):
                yield node, change
        for each, change in super()._leaving(node):
            del self._parents[each], self._groups[each], self._runs[each]
            if self._num_reasons.pop(each):
                yield each, change

    def _runs_of(self, node: int) -> tuple[int, ...]:
        parent, groups = self._parents[node], self._groups[node]
        before = self._num_read if parent is None else self._runs[parent]
        return tuple(
            min(most, run + 1) if groups >> number & 1 else 0
            for number, (run, most) in enumerate(zip(before, self._num_read, strict=True))
        )

    def _set_runs(self, node: int, runs: tuple[int, ...], *, is_new: bool = False) -> list[Change]:
        whole = tuple(self._num_read)
        was_end, self._runs[node] = not is_new and self._runs[node] == whole, runs
        is_end = runs == whole
        return [] if was_end == is_end else self._count(node, 1 if is_end else -1)

    def _count(self, node: int | None, change: int) -> list[Change]:
        """A node has one more reason to count, or one less; so has its parent if it is the first, or was the last."""
        changes = list[Change]()
        while node is not None:
            before = self._num_reasons[node]
            self._num_reasons[node] = before + change
            if bool(before) == bool(before + change):
                break
            changes.append((self.blocks[node], self.tiers[node], change > 0))
            node = self._parents[node]
        return changes
