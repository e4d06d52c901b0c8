"""The prefix cache over a block manager's pools: lookups before an admission, and the blocks that sequences add."""

from __future__ import annotations

from collections.abc import Container, Iterable

from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.block_tables import follow_first_sample
from scheduler_svc.core.memory.block_tiers import BlockTiers
from scheduler_svc.core.memory.hit_rule import HitRule
from scheduler_svc.core.memory.prefix_cache import NO_PREFIX, CachedPrefix, Key, Parent, pack_blocks
from scheduler_svc.core.memory.prefix_lookups import PrefixLookups, may_hit, root_of
from scheduler_svc.core.memory.snapshots import Snapshots
from scheduler_svc.core.sequences.sequence import Sequence


class CachedBlocks:
    """Cached blocks of both pools, by the tokens whose KV they hold."""

    def __init__(self, tiers: BlockTiers, block_size: int, *, caching: bool, rule: HitRule | None = None) -> None:
        """Without `caching` nothing is looked up or added. rule: where hits may end; None: at every block."""
        self.block_size = block_size
        self.caching = caching
        self.tiers = tiers
        self.pool: BlockPool = tiers.device
        self.snapshots: Snapshots | None = None
        """Copies of states that are being made for the prefix cache; None: there are no states, or no cache."""
        self._lookups = PrefixLookups(tiers, block_size, rule)

    def find_cached_prefix(self, sequence: Sequence) -> CachedPrefix:
        """Look up the longest cached prefix that a sequence may use; changes nothing.

        The last token is never included: it is computed in any case. Empty for requests that opted out or still need
        prompt logprobs. Host blocks are included as far as swapping them in costs less than computing. Use the result
        before other blocks are taken or swapped.
        """
        if not self.caching or not may_hit(sequence):
            return NO_PREFIX
        return self._lookups.find(sequence)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Number of tokens of the prefix that `find_cached_prefix` returns; 0 without a prefix cache."""
        return self._lookups.num_tokens(sequence) if self.caching and may_hit(sequence) else 0

    @property
    def cached(self) -> Container[Key]:
        """The blocks in the prefix cache."""
        return self.tiers.cache.present

    def look_up(self, sequence: Sequence, num_blocks: int) -> int:
        """Number of blocks of a waiting sequence's cached prefix, counted up to `num_blocks`.

        Nothing is looked up beyond. Fewer than `num_blocks`: `find_cached_prefix` takes little time now.
        """
        return self._lookups.look_up(sequence, num_blocks) if self.caching and may_hit(sequence) else 0

    def num_looked_up(self, sequence: Sequence) -> int:
        """Number of blocks of its cached prefix as of its last lookup; 0 if that is not remembered."""
        return self._lookups.num_known(sequence)

    def device_blocks_of(self, found: CachedPrefix) -> list[int]:
        """The device blocks of a found prefix."""
        return [place for place in map(self.tiers.cache.place, found.nodes) if place >= 0]

    @property
    def next_node(self) -> int:
        """The id of the prefix cache node that is added next. Ids ascend."""
        return self.tiers.cache.next_node

    def remove_uncertain(self, first_node: int, block_ids: Iterable[int], host_block_ids: Iterable[int]) -> None:
        """Remove blocks from the prefix cache whose KV plans without a result were to write.

        `first_node`: the first node that was added since the first of these plans; `block_ids`, `host_block_ids`: the
        destinations of their moves.
        """
        self.tiers.remove_uncertain(first_node, block_ids, host_block_ids)

    def invalidate(self, sequence: Sequence) -> None:
        """Remove the whole prefix of a sequence with invalid KV from the cache, including blocks that others cached."""
        for node in self._lookups.nodes_of(sequence) if self.caching else ():
            self.tiers.remove_node(node)
        self._lookups.forget(sequence)

    def cache_full_blocks(self, sequence: Sequence, *, computed_again: bool = False) -> None:
        """Add its full and computed blocks to the cache; no-op if its request opted out.

        Call it between plans, or before the plan being made schedules tokens. Content that is cached already keeps its
        first block; the sequence's own block is not cached. Unless that block lacks pages of windows and the own one,
        of a chunk that was `computed_again` for them, has these.
        """
        if not self.caching or not sequence.block_ids or not sequence.group.spec.uses_prefix_cache:
            return
        if sequence.sample_index:
            follow_first_sample(sequence, self.block_size)
        size, block_ids = self.block_size, sequence.block_ids
        # A token's KV is certain once another token follows: an executor does not compute the KV of a stop token.
        num_full = min(sequence.num_computed_tokens, sequence.num_tokens - 1) // size
        first, node = sequence.num_cached_blocks, sequence.cache_node
        if num_full <= first:
            return
        cache = self.tiers.cache
        if node is not None and node not in cache:
            # Its chain consisted of another sequence's blocks and was evicted: children of it would be unreachable.
            first, node = 0, None
        parent: Parent = root_of(sequence) if node is None else node
        for index, content in enumerate(pack_blocks(sequence.tokens(first * size, num_full * size), size), first):
            node = cache.find(parent, content)
            if node is None:
                # If the block is cached under another node, that node is unreachable: a lookup would have found it.
                self.tiers.uncache(block_ids[index])
                node = cache.add(parent, content, block_ids[index])
                self.pool.cache(block_ids[index], node)
            elif computed_again and self.tiers.is_more_whole(block_ids[index], node):
                self.tiers.replace(node, block_ids[index])
            parent = node
        sequence.num_cached_blocks, sequence.cache_node = num_full, node
        if self.snapshots is not None:
            self.snapshots.note_nodes(sequence)
