"""Block tables of sequences over a device pool and a host pool, with copy-on-write, swapping and a prefix cache.

Within a plan the executor moves blocks before it computes. So blocks that the plan being made writes to must not be
moved, cached or freed before `take_moves` closes that plan: preempt, allocate, schedule, take the moves, and only then
free the blocks of sequences that finish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Ids
from typing import cast

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.kv_groups import GroupSizes
from scheduler_svc.core.memory.block_moves import Moves
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.block_tables import (
    check_table,
    clear_tables,
    count_holders,
    device_tables,
    host_tables,
    is_shared_by_group,
    share_table,
    shared_of,
    stop_sharing,
)
from scheduler_svc.core.memory.block_tiers import BlockTiers
from scheduler_svc.core.memory.hit_rule import HitRule
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.memory.paged_tiers import make_tiers
from scheduler_svc.core.memory.prefix_cache import CachedPrefix, PrefixCounts
from scheduler_svc.core.memory.rates import MeasuredRates
from scheduler_svc.core.memory.state_tables import StateTables
from scheduler_svc.core.memory.swapped_blocks import SwappedBlocks
from scheduler_svc.core.memory.window_tables import WindowTables
from scheduler_svc.core.sequences.sequence import Sequence


class BlockManager(SwappedBlocks):
    """Allocates blocks to sequences and frees them. Sizes are in tokens unless stated in blocks.

    Without `caching` there is no prefix cache; without `rates` every move counts as cheaper than computing.
    `prefix_counts` are added to. What is free, taken or moved is counted in pages: without `sizes` a block is a page.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        watermark: float,
        *,
        num_host_blocks: int = 0,
        caching: bool = False,
        rates: MeasuredRates | None = None,
        prefix_counts: PrefixCounts | None = None,
        sizes: GroupSizes | None = None,
        num_ids: int = 0,
    ) -> None:
        """num_ids: as in `make_tiers`."""
        self.sizes = sizes
        self.prefix_counts = prefix_counts or PrefixCounts()
        self._num_watermark_blocks = int(watermark * num_blocks)
        self.block_pages = 1 if sizes is None else sizes.block_pages
        """Pages of a block that a sequence writes to next."""
        rule: HitRule | None = None
        if sizes is None:
            tiers = BlockTiers(BlockPool(num_blocks), BlockPool(num_host_blocks), block_size, rates)
        else:
            tiers = paged = make_tiers(num_blocks, num_host_blocks, block_size, rates, sizes, num_ids)
            rule = HitRule(paged, sizes) if sizes.extra_pages else None
            if sizes.windows:
                self.windows = WindowTables(paged, sizes)
            if paged.states is not None:
                self.states = StateTables(paged, paged.states, sizes.state_pages, block_size)
        super().__init__(tiers, block_size, caching=caching, rule=rule)
        self.snapshots = self.states.snapshots if self.states is not None and caching else None
        self.host_pool = tiers.host

    @property
    def num_free(self) -> int:
        """Number of device pages that can be taken: unused, or cached without holders."""
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Number of free device pages that are cached."""
        return self.pool.num_idle_pages

    @property
    def num_used_host(self) -> int:
        """Number of host pages held by swapped-out sequences."""
        return self.tiers.num_used_host

    @property
    def num_shared_refs(self) -> int:
        """Number of device blocks saved by sharing: sequences beyond the first of each block."""
        return self.pool.num_shared_refs

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def num_pages_for(self, num_blocks: int, chunk: int = 1) -> int:
        """Number of pages of so many blocks of a new table, to compute chunks of so many tokens."""
        return num_blocks if self.sizes is None else self.sizes.num_pages(num_blocks, chunk)

    def num_to_take(self, found: CachedPrefix, num_blocks: int, chunk: int = 0) -> int:
        """Number of free pages that a sequence of so many blocks takes with this prefix; chunk: as for `allocate`."""
        num_to_take, sizes = found.num_to_take(num_blocks), self.sizes
        if sizes is None:
            return num_to_take
        num_pages = num_to_take * sizes.full_pages
        places = self.tiers.cache.places(found.nodes)
        if self.windows is not None:
            num_pages += self.windows.num_to_open(places, num_blocks, chunk or sizes.max_chunk)
        return num_pages if self.states is None else num_pages + self.states.num_to_open(places)

    def num_pages_of(self, sequence: Sequence) -> int:
        """Number of pages of its state, and of its blocks that it or others hold."""
        return self.pool.num_pages_of(sequence.block_ids) + len(sequence.state_pages)

    def pages_of(self, block_ids: Ids[int]) -> Ids[int]:
        """The pages of device blocks in the group without a window."""
        if self.sizes is None:
            return block_ids
        pool = cast("PagedPool", self.pool)
        return [page for block_id in block_ids for page in pool.full_pages_of(block_id)]

    def can_take(self, num_pages: int, *, alone: bool, num_more: int = 0) -> bool:
        """Whether `num_pages` can be taken of the free ones and `num_more`; `alone` ignores the watermark."""
        reserve = 0 if alone else self._num_watermark_blocks
        return num_pages + reserve <= self.pool.num_free + num_more

    def take(self, count: int) -> list[int]:
        """Take free blocks, evicting cached ones if needed; raises InvariantError if there are too few.

        They are in no window.
        """
        return self.tiers.take(count)

    def extend(self, sequence: Sequence, count: int) -> list[int]:
        """Append so many blocks to its table; returns them. See `WindowTables.extend`."""
        taken, num_before = self.tiers.take(count), len(sequence.block_ids)
        sequence.block_ids += taken
        if self.windows is not None:
            self.windows.extend(sequence, num_before)
        return taken

    def open_state(self, sequence: Sequence) -> None:
        """Give a sequence without blocks the state that a later beam will have, if there are states."""
        if self.states is not None:
            self.states.open(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Give back what it holds in windows before its next row. Call it where `cache_full_blocks` may be called."""
        if self.windows is not None:
            if self.caching:
                self.cache_full_blocks(sequence)
            self.windows.give_back(sequence)

    def free_taken(self, block_ids: Ids[int]) -> None:
        """Free blocks that were taken and are in no block table."""
        self.tiers.drop(block_ids)

    def writes_only_own(self, sequence: Sequence) -> bool:
        """Whether no other holder has a block that the KV of its remaining tokens goes to."""
        first = sequence.num_computed_tokens // self.block_size
        if is_shared_by_group(sequence, first):
            return False
        return all(self.pool.ref_counts[block_id] == 1 for block_id in sequence.block_ids[first:])

    def num_missing(self, sequence: Sequence) -> int:
        """Number of blocks that it lacks for its tokens."""
        return max(0, self.num_blocks_for(sequence.num_tokens) - len(sequence.block_ids))

    def allocate(
        self,
        sequence: Sequence,
        num_tokens: int,
        *,
        found: CachedPrefix | None = None,
        source: Sequence | None = None,
        num_shared: int = 0,
        chunk: int = 0,
    ) -> None:
        """Allocate the blocks of the first `num_tokens` tokens to a sequence without blocks.

        The first blocks come from `found`, the result of `find_cached_prefix`, or are the first `num_shared` of
        `source`, another sequence of its group. With windows it is to compute chunks of `chunk` tokens; 0: of the most.
        Raises InvariantError if too few are free, or if the sequence has blocks already.
        """
        if sequence.block_ids or sequence.host_block_ids:
            raise InvariantError(f"sequence {sequence.sequence_id} has blocks already")
        num_blocks = -(-num_tokens // self.block_size)
        num_found = len(found.nodes) if found else 0
        num_new = num_blocks - num_found - num_shared
        if num_new < 0 or (num_shared and num_found):
            raise InvariantError(
                f"sequence {sequence.sequence_id} needs {num_blocks} blocks, not those that it is given"
            )
        if self.caching:
            self._lookups.forget(sequence)
        places = self.tiers.cache.places(found.nodes) if found and self.sizes is not None else []
        claim = None if self.states is None else self.states.claim(places)
        if found and num_found:
            if self.windows is not None:
                claimed = self.windows.claim(places)
            sequence.block_ids = self.tiers.take_cached(found.nodes, num_new)
            sequence.num_cached_blocks, sequence.cache_node = num_found, found.nodes[-1]
        else:
            taken = self.tiers.take(num_new)
            if source is not None and num_shared:
                share_table(self.pool, source, sequence, num_shared, self.block_size)
            sequence.block_ids += taken
            sequence.num_cached_blocks, sequence.cache_node = 0, None
        sequence.prefix_ends = (num_found, found.num_matched) if found and self.sizes is not None else ()
        if self.windows is not None and self.sizes is not None:
            chunk = chunk or self.sizes.max_chunk
            if num_found:
                self.windows.open_found(sequence, num_found, chunk)
                self.windows.end_claim(claimed)
            else:
                self.windows.open(sequence, num_shared, chunk)
        if self.states is not None:
            self.states.open(sequence, claim)
        if found and found.num_queried:
            self.prefix_counts.num_queried += found.num_queried
            self.prefix_counts.num_hits += found.num_tokens
            self.prefix_counts.num_host_hits += found.num_host * self.block_size

    def share_blocks(self, source: Sequence, child: Sequence, num_tokens: int, *, in_windows: bool = True) -> None:
        """Fork: share all blocks of `source` that hold the first `num_tokens` tokens with a child without blocks.

        Without `in_windows` the child holds none of them in windows: it waits for the source to compute them. Its state
        is its own: that which it has kept, or a new one.
        """
        num_blocks = self.num_blocks_for(num_tokens)
        if child.block_ids or child.host_block_ids or num_blocks > len(source.block_ids):
            raise InvariantError(f"sequence {child.sequence_id} cannot share {num_blocks} blocks")
        share_table(self.pool, source, child, num_blocks, self.block_size)
        if self.windows is not None:
            if in_windows:
                self.windows.share(source, child)
            else:
                child.windows = [range(0)] * self.windows.num_groups
        if self.states is not None and not child.state_pages:
            self.states.open(child)
        cache, node, num_cached = self.tiers.cache, source.cache_node, source.num_cached_blocks
        while node is not None and num_cached > num_tokens // self.block_size:
            node = cache.parent_node(node)
            num_cached -= 1
        child.cache_node, child.num_cached_blocks = node, num_cached if node is not None else 0

    def writes_shared(self, sequence: Sequence) -> bool:
        """Whether the block for the KV of its next token is shared with other holders or cached."""
        index = sequence.num_computed_tokens // self.block_size
        if index >= len(sequence.block_ids):
            return False
        return self.num_other_holders(sequence) > 0 or sequence.block_ids[index] in self.pool.cached

    def num_other_holders(self, sequence: Sequence) -> int:
        """Number of other holders of the block for the KV of its next token, which it has."""
        index = sequence.num_computed_tokens // self.block_size
        num_others = self.pool.ref_counts[sequence.block_ids[index]] - 1
        if is_shared_by_group(sequence, index) and sequence.shared_blocks is not None:
            num_others += sequence.shared_blocks.num_holders - 1
        return num_others

    def shares_unfilled(self, sequence: Sequence) -> bool:
        """Whether it shares a block that it has not filled: shared blocks are the first ones of its table."""
        index = sequence.num_computed_tokens // self.block_size
        return index < len(sequence.block_ids) and self.num_other_holders(sequence) > 0

    def make_writable(self, sequence: Sequence) -> int:
        """Copy-on-write of the block for its next token; returns the block that it has there now.

        A sole holder keeps its block, which leaves the cache. Raises InvariantError if it has no block there, or if
        the block is shared and no block is free.
        """
        index = sequence.num_computed_tokens // self.block_size
        if index >= len(sequence.block_ids):
            raise InvariantError(f"sequence {sequence.sequence_id} has no block for its next token")
        shared = sequence.shared_blocks
        if shared is not None and index < len(shared.block_ids):
            stop_sharing(self.pool, sequence, shared)
        block_id = sequence.block_ids[index]
        if self.pool.ref_counts[block_id] == 1:
            self.tiers.uncache(block_id)
            return block_id
        (own,) = self.tiers.take(1)
        self.tiers.copy(block_id, own)
        if self.windows is not None:
            self.windows.replace(sequence, index, own)
        sequence.block_ids[index] = own
        self.tiers.drop((block_id,))
        return own

    def free(self, sequence: Sequence, *, invalid_kv: bool = False, keeps_state: bool = False) -> None:
        """Free all blocks of a sequence, and cache its full ones; safe to call twice.

        With `invalid_kv` none of its blocks is cached or stays cached. With `keeps_state` it keeps the pages of its
        state.
        """
        if invalid_kv:
            for block_id in sequence.block_ids:
                self.tiers.uncache(block_id)
        else:
            self.cache_full_blocks(sequence)
        self._drop_others(sequence, keeps_state=keeps_state)
        if sequence.host_block_ids:
            self.tiers.drop_host_table(sequence.host_block_ids, sequence.shared_blocks)
        else:
            self.tiers.drop_table(sequence.block_ids, sequence.shared_blocks)
        clear_tables(sequence)

    def free_all(self, sequences: Collection[Sequence]) -> None:
        """Free all device blocks of sequences, one after the other as `free`; they have no others."""
        if self.caching:
            for sequence in sequences:
                self.cache_full_blocks(sequence)
        if self.sizes is not None:
            for sequence in sequences:
                self._drop_others(sequence)
        # Last first, as in `free`.
        self.tiers.drop([block_id for sequence in sequences for block_id in reversed(sequence.block_ids)])
        for sequence in sequences:
            sequence.block_ids = []
            sequence.num_cached_blocks, sequence.cache_node = 0, None

    def _drop_others(self, sequence: Sequence, *, keeps_state: bool = False) -> None:
        """Free what it has beside its blocks."""
        if self.windows is not None:
            self.windows.drop(sequence)
        if self.states is not None:
            if self.snapshots is not None and not sequence.host_block_ids:
                self.snapshots.renew_last(sequence)
            if not keeps_state:
                self.states.drop(sequence)

    def num_reserved(self, sequence: Sequence) -> int:
        """Number of blocks that it holds beyond those of its computed and known tokens."""
        present = max(sequence.num_computed_tokens, sequence.num_tokens)
        return max(0, len(sequence.block_ids) - self.num_blocks_for(present))

    def take_moves(self) -> Moves:
        """Close the plan: return the moves since the last call, and release the blocks that were kept for it."""
        return self.tiers.take_moves()

    def check_integrity(self, holders: Iterable[Sequence], reserved: Iterable[int] = ()) -> None:
        """Check that the tables of `holders`, all sequences with blocks, and `reserved` account for every block."""
        moves = self.tiers.moves
        on_device, on_hosts = Counter([*moves.kept_sources, *reserved]), Counter(moves.quarantined.keys())
        holders = list(holders)
        for sequence in holders:
            check_table(sequence, self.num_blocks_for(sequence.num_computed_tokens))
        for pool, counts, tables in (
            (self.pool, on_device, device_tables(each for each in holders if each.block_ids)),
            (self.host_pool, on_hosts, host_tables(each for each in holders if each.host_block_ids)),
        ):
            counts.update(count_holders(tables))
            if shared_of(tables) != {shared: shared.num_holders for shared in pool.shared}:
                raise InvariantError("the sequences that share blocks are miscounted")
        self.tiers.check_integrity(on_device, on_hosts)
        if self.windows is not None:
            self.windows.check_integrity(holders)
        if self.states is not None:
            self.states.check_integrity(
                each for each in holders if each.block_ids or each.host_block_ids or each.state_pages
            )
