"""Lookups of waiting sequences in the prefix cache, kept up to date by change.

A group that waits at the head of the queue is looked up in every plan, and in every lane when it arrives. Its chain of
nodes can be long: 8,192 blocks for 131,072 tokens. So a lookup is remembered. The next one reads which nodes were
removed or moved since, and tries to extend the chain at its end. What is counted over the chain is counted again only
after a change. A lookup without a change costs a constant number of operations.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import replace

from scheduler_svc.core.memory.block_tiers import BlockTiers
from scheduler_svc.core.memory.hit_rule import HitRule
from scheduler_svc.core.memory.prefix_cache import CachedPrefix, Key, Parent, host_place, pack_blocks
from scheduler_svc.core.sequences.sequence import Sequence

_MAX_LOOKUPS = 4096
_MAX_NODES = 262_144
"""Maximum number of nodes in all remembered lookups: about 6 MB. The least recently used lookups are dropped."""
_PIECE_GROWTH = 8
"""Tokens are packed piece by piece, each larger than the last: most lookups end at an early block."""


class _Lookup:
    """The longest cached prefix of one sequence."""

    __slots__ = (
        "found",
        "has_host_blocks",
        "nodes",
        "num_changes",
        "num_ended",
        "num_idle_changes",
        "num_rule_changes",
        "places",
    )

    def __init__(self, num_changes: int) -> None:
        self.nodes: list[int] = []
        """One for each block, first to last. Ids ascend, since a parent is older than its children."""
        self.places: list[int] = []
        self.has_host_blocks = False
        self.num_changes = num_changes
        """The changes of the cache that `nodes` and `places` take into account."""
        self.found: CachedPrefix | None = None
        """The last result, if no node has changed since, and no place is a host block."""
        self.num_idle_changes = 0
        """The changes of the device pool's idle blocks that `found` takes into account."""
        self.num_ended: int | None = None
        """With windows, the number of blocks behind which a sequence can go on; None: to be counted."""
        self.num_rule_changes = 0
        """The changes of the hit rule that it takes into account."""


