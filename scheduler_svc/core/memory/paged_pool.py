"""Pools whose blocks hold pages of several KV groups, and the moves of these pages.

A block has its pages of the group without a window from when it is taken until it is unused. It has its pages of a
window group while somebody holds it in that window: `window_tables` says who.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

from cadenza_common.plan.plan import BlockMoves
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.kv_groups import GroupSizes
from scheduler_svc.core.memory.block_moves import NO_MOVES, Moves
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.block_tiers import BlockTiers
from scheduler_svc.core.memory.rates import MeasuredRates

BlockPages = tuple[tuple[int, ...], ...]
"""Pages of a block: in the group without a window, then in each window group; empty where it has none."""


class PagedPool(BlockPool):
    """A `BlockPool` over pages 0 to num_pages - 1, which are what runs short."""

    def __init__(self, num_pages: int, num_blocks: int, sizes: GroupSizes) -> None:
        """num_blocks: more than can be held at once."""
        super().__init__(num_blocks)
        self.block_pages = sizes.full_pages
        self._num_pages = num_pages
        self._sizes = sizes
        self._unused_pages = list(range(num_pages - 1, -1, -1))
        self._full: list[tuple[int, ...]] = [()] * num_blocks
        self.windows: list[dict[int, tuple[int, ...]]] = [{} for _ in sizes.windows]
        """By window group: the pages of the blocks that are in the window of a holder."""
        self.window_refs: list[dict[int, int]] = [{} for _ in sizes.windows]
        """By window group: the number of these holders, by block."""

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Number of pages that are unused, or would be without idle blocks."""
        return len(self._unused_pages) + self.num_idle * self.block_pages

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
        return sum(len(pages) for block_id in block_ids for pages in self.pages_of(block_id))

    def take(self, count: int) -> list[int]:
        taken = super().take(count)
        if self.block_pages:
            for block_id in taken:
                self._full[block_id] = self._take_pages(self.block_pages)
        return taken

    def drop(self, block_ids: Iterable[int]) -> None:
        before = len(self._unused)
        super().drop(block_ids)
        self._free_full(before)

    def uncache(self, block_id: int) -> int:
        before = len(self._unused)
        node = super().uncache(block_id)
        self._free_full(before)
        return node

    def evict(self) -> tuple[int, int]:
        before = len(self._unused)
        evicted = super().evict()
        self._free_full(before)
        return evicted

    def hold_window(self, group: int, block_id: int) -> None:
        """Add a holder of a block in a window group; the first one takes its pages."""
        refs = self.window_refs[group]
        refs[block_id] = refs.get(block_id, 0) + 1
        if refs[block_id] == 1:
            self.windows[group][block_id] = self._take_pages(self._sizes.windows[group].pages_per_block)

    def leave_window(self, group: int, block_id: int) -> bool:
        """Remove a holder of a block in a window group; True: it was the last, and its pages are free."""
        refs = self.window_refs[group]
        refs[block_id] -= 1
        if refs[block_id]:
            return False
        del refs[block_id]
        self._unused_pages += self.windows[group].pop(block_id)[::-1]
        return True

    def _take_pages(self, count: int) -> tuple[int, ...]:
        if count > len(self._unused_pages):
            raise InvariantError(f"{count} pages needed, {len(self._unused_pages)} unused")
        split = len(self._unused_pages) - count
        taken = tuple(self._unused_pages[: split - 1 if split else None : -1])
        del self._unused_pages[split:]
        return taken

    def _free_full(self, first: int) -> None:
        """Free the pages of the blocks that have become unused: those from `first` on in the list of unused ones.

        They stay named: an evicted block may still be swapped out.
        """
        for block_id in self._unused[first:]:
            self._unused_pages += self._full[block_id][::-1]

    def check_integrity(self, holders: dict[int, int]) -> None:
        super().check_integrity(holders)
        pages = list(self._unused_pages)
        for block_id, count in enumerate(self.ref_counts):
            if count > 0 or block_id in self.cached:
                pages += self._full[block_id]
        for group, of_blocks, refs in zip(self._sizes.windows, self.windows, self.window_refs, strict=True):
            if of_blocks.keys() != refs.keys() or not all(refs.values()):
                raise InvariantError(f"KV group {group.index}: pages without a holder, or holders without pages")
            if any(not self.ref_counts[block_id] for block_id in of_blocks):
                raise InvariantError(f"KV group {group.index}: an unused block has pages")
            pages += chain.from_iterable(of_blocks.values())
        if sorted(pages) != list(range(self._num_pages)):
            raise InvariantError("a page has no role, or several")


