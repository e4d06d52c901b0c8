"""Rows, the pools as a model that knows what every block holds, and what must be true of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace

from scheduler_svc.core.kv_groups import KVGroup, group_sizes
from scheduler_svc.core.memory.block_manager import BlockManager
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.memory.prefix_cache import CachedPrefix
from scheduler_svc.core.memory.rates import MeasuredRates
from scheduler_svc.core.sequences.shared_blocks import SharedBlocks
from scheduler_svc.core.types import RequestSpec
from tests.helpers.core.state_books import StateBooks

STOP = 9
MAX_CHUNK = 12
"""The most tokens of a row in one step."""


@dataclass(frozen=True)
class Group:
    spec: RequestSpec
    adapter_hash: bytes = b""
    sequences: list[Row] = field(default_factory=list)


@dataclass(eq=False)
class Row:
    """A sequence as the block manager sees one, and what is true of it: tokens not confirmed yet, KV that is there."""

    sequence_id: int
    group: Group
    token_ids: list[int]
    known: list[int] = field(default_factory=list)
    num_written: int = 0
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    cache_node: int | None = None
    needs_prompt_logprobs: bool = False
    is_beam: bool = False
    sample_index: int = 0
    shared_blocks: SharedBlocks | None = None
    windows: list[range] = field(default_factory=list)
    state_pages: tuple[int, ...] = ()
    prefix_ends: tuple[int, ...] = ()
    may_compute: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.group.spec.prompt_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        return self.token_ids[start:stop]

    def kv(self, position: int) -> tuple[str, bytes, bytes, tuple[int, ...]]:
        spec = self.group.spec
        return spec.tenant, spec.cache_salt, self.group.adapter_hash, tuple(self.known[: position + 1])

    @property
    def stopped(self) -> bool:
        return self.known[-1] == STOP


def make_rates(token_ns: int, block_ns: int) -> MeasuredRates:
    rates = MeasuredRates()
    rates.observe(100, 100, 100 * token_ns, 100 * block_ns)
    return rates


class BlockBooks(StateBooks):
    """The block manager, the model, and whoever holds blocks."""

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int,
        caching: bool,
        rates: tuple[int, int] | None,
        groups: tuple[KVGroup, ...] = (),
        state_pages: int = 0,
    ) -> None:
        """num_blocks: with their pages in all groups, and a few states besides."""
        super().__init__()
        self.sizes = group_sizes(groups, block_size, MAX_CHUNK, pages_per_state=state_pages)
        num_pages = 1 if self.sizes is None else self.sizes.block_pages
        self.num_pages = num_blocks * num_pages + 6 * state_pages
        self.num_host_pages = num_host_blocks * num_pages + 3 * state_pages * (num_host_blocks > 0)
        self.blocks = BlockManager(
            self.num_pages,
            block_size,
            0.0,
            num_host_blocks=self.num_host_pages,
            caching=caching,
            rates=make_rates(*rates) if rates else None,
            sizes=self.sizes,
            num_ids=1000,
        )
        self.size, self.caching = block_size, caching
        self.device = [[None] * block_size for _ in range(self.num_pages)]
        self.host = [[None] * block_size for _ in range(self.num_host_pages)]
        self._idle: tuple[set[tuple[int, int]], dict[tuple[int, int], int]] = set(), {}
        """Idle windows at the last check: those that were passed, and the others, each with the node of its block."""
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.swapped: list[Row] = []
        self.ended: list[Row] = []
        self.just_out: set[Row] = set()
        self.just_in = False
        self.num_made = self.num_queries = self.num_hits = 0

    def _pages(self, row: Row, index: int, pool: BlockPool) -> Iterator[tuple[int, Ids[int]]]:
        """By KV group, the pages that a row has of a block of its table; none where it holds none in a window."""
        block_id = (row.block_ids or row.host_block_ids)[index]
        if not isinstance(pool, PagedPool):
            yield 0, [block_id]
            return
        full, *in_windows = pool.pages_of(block_id)
        if full:
            yield 0, full
        for number, pages in enumerate(in_windows[: len(row.windows)]):
            yield 1 + number, pages if index in row.windows[number] else ()

    def _num_pages(self, rows: list[Row]) -> int:
        """Number of pages that these rows hold."""
        return len({page for row in rows for page in self._held_pages(row)})

    def _held_pages(self, row: Row) -> list[int]:
        table = row.block_ids or row.host_block_ids
        pool = self.blocks.host_pool if row.host_block_ids else self.blocks.pool
        pages = [page for index in range(len(table)) for _, pages in self._pages(row, index, pool) for page in pages]
        return [*pages, *row.state_pages]

    def check(self) -> None:
        self.blocks.check_integrity(self.running + self.swapped)
        holders = Counter(block_id for row in self.running for block_id in row.block_ids)
        assert self._num_pages(self.running) + self.blocks.num_free <= self.num_pages
        num_holders = self.blocks.pool.num_holders
        assert all(num_holders[block_id] >= count for block_id, count in holders.items())
        assert self.blocks.num_used_host == self._num_pages(self.swapped)
        assert (self.blocks.prefix_counts.num_queried, self.blocks.prefix_counts.num_hits) == (
            self.num_queries,
            self.num_hits,
        )
        assert not (self.blocks.num_cached and not self.caching)
        self._check_lookups()
        self._check_order()

    def _check_order(self) -> None:
        """Where prefixes end, windows outlive all that were only passed."""
        pool = self.blocks.pool
        if not isinstance(pool, PagedPool):
            return
        spare, kept = self._idle
        evicted = [
            key for key, node in kept.items() if pool.cached.get(key[1]) == node and key[1] not in pool.windows[key[0]]
        ]
        assert not evicted or not spare & pool._spare.keys()
        self._idle = set(pool._spare), {key: pool.cached[key[1]] for key in pool._kept}

    def _check_lookups(self) -> None:
        """What is remembered of a waiting sequence's lookup is what a first lookup finds."""
        for row in self.waiting:
            first = self.blocks.find_cached_prefix(replace(row, sequence_id=-1))
            self.blocks._lookups.forget(replace(row, sequence_id=-1))
            assert self.blocks.num_cached_tokens(row) == first.num_tokens
            assert self.blocks.find_cached_prefix(row) == first
            self._check_end(first, row)

    def _check_end(self, found: CachedPrefix, row: Row) -> None:
        """A hit ends at the last block behind which all is there that the next row reads."""
        if self.sizes is None or not found.num_queried:
            return
        cache, pool = self.blocks.tiers.cache, self.blocks.pool
        places = cache.places(self.blocks._lookups.nodes_of(row))
        if min(places, default=0) < 0 or not isinstance(pool, PagedPool):
            return
        ends = [0]
        for end in range(1, len(places) + 1):
            if self.sizes.state_pages and places[end - 1] not in pool.windows[-1]:
                continue
            firsts = [max(0, end * self.size - (group.window or 0) + 1) // self.size for group in self.sizes.windows]
            if all(place in pool.windows[number] for number, first in enumerate(firsts) for place in places[first:end]):
                ends.append(end)
        assert found.num_blocks == ends[-1]
        assert found.num_matched == (len(places) if self.sizes.extra_pages else 0)

    def _check_counts(self) -> None:
        """Between plans nothing but tables holds blocks."""
        holders = Counter(block_id for row in self.running for block_id in row.block_ids)
        assert self.blocks.num_free == self.num_pages - self._num_pages(self.running) - self.num_saving_pages
        num_holders = self.blocks.pool.num_holders
        assert num_holders == [holders[block_id] for block_id in range(len(num_holders))]
        assert self.blocks.num_shared_refs == holders.total() - len(holders)
        assert self.blocks.host_pool.num_free == self.num_host_pages - self.blocks.num_used_host

    def _check_contents(self) -> None:
        self._spoil()
        self.check_snapshots()
        for row in self.running:
            self.read_state(row, row.num_written)
        for rows, contents, pool in (
            (self.running, self.device, self.blocks.pool),
            (self.swapped, self.host, self.blocks.host_pool),
        ):
            for row in rows:
                for position in range(row.num_written):
                    for name, pages in self._pages(row, position // self.size, pool):
                        if name and position < row.num_computed_tokens - self._window(name) + 1:
                            continue
                        read = [contents[page][position % self.size] for page in pages]
                        assert read == [(name, strip, row.kv(position)) for strip in range(len(pages))] != []

    def _window(self, name: int) -> int:
        return (self.sizes.windows[name - 1].window or 0) if self.sizes is not None else 0

    def _spoil(self) -> None:
        """Whoever reads what nobody has fails."""
        if isinstance(self.blocks.pool, PagedPool):
            for page in self.blocks.pool.unused_pages:
                self.device[page] = [None] * self.size

    def close(self) -> None:
        """Once all have gone, every block is free."""
        for row in self.running + self.swapped:
            self.blocks.free(row)
            self.release(row)
        self.num_steps += 1
        if self.blocks.snapshots is not None:
            self.blocks.snapshots.pass_step(self.num_steps)
        self.blocks.take_moves()
        self.blocks.check_integrity([])
        assert (self.blocks.num_free, self.blocks.num_used_host) == (self.num_pages, 0)