class PrefixLookups:
    """Finds the longest cached prefixes of sequences, and remembers those of the sequences looked up last."""

    def __init__(self, tiers: BlockTiers, block_size: int, rule: HitRule | None = None) -> None:
        """rule: where hits may end; None: at every block."""
        self._tiers = tiers
        self._rule = rule
        self._block_size = block_size
        self._lookups: dict[int, _Lookup] = {}
        """By sequence id, the least recently used first."""
        self._num_nodes = 0

    def find(self, sequence: Sequence) -> CachedPrefix:
        """The longest cached prefix that is worth using, as BlockManager.find_cached_prefix states."""
        lookup, num_queried = self._refresh(sequence), sequence.num_tokens
        if self._rule is not None:
            self._num_usable(lookup)
        found, num_idle_changes = lookup.found, self._tiers.device.num_idle_changes
        if found is not None:
            if lookup.num_idle_changes != num_idle_changes:
                found = replace(found, num_idle=self._num_idle(lookup.places[: found.num_blocks]))
            if found.num_queried != num_queried:
                found = replace(found, num_queried=num_queried)
            lookup.found, lookup.num_idle_changes = found, num_idle_changes
            return found
        num_used = self._num_usable(lookup)
        used = lookup.places[:num_used]
        on_device = [place for place in used if place >= 0] if lookup.has_host_blocks else used
        found = CachedPrefix(
            nodes=tuple(lookup.nodes[:num_used]),
            num_tokens=num_used * self._block_size,
            num_queried=num_queried,
            num_idle=self._num_idle(on_device),
            num_host=num_used - len(on_device),
            num_matched=len(lookup.nodes) if self._rule is not None else 0,
        )
        if not lookup.has_host_blocks:
            lookup.found, lookup.num_idle_changes = found, num_idle_changes
        return found

    def num_tokens(self, sequence: Sequence) -> int:
        """Number of tokens of the prefix that `find` returns."""
        return self._num_usable(self._refresh(sequence)) * self._block_size

    def look_up(self, sequence: Sequence, num_blocks: int) -> int:
        """Number of blocks of its longest cached prefix, counted up to `num_blocks`, beyond which nothing is looked up.

        0 for a sequence whose lookup is not remembered.
        """
        return 0 if _is_replaced(sequence) else min(num_blocks, len(self._refresh(sequence, num_blocks).nodes))

    def num_known(self, sequence: Sequence) -> int:
        """Number of blocks in the remembered lookup of a sequence; 0: there is none."""
        lookup = self._lookups.get(sequence.sequence_id)
        return 0 if lookup is None else len(lookup.nodes)

    def nodes_of(self, sequence: Sequence) -> list[int]:
        """All nodes of its longest cached prefix."""
        return self._refresh(sequence).nodes.copy()

    def forget(self, sequence: Sequence) -> None:
        """Forget the lookup of a sequence that waits no longer."""
        lookup = self._lookups.pop(sequence.sequence_id, None)
        if lookup is not None:
            self._num_nodes -= len(lookup.nodes)

    def _num_idle(self, block_ids: list[int]) -> int:
        """Number of these device blocks without holders."""
        return list(map(self._tiers.device.ref_counts.__getitem__, block_ids)).count(0)

    def _num_usable(self, lookup: _Lookup) -> int:
        """Number of leading blocks that are worth using, and that the plan being made can use."""
        rule = self._rule
        if rule is None and not lookup.has_host_blocks:
            return len(lookup.places)
        num_usable = self._num_of_use(lookup)
        if rule is None:
            return num_usable
        if lookup.has_host_blocks:
            return rule.last_end(lookup.places, num_usable)
        if lookup.num_ended is None or lookup.num_rule_changes != rule.num_changes:
            lookup.num_ended, lookup.num_rule_changes = rule.last_end(lookup.places, num_usable), rule.num_changes
            lookup.found = None
        return lookup.num_ended

    def _num_of_use(self, lookup: _Lookup) -> int:
        if not lookup.has_host_blocks:
            return len(lookup.places)
        places, swap_outs = lookup.places, self._tiers.moves.swap_outs
        if swap_outs:
            # Blocks that this plan swaps out cannot be swapped in by it too.
            moving = (index for index, place in enumerate(places) if host_place(place) in swap_outs)
            places = places[: next(moving, len(places))]
        return self._tiers.num_worth_using(places)

    def _refresh(self, sequence: Sequence, most: int | None = None) -> _Lookup:
        """The lookup of a sequence as of now; it becomes the most recently used one.

        `most`: the most blocks to which it is extended; None: to its end.
        """
        key, cache = sequence.sequence_id, self._tiers.cache
        lookup = self._lookups.pop(key, None)
        if lookup is None:
            lookup = _Lookup(cache.num_changes)
        num_before = len(lookup.nodes)
        if lookup.num_changes != cache.num_changes:
            self._take_changes(lookup)
        if len(lookup.nodes) < (sequence.num_tokens - 1) // self._block_size:
            self._extend(lookup, sequence, most)
        if _is_replaced(sequence):
            self._num_nodes -= num_before
            return lookup
        self._lookups[key] = lookup
        self._num_nodes += len(lookup.nodes) - num_before
        if len(self._lookups) > _MAX_LOOKUPS or self._num_nodes > _MAX_NODES:
            self._drop_oldest()
        return lookup

    def _drop_oldest(self) -> None:
        """Drop lookups down to the limits, but not the last one."""
        while len(self._lookups) > 1 and (len(self._lookups) > _MAX_LOOKUPS or self._num_nodes > _MAX_NODES):
            oldest = next(iter(self._lookups))
            self._num_nodes -= len(self._lookups.pop(oldest).nodes)

    def _take_changes(self, lookup: _Lookup) -> None:
        """Cut the chain at its first removed node, and update the places of moved ones."""
        cache, nodes = self._tiers.cache, lookup.nodes
        changed = cache.changed_since(lookup.num_changes)
        lookup.num_changes = cache.num_changes
        # Finding one change by bisection takes as long as walking four nodes.
        if changed is None or 4 * len(changed) > len(nodes):
            present = sum(1 for _ in itertools.takewhile(cache.__contains__, nodes))
            places = cache.places(nodes[:present])
            if places != lookup.places:
                del nodes[present:]
                self._set_places(lookup, places)
            return
        places = lookup.places
        is_changed = False
        for node in changed:
            index = bisect_left(nodes, node)
            if index == len(nodes) or nodes[index] != node:
                continue
            is_changed = True
            if node in cache:
                places[index] = cache.place(node)
            else:
                del nodes[index:], places[index:]
        if is_changed:
            self._set_places(lookup, places)

    def _extend(self, lookup: _Lookup, sequence: Sequence, most: int | None) -> None:
        """Follow the chain from its end, without the last token, which is computed in any case."""
        cache, size, nodes = self._tiers.cache, self._block_size, lookup.nodes
        parent: Parent = nodes[-1] if nodes else root_of(sequence)
        first, num_blocks, num_before = len(nodes), (sequence.num_tokens - 1) // size, len(nodes)
        if most is not None:
            num_blocks = min(num_blocks, most)
        piece = 1
        while first < num_blocks:
            last = min(first + piece, num_blocks)
            more = cache.follow(parent, pack_blocks(sequence.tokens(first * size, last * size), size))
            nodes += more
            if len(more) < last - first:
                break
            first, parent, piece = last, nodes[-1], piece * _PIECE_GROWTH
        if len(nodes) > num_before:
            more_places = cache.places(nodes[num_before:])
            lookup.places += more_places
            lookup.has_host_blocks = lookup.has_host_blocks or min(more_places) < 0
            lookup.found = lookup.num_ended = None

    def _set_places(self, lookup: _Lookup, places: list[int]) -> None:
        lookup.places = places
        lookup.has_host_blocks = min(places, default=0) < 0
        lookup.found = lookup.num_ended = None


def _is_replaced(sequence: Sequence) -> bool:
    """Whether its tokens may be replaced: a beam can take another beam's tokens. Then its lookup is not remembered."""
    return sequence.is_beam and sequence.num_output_tokens > 0


def first_block(sequence: Sequence, block_size: int) -> Key | None:
    """Where the prefix cache of any executor has the first block of a sequence; None: no block of it can be used."""
    if sequence.num_tokens <= block_size or not may_hit(sequence):
        return None
    return root_of(sequence), pack_blocks(sequence.tokens(0, block_size), block_size)[0]


def may_hit(sequence: Sequence) -> bool:
    """Whether a sequence may use cached blocks."""
    return sequence.group.spec.uses_prefix_cache and not sequence.needs_prompt_logprobs


def root_of(sequence: Sequence) -> tuple[str, bytes, bytes]:
    """The root of the chains of a sequence in the prefix cache."""
    spec = sequence.group.spec
    owner = f"\0{spec.shared_prefixes}" if spec.shared_prefixes else spec.tenant
    return owner, spec.cache_salt, sequence.group.adapter_hash
