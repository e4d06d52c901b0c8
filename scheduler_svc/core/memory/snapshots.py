"""Copies of states that executors make as sequences go on, until the prefix cache has them.

A copy is armed with pages in a plan, made by a step when the state comes by, and named by that step's result. Only then
may it be found: it becomes the snapshot of the cached block that ends at its position. If the sequence's slot is
released before, the copy may still have been made by plans that were sent: its pages are loose until their results are
in, and go to whoever needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from scheduler_svc.core.memory.paged_pool import Pages
from scheduler_svc.core.memory.paged_tiers import PagedTiers

_LOST = -1
"""In place of a node that was removed before it was known."""


class CachesBlocks(Protocol):
    """What copies are made of: a sequence with blocks in the prefix cache."""

    num_cached_blocks: int
    cache_node: int | None
    block_ids: list[int]


class PendingSave:
    """A copy of a sequence's state at one position."""

    __slots__ = ("is_made", "last_step_id", "node", "num_blocks", "pages", "sequence", "slot")

    def __init__(self, sequence: CachesBlocks, slot: int, num_blocks: int, pages: Pages) -> None:
        self.sequence = sequence
        self.slot = slot
        self.num_blocks = num_blocks
        """Its position, in blocks."""
        self.pages = pages
        self.node: int | None = None
        """The prefix cache node that ends there, perhaps removed by now; None: not known yet."""
        self.is_made = False
        """Whether a result has named it."""
        self.last_step_id: int | None = None
        """The last step that may make it, once its slot is released."""


class Snapshots:
    """The copies that are armed or made and not cached yet; the device pool has those that are cached."""

    def __init__(self, tiers: PagedTiers, block_size: int) -> None:
        self._tiers = tiers
        self._size = block_size
        self._number = len(tiers.device.windows) - 1
        self._by_key: dict[tuple[int, int], PendingSave] = {}
        """By slot and number of blocks: those that no result has named."""
        self._of: dict[CachesBlocks, list[PendingSave]] = {}
        """Of sequences whose slots are not released."""
        self._released: dict[PendingSave, None] = {}
        """Of released slots, the oldest first; those that are not loose any more have lost their pages."""

    @property
    def pages(self) -> Iterator[Pages]:
        """The pages of all copies."""
        yield from (save.pages for saves in self._of.values() for save in saves)
        yield from self._tiers.device.loose

    def of(self, sequence: CachesBlocks) -> list[PendingSave]:
        """The copies of a sequence whose slot is not released, in the order of positions."""
        return self._of.get(sequence, [])

    def has(self, block_id: int) -> bool:
        """Whether a block has a snapshot."""
        return block_id in self._tiers.device.windows[self._number]

    def is_armed(self, slot: int, num_blocks: int) -> bool:
        """Whether a copy is to be made."""
        return (slot, num_blocks) in self._by_key

    def arm(self, sequence: CachesBlocks, slot: int, num_blocks: int) -> Pages:
        """Take pages for a copy of a sequence's state behind so many blocks; returns them."""
        pages = self._tiers.take_state(self._tiers.device)
        self._by_key[slot, num_blocks] = save = PendingSave(sequence, slot, num_blocks, pages)
        self._of.setdefault(sequence, []).append(save)
        self.note_nodes(sequence)
        return pages

    def note_nodes(self, sequence: CachesBlocks) -> None:
        """The first blocks of a sequence are cached: copies that end there are of their nodes."""
        saves, cache = self._of.get(sequence, ()), self._tiers.cache
        for save in list(saves):
            if save.node is None and save.num_blocks <= sequence.num_cached_blocks:
                node = sequence.cache_node
                for _ in range(sequence.num_cached_blocks - save.num_blocks):
                    node = None if node is None else cache.parent_node(node)
                # The pages stay until the executor has written to them, whatever becomes of the node.
                save.node = _LOST if node is None else node
                if save.is_made:
                    self._end(save)

    def take_made(self, slot: int, position: int) -> Pages:
        """A result names a copy; returns its pages, none if it was given up."""
        save = self._by_key.pop((slot, position // self._size), None)
        if save is None:
            return ()
        save.is_made = True
        if save.last_step_id is not None:
            del self._released[save]
            if self._tiers.device.loose.get(save.pages) is save:
                del self._tiers.device.loose[save.pages]
                self._cache(save)
        elif save.node is not None:
            self._end(save)
        return save.pages

    def release(self, sequence: CachesBlocks, last_step_id: int) -> None:
        """The slot of a sequence is released: steps after this one make none of its copies."""
        for save in self._of.pop(sequence, ()):
            if save.node is None:
                self._by_key.pop((save.slot, save.num_blocks), None)
                self._tiers.device.free_state(save.pages)
            else:
                save.last_step_id = last_step_id
                self._tiers.device.loose[save.pages] = save
                self._released[save] = None

    def pass_step(self, step_id: int) -> None:
        """The result of a step is in: loose copies that it and those before have not made will not be."""
        device = self._tiers.device
        for save in list(self._released):
            if save.last_step_id is not None and save.last_step_id > step_id:
                return
            del self._released[save], self._by_key[save.slot, save.num_blocks]
            if device.loose.get(save.pages) is save:
                del device.loose[save.pages]
                device.free_state(save.pages)

    def clear(self) -> None:
        """The executor has forgotten all that was armed."""
        for pages in list(self.pages):
            self._tiers.device.loose.pop(pages, None)
            self._tiers.device.free_state(pages)
        self._by_key.clear()
        self._of.clear()
        self._released.clear()

    def last_of(self, sequence: CachesBlocks) -> int:
        """Number of leading blocks of a sequence's table up to the last that is cached with a snapshot; 0: there is
        none."""
        snapshots, table = self._tiers.device.windows[self._number], sequence.block_ids
        ends = (end for end in range(sequence.num_cached_blocks, 0, -1) if table[end - 1] in snapshots)
        return next(ends, 0)

    def renew_last(self, sequence: CachesBlocks) -> None:
        """The last snapshot of a sequence that ends counts as held until now, as its blocks do: others go before."""
        if end := self.last_of(sequence):
            self._tiers.device.renew(self._number, sequence.block_ids[end - 1])

    def _end(self, save: PendingSave) -> None:
        """Take a copy that was made from its sequence."""
        saves = self._of[save.sequence]
        saves.remove(save)
        if not saves:
            del self._of[save.sequence]
        self._cache(save)

    def _cache(self, save: PendingSave) -> None:
        """Let the cached block at the copy's position have it, if it is on the device and has none."""
        cache, device = self._tiers.cache, self._tiers.device
        place = cache.place(save.node) if save.node is not None and save.node in cache else -1
        if save.is_made and place >= 0 and not self.has(place):
            device.add_snapshot(place, save.pages)
        else:
            device.free_state(save.pages)