class PagedTiers(BlockTiers):
    """`BlockTiers` over paged pools: what is moved of a block are the pages that it has on both sides."""

    device: PagedPool
    host: PagedPool

    def __init__(self, device: PagedPool, host: PagedPool, block_size: int, rates: MeasuredRates | None) -> None:
        super().__init__(device, host, block_size, rates)
        self._sources: dict[int, BlockPages] = {}
        """By device block that this plan copies or swaps to: the pages that its content comes from."""
        self._swapped: dict[int, BlockPages] = {}
        """By host block that this plan swaps out to: the pages that its content comes from."""
        self._kept: list[tuple[PagedPool, int, int]] = []
        """Windows of blocks that this plan reads from, held until it is complete: pool, group, block."""

    def copy(self, source: int, destination: int) -> None:
        moves = self.moves
        if source in moves.copies or source in moves.swap_ins:
            self._sources[destination] = self._sources[source]
        else:
            self._sources[destination] = self.device.pages_of(source)
            self._keep(self.device, source)
        super().copy(source, destination)

    def swap_out(self, block_id: int, host_block_id: int) -> None:
        is_copy = block_id in self.moves.copies
        self._swapped[host_block_id] = self._sources[block_id] if is_copy else self.device.pages_of(block_id)
        super().swap_out(block_id, host_block_id)

    def swap_in(self, host_block_id: int, block_id: int) -> None:
        self._sources[block_id] = self.host.pages_of(host_block_id)
        self._keep(self.host, host_block_id)
        super().swap_in(host_block_id, block_id)

    def swap_out_all(self, host_of: dict[int, int]) -> None:
        for block_id, host_block_id in host_of.items():
            self.swap_out(block_id, host_block_id)

    def swap_in_all(self, device_of: dict[int, int]) -> None:
        for host_block_id, block_id in device_of.items():
            self.swap_in(host_block_id, block_id)

    def take_moves(self) -> Moves:
        pending, device, host = self.moves, self.device, self.host
        if pending.is_empty:
            return NO_MOVES
        pages = Moves(
            _page_moves((self._swapped[to], host.pages_of(to)) for to in pending.swap_outs),
            _page_moves((self._sources[to], device.pages_of(to)) for to in pending.copies),
            _page_moves((self._sources[to], device.pages_of(to)) for to in pending.swap_ins),
        )
        for pool, group, block_id in self._kept:
            pool.leave_window(group, block_id)
        self._sources, self._swapped, self._kept = {}, {}, []
        moves = super().take_moves()
        return Moves(moves.swapped_out, moves.copied, moves.swapped_in, pages)

    def _keep(self, pool: PagedPool, block_id: int) -> None:
        for group, of_blocks in enumerate(pool.windows):
            if block_id in of_blocks:
                pool.hold_window(group, block_id)
                self._kept.append((pool, group, block_id))

    @property
    def kept(self) -> list[tuple[PagedPool, int, int]]:
        """What the plan being made holds in windows: pool, group, block."""
        return self._kept


def _page_moves(pairs: Iterable[tuple[BlockPages, BlockPages]]) -> BlockMoves:
    """The moves of pages: of groups in which both blocks have some."""
    sources: list[int] = []
    destinations: list[int] = []
    for from_pages, to_pages in pairs:
        for from_group, to_group in zip(from_pages, to_pages, strict=True):
            if from_group and to_group:
                sources += from_group
                destinations += to_group
    return BlockMoves(sources, destinations)


def make_tiers(
    num_pages: int, num_host_pages: int, block_size: int, rates: MeasuredRates | None, sizes: GroupSizes, num_ids: int
) -> PagedTiers:
    """Pools of so many pages; num_ids: the most blocks held at once in a pool where blocks may have no pages."""
    device, host = (
        PagedPool(count, count // sizes.full_pages if sizes.full_pages else num_ids, sizes)
        for count in (num_pages, num_host_pages)
    )
    return PagedTiers(device, host, block_size, rates)
