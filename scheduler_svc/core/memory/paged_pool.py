"""Pools whose blocks hold pages of several KV groups, and the moves of these pages.

A block has its pages of the group without a window from when it is taken until it is unused. It has its pages of a
window group while somebody holds it in that window: `window_tables` says who. Pages of a cached block stay when nobody
holds it in the window any more, until they are needed: with them a prefix that ends there is a hit
(docs/decisions/0063). So do those of a copy of a state, which only cached blocks have: its *snapshot*. It counts here
as one more window group, the last one (docs/decisions/0071).

States of sequences, and copies that are still to be made, have pages of the pool too, beside all blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from itertools import chain

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.kv_groups import GroupSizes
from scheduler_svc.core.memory.block_pool import BlockPool

_WindowBlock = tuple[int, int]
"""Window group and block."""
Pages = tuple[int, ...]
BlockPages = tuple[Pages, ...]
"""Pages of a block: in the group without a window, in each window group, of its snapshot; empty where it has none."""


class PagedPool(BlockPool):
    """A `BlockPool` over pages 0 to num_pages - 1, which are what runs short."""

    def __init__(self, num_pages: int, num_blocks: int, sizes: GroupSizes) -> None:
        """num_blocks: more than can be held at once."""
        super().__init__(num_blocks)
        self.block_pages = sizes.full_pages
        self._num_pages = num_pages
        self._sizes = sizes
        self._extra_pages = sizes.extra_pages
        self._unused_pages = list(range(num_pages - 1, -1, -1))
        self._freed = set[int]()
        """Unused pages that have been in use since `take_freed`."""
        self._full: list[tuple[int, ...]] = [()] * num_blocks
        self.windows: list[dict[int, Pages]] = [{} for _ in self._extra_pages]
        """By window group: the pages of the blocks that are in the window of a holder, or are cached with them."""
        self.window_refs: list[dict[int, int]] = [{} for _ in self._extra_pages]
        """By window group: the number of these holders, by block; without one, the pages are idle."""
        self.num_window_changes = 0
        """Grows whenever a cached block loses idle pages of a window, or gets a snapshot."""
        self._spare: OrderedDict[_WindowBlock, None] = OrderedDict()
        """Idle pages of windows that a sequence has only passed, the oldest first: they go before all else."""
        self._kept: OrderedDict[_WindowBlock, int] = OrderedDict()
        """The others, the oldest first, each with the moment since when it is idle."""
        self._num_idle_pages = 0
        """Of windows."""
        self._idle_since = [0] * num_blocks
        """By idle block, its moment."""
        self._moment = 0
        self.states: set[Pages] = set()
        """The states of sequences, and the pages of copies that are not snapshots yet."""
        self.loose: OrderedDict[Pages, object] = OrderedDict()
        """Of these, the copies of released slots, the oldest first, each with whom to ask for it: free if needed."""
        self.note_windows: Callable[[int], None] = lambda node: None
        """Called when the block of this node, which is cached, gets or loses pages of a window."""

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Number of pages that are unused, or would be without idle blocks and loose copies."""
        return len(self._unused_pages) + self.num_idle_pages + len(self.loose) * self._sizes.state_pages

    @property
    def num_idle_pages(self) -> int:
        return self.num_idle * self.block_pages + self._num_idle_pages

    @property
    def unused_pages(self) -> list[int]:
        """Pages of no block."""
        return self._unused_pages

    @property
    def num_unused(self) -> int:
        """Number of blocks that can be taken without an eviction."""
        num_blocks = super().num_unused
        return min(num_blocks, len(self._unused_pages) // self.block_pages) if self.block_pages else num_blocks

    def full_pages_of(self, block_id: int) -> tuple[int, ...]:
        """The pages of a block in the group without a window."""
        return self._full[block_id]

    def pages_of(self, block_id: int) -> BlockPages:
        """The pages of a block in every group."""
        return self._full[block_id], *(pages.get(block_id, ()) for pages in self.windows)

    def num_pages_of(self, block_ids: Collection[int]) -> int:
        num_pages = len(block_ids) * self.block_pages
        for group, refs in zip(self._sizes.windows, self.window_refs, strict=False):
            num_pages += group.pages_per_block * sum(block_id in refs for block_id in block_ids)
        return num_pages

    def take(self, count: int) -> list[int]:
        taken = super().take(count)
        if self.block_pages:
            for block_id in taken:
                self._full[block_id] = self._take_pages(self.block_pages)
        return taken

    def drop(self, block_ids: Iterable[int]) -> None:
        before, block_ids = len(self._unused), list(block_ids)
        super().drop(block_ids)
        self._free_full(before)
        for block_id in block_ids if self.cached else ():
            self._idle_since[block_id] = self._moment
        self._moment += 1

    def uncache(self, block_id: int) -> int:
        before = len(self._unused)
        node = super().uncache(block_id)
        self._drop_idle_windows(block_id)
        self._free_full(before)
        return node

    @property
    def oldest(self) -> int:
        """The idle block that is evicted next."""
        return next(iter(self._idle))

    def evict(self) -> tuple[int, int]:
        before = len(self._unused)
        block_id, node = super().evict()
        self._drop_idle_windows(block_id)
        self._free_full(before)
        return block_id, node

    def hold_window(self, group: int, block_id: int) -> None:
        """Add a holder of a block in a window group; the first one takes its pages, if it has none."""
        refs = self.window_refs[group]
        refs[block_id] = refs.get(block_id, 0) + 1
        if refs[block_id] == 1:
            if block_id in self.windows[group]:
                self._wake((group, block_id))
            else:
                self._add_window(group, block_id)

    def leave_window(self, group: int, block_id: int, *, is_spare: bool = False) -> bool:
        """Remove a holder of a block in a window group; True: it was the last, and its pages are free.

        Those of a cached block are idle. is_spare: a hit that ends here is unlikely.
        """
        refs = self.window_refs[group]
        refs[block_id] -= 1
        if refs[block_id]:
            return False
        del refs[block_id]
        if block_id in self.cached:
            self._rest((group, block_id), is_spare=is_spare)
        else:
            self._free_pages(self.windows[group].pop(block_id))
        return True

    def add_idle_window(self, group: int, block_id: int) -> None:
        """Take pages for a cached block in a window group; nobody holds them."""
        self._add_window(group, block_id)
        self._rest((group, block_id), is_spare=False)

    def evict_window(self) -> bool:
        """Free the idle pages of a block in one window group; False: an idle block is to be evicted before others.

        Spare ones first, then the oldest, as long as no block is idle for as long.
        """
        if self._spare:
            group, block_id = next(iter(self._spare))
        else:
            key, since = next(iter(self._kept.items()), (None, 0))
            if key is None or (self._idle and self._idle_since[self.oldest] <= since):
                return False
            group, block_id = key
        self._drop_idle_window(group, block_id)
        self.num_window_changes += 1
        self.note_windows(self.cached[block_id])
        return True

    def take_state(self) -> Pages:
        """Take the pages of a state, which must be unused."""
        pages = self._take_pages(self._sizes.state_pages)
        self.states.add(pages)
        return pages

    def free_state(self, pages: Pages) -> None:
        """Free the pages of a state."""
        self.states.remove(pages)
        self._free_pages(pages)

    def free_loose(self) -> bool:
        """Free the oldest loose copy of a state; False: there is none."""
        if not self.loose:
            return False
        self.free_state(self.loose.popitem(last=False)[0])
        return True

    def add_snapshot(self, block_id: int, pages: Pages) -> None:
        """Let a cached block without a snapshot have this copy of a state; it is idle."""
        self.states.remove(pages)
        self.set_snapshot(block_id, pages)

    def set_snapshot(self, block_id: int, pages: Pages) -> None:
        """As `add_snapshot`, of pages that another block had."""
        group = len(self.windows) - 1
        self.windows[group][block_id] = pages
        self._rest((group, block_id), is_spare=False)
        self.num_window_changes += 1
        self.note_windows(self.cached[block_id])

    def pop_snapshot(self, block_id: int) -> Pages:
        """Take away the idle snapshot of a block, for another one."""
        group = len(self.windows) - 1
        self._wake((group, block_id))
        return self.windows[group].pop(block_id)

    def renew(self, group: int, block_id: int) -> None:
        """Idle pages of a window count as held until now."""
        if (group, block_id) in self._kept:
            del self._kept[group, block_id]
            self._kept[group, block_id] = self._moment

    def is_kept(self, group: int, block_id: int) -> bool:
        """Whether a block has idle pages in a window group that are not spare."""
        return (group, block_id) in self._kept

    def _add_window(self, group: int, block_id: int) -> None:
        self.windows[group][block_id] = self._take_pages(self._extra_pages[group])
        if block_id in self.cached:
            self.note_windows(self.cached[block_id])

    def _rest(self, key: _WindowBlock, *, is_spare: bool) -> None:
        if is_spare:
            self._spare[key] = None
        else:
            self._kept[key] = self._moment
        self._num_idle_pages += self._extra_pages[key[0]]

    def _wake(self, key: _WindowBlock) -> None:
        if self._kept.pop(key, None) is None:
            del self._spare[key]
        self._num_idle_pages -= self._extra_pages[key[0]]

    def _drop_idle_windows(self, block_id: int) -> None:
        for group, (of_blocks, refs) in enumerate(zip(self.windows, self.window_refs, strict=True)):
            if block_id in of_blocks and block_id not in refs:
                self._drop_idle_window(group, block_id)

    def _drop_idle_window(self, group: int, block_id: int) -> None:
        self._wake((group, block_id))
        self._free_pages(self.windows[group].pop(block_id))

    def _take_pages(self, count: int) -> tuple[int, ...]:
        if count > len(self._unused_pages):
            raise InvariantError(f"{count} pages needed, {len(self._unused_pages)} unused")
        split = len(self._unused_pages) - count
        taken = tuple(self._unused_pages[: split - 1 if split else None : -1])
        del self._unused_pages[split:]
        self._freed.difference_update(taken)
        return taken

    def _free_pages(self, pages: Pages) -> None:
        self._unused_pages += pages[::-1]
        self._freed.update(pages)

    def take_freed(self) -> list[int]:
        """The unused pages that have been in use since the last call, for watches of steps."""
        freed, self._freed = sorted(self._freed), set()
        return freed

    def _free_full(self, first: int) -> None:
        """Free the pages of the blocks that have become unused: those from `first` on in the list of unused ones.

        They stay named: an evicted block may still be swapped out.
        """
        for block_id in self._unused[first:]:
            self._free_pages(self._full[block_id])

    def check_integrity(self, holders: dict[int, int]) -> None:
        super().check_integrity(holders)
        pages = list(self._unused_pages)
        held = [block_id for block_id, number in holders.items() if number]
        pages += chain.from_iterable(self._full[block_id] for block_id in self.cached.keys() | held)
        pages += chain.from_iterable(self.states)
        if not self.loose.keys() <= self.states:
            raise InvariantError("a loose copy of a state has no pages")
        idle = set[_WindowBlock]()
        for number, num_pages in enumerate(self._extra_pages):
            of_blocks, refs = self.windows[number], self.window_refs[number]
            if not refs.keys() <= of_blocks.keys() or not all(refs.values()):
                raise InvariantError(f"window group {number}: holders without pages, or no holders")
            if any(not self.ref_counts[block_id] for block_id in refs):
                raise InvariantError(f"window group {number}: an unused block is held")
            if any(len(each) != num_pages for each in of_blocks.values()):
                raise InvariantError(f"window group {number}: a block lacks pages")
            idle |= {(number, block_id) for block_id in of_blocks.keys() - refs.keys()}
            pages += chain.from_iterable(of_blocks.values())
        if idle != self._spare.keys() | self._kept.keys() or len(idle) != len(self._spare) + len(self._kept):
            raise InvariantError("pages of windows are idle and held, or neither")
        if any(block_id not in self.cached for _, block_id in idle):
            raise InvariantError("a block that is not cached has idle pages of a window")
        if self._num_idle_pages != sum(self._extra_pages[number] for number, _ in idle):
            raise InvariantError("the idle pages of windows are miscounted")
        if sorted(pages) != list(range(self._num_pages)):
            raise InvariantError("a page has no role, or several")
