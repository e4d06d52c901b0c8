"""The device pool and the host pool together where blocks have pages of several KV groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from cadenza_common.plan.plan import BlockMoves
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.kv_groups import GroupSizes
from scheduler_svc.core.memory.block_moves import NO_MOVES, Moves
from scheduler_svc.core.memory.block_tiers import BlockTiers
from scheduler_svc.core.memory.paged_pool import BlockPages, PagedPool, Pages
from scheduler_svc.core.memory.prefix_cache import host_place
from scheduler_svc.core.memory.rates import MeasuredRates
from scheduler_svc.core.memory.state_moves import PageMoves, StateMoves


class PagedTiers(BlockTiers):
    """`BlockTiers` over paged pools: what is moved of a block are the pages that it has on both sides."""

    device: PagedPool
    host: PagedPool

    def __init__(
        self, device: PagedPool, host: PagedPool, block_size: int, rates: MeasuredRates | None, sizes: GroupSizes
    ) -> None:
        super().__init__(device, host, block_size, rates)
        self._sizes = sizes
        self.states: StateMoves | None = StateMoves(device, host) if sizes.state_pages else None
        """Moves of states; None: sequences have none."""
        if sizes.extra_pages:
            self.cache.windows_at = self._windows_at
            device.note_windows = host.note_windows = self.cache.note_windows
        self._sources: dict[int, BlockPages] = {}
        """By device block that this plan copies or swaps to: the pages that its content comes from."""
        self._swapped: dict[int, BlockPages] = {}
        """By host block that this plan swaps out to: the pages that its content comes from."""
        self._kept: dict[int, list[tuple[PagedPool, int, int]]] = {}
        """By device block that this plan moves to: pool, group and block of the windows that it reads, which are held
        until the plan is complete."""

    @property
    def num_used_host(self) -> int:
        host = self.host
        num_pages = 0 if self.states is None else self.states.num_read(host) * self._sizes.state_pages
        kept = Counter((number, block_id) for pool, number, block_id in self.kept if pool is host)
        for (number, block_id), count in kept.items():
            # Without other holders of the block, all of its pages are left out already.
            if host.ref_counts[block_id] > 1 and host.window_refs[number][block_id] == count:
                num_pages += self._sizes.extra_pages[number]
        return super().num_used_host - num_pages

    def take(self, count: int) -> list[int]:
        device = self.device
        self.free_pages(device, count * device.block_pages)
        while device.num_unused < count:
            self._evict_block()
        return device.take(count)

    def take_host(self, count: int) -> list[int]:
        while self.host.num_unused < count:
            self._evict_on_host()
        return self.host.take(count)

    def hold_window(self, pool: PagedPool, group: int, block_id: int) -> None:
        """Add a holder of a block in a window group; evicts if pages are lacking."""
        if block_id not in pool.windows[group]:
            self.free_pages(pool, self._sizes.windows[group].pages_per_block)
        pool.hold_window(group, block_id)

    def take_state(self, pool: PagedPool) -> Pages:
        """Take the pages of a state in a pool; evicts if pages are lacking."""
        self.free_pages(pool, self._sizes.state_pages)
        return pool.take_state()

    def free_pages(self, pool: PagedPool, num_pages: int) -> None:
        """Evict until so many pages of a pool are unused; raises InvariantError if too few can be.

        Windows that were only passed go first. Then what has been idle longest: a window in the middle of longer
        prefixes, or a block with all that it has.
        """
        while len(pool.unused_pages) < num_pages:
            if pool is self.host:
                self._evict_on_host()
            elif not pool.evict_window() and (pool.num_idle or not pool.free_loose()):
                self._evict_block()

    def _evict_on_host(self) -> None:
        if self.host.num_idle:
            _, node = self.host.evict()
            self.cache.remove(node)
        elif not self.host.evict_window():
            raise InvariantError("more host pages needed than are free")

    def _evict_block(self) -> None:
        """Evict the oldest idle device block; if it is worth swapping in later, it moves to the host pool as a whole:
        with its pages of windows, unless they are spare."""
        device, host, rates = self.device, self.host, self._rates
        if not device.num_idle:
            raise InvariantError("more pages needed than are free")
        block_id = device.oldest
        pages = list(device.pages_of(block_id))
        groups = [number for number in range(len(device.windows)) if device.is_kept(number, block_id)]
        for number in range(len(device.windows)):
            if number not in groups:
                pages[1 + number] = ()
        _, node = device.evict()
        num_pages = sum(map(len, pages))
        keeps = num_pages and host.num_free >= num_pages and self.cache.is_reachable(node)
        keeps = keeps and (rates is None or rates.swap_in_is_cheaper(self._block_size, device.block_pages))
        if not keeps:
            self.cache.remove(node)
            return
        (host_block_id,) = self.take_host(1)
        self._swapped[host_block_id] = tuple(pages)
        super().swap_out(block_id, host_block_id)
        self.cache.put(node, host_place(host_block_id))
        host.cache(host_block_id, node)
        for number in groups:
            self.free_pages(host, len(pages[1 + number]))
            host.add_idle_window(number, host_block_id)
        host.drop((host_block_id,))

    def _windows_at(self, place: int) -> int:
        pool, block_id = (self.device, place) if place >= 0 else (self.host, host_place(place))
        return sum((block_id in of_blocks) << number for number, of_blocks in enumerate(pool.windows))

    def is_more_whole(self, block_id: int, node: int) -> bool:
        place = self.cache.place(node)
        if place == block_id or block_id in self.device.cached:
            return False
        every = (1 << len(self._sizes.windows)) - 1
        return self._windows_at(block_id) & every == every != self._windows_at(place) & every

    def replace(self, node: int, block_id: int) -> None:
        place, number = self.cache.place(node), len(self._sizes.windows)
        has_snapshot = self.states is not None and place in self.device.windows[number]
        if not has_snapshot or place in self.device.window_refs[number]:
            super().replace(node, block_id)
            return
        pages = self.device.pop_snapshot(place)
        super().replace(node, block_id)
        self.device.set_snapshot(block_id, pages)

    def copy(self, source: int, destination: int) -> None:
        moves = self.moves
        if source in moves.copies or source in moves.swap_ins:
            self._sources[destination] = self._sources[source]
            self._keep(destination, self._kept[source])
        else:
            self._sources[destination] = self.device.pages_of(source)
            self._keep(destination, self._windows_of(self.device, source))
        super().copy(source, destination)

    def swap_out(self, block_id: int, host_block_id: int) -> None:
        is_copy = block_id in self.moves.copies
        self._swapped[host_block_id] = self._sources[block_id] if is_copy else self.device.pages_of(block_id)
        super().swap_out(block_id, host_block_id)

    def swap_in(self, host_block_id: int, block_id: int) -> None:
        self._sources[block_id] = self.host.pages_of(host_block_id)
        self._keep(block_id, self._windows_of(self.host, host_block_id))
        super().swap_in(host_block_id, block_id)

    def cancel(self, block_id: int) -> bool:
        for pool, group, held in self._kept.pop(block_id, ()):
            pool.leave_window(group, held)
        return super().cancel(block_id)

    def swap_out_all(self, host_of: dict[int, int]) -> None:
        for block_id, host_block_id in host_of.items():
            self.swap_out(block_id, host_block_id)

    def swap_in_all(self, device_of: dict[int, int]) -> None:
        for host_block_id, block_id in device_of.items():
            self.swap_in(host_block_id, block_id)

    def take_moves(self) -> Moves:
        pending, device, host = self.moves, self.device, self.host
        if pending.is_empty and (self.states is None or self.states.is_empty):
            return NO_MOVES
        for host_block_id in [to for to in pending.swap_outs if not (host.ref_counts[to] or to in host.cached)]:
            # It is unused again, and its pages may be another block's.
            del pending.swap_outs[host_block_id]
        pages = Moves(
            _page_moves((self._swapped[to], host.pages_of(to)) for to in pending.swap_outs),
            _page_moves((self._sources[to], device.pages_of(to)) for to in pending.copies),
            _page_moves((self._sources[to], device.pages_of(to)) for to in pending.swap_ins),
        )
        for pool, group, block_id in self.kept:
            pool.leave_window(group, block_id)
        self._sources, self._swapped, self._kept = {}, {}, {}
        if self.states is not None:
            pages = _with_states(pages, self.states.take())
        moves = super().take_moves()
        return Moves(moves.swapped_out, moves.copied, moves.swapped_in, pages)

    def _keep(self, destination: int, windows: Iterable[tuple[PagedPool, int, int]]) -> None:
        self._kept[destination] = kept = list(windows)
        for pool, group, block_id in kept:
            pool.hold_window(group, block_id)

    @property
    def kept(self) -> list[tuple[PagedPool, int, int]]:
        """What the plan being made holds in windows: pool, group, block."""
        return list(chain.from_iterable(self._kept.values()))

    def _windows_of(self, pool: PagedPool, block_id: int) -> Iterator[tuple[PagedPool, int, int]]:
        numbers = range(len(self._sizes.windows))
        return ((pool, number, block_id) for number in numbers if block_id in pool.windows[number])


def _with_states(pages: Moves, states: tuple[PageMoves, PageMoves, PageMoves]) -> Moves:
    """Moves of pages, with those of states behind them."""
    swapped_out, copied, swapped_in = (
        BlockMoves([*moves.sources, *sources], [*moves.destinations, *destinations])
        for moves, (sources, destinations) in zip(
            (pages.swapped_out, pages.copied, pages.swapped_in), states, strict=True
        )
    )
    return Moves(swapped_out, copied, swapped_in)


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
    return PagedTiers(device, host, block_size, rates, sizes)
