"""The device pool and the host pool together: allocation, moves between them, caching and eviction.

Blocks are freed at once: plans run in the order in which they are sent, so a plan that reuses a block runs after every
plan that could still access it. Only moves within one plan need care; they are recorded here.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.memory.block_moves import NO_MOVES, Moves, PendingMoves
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.prefix_cache import PrefixCache, host_place
from scheduler_svc.core.memory.rates import MeasuredRates
from scheduler_svc.core.sequences.shared_blocks import SharedBlocks


class BlockTiers:
    """Both pools, the prefix cache over them, and the moves of the plan being made.

    Without `rates` every move counts as cheaper than computing.
    """

    def __init__(self, device: BlockPool, host: BlockPool, block_size: int, rates: MeasuredRates | None) -> None:
        self.device = device
        self.host = host
        self.cache = PrefixCache()
        self.moves = PendingMoves()
        self._block_size = block_size
        self._rates = rates

    @property
    def num_used_host(self) -> int:
        """Number of host pages with holders, without those held only while this plan reads them."""
        counts = self.host.ref_counts
        only_read = [block_id for block_id in self.moves.quarantined if counts[block_id] == 1]
        return self.host.num_pages - self.host.num_free - self.host.num_pages_of(only_read)

    def take(self, count: int) -> list[int]:
        """Take device blocks, evicting idle ones if needed; raises InvariantError if too few are free."""
        num_short = count - self.device.num_unused
        if num_short > 0:
            self._evict(num_short)
        return self.device.take(count)

    def take_host(self, count: int) -> list[int]:
        """Take host blocks: unused ones, then the least recently used idle ones; raises InvariantError if too few."""
        num_unused = min(count, self.host.num_unused)
        taken = self.host.take(num_unused)
        for _ in range(min(count - num_unused, self.host.num_idle)):
            _, node = self.host.evict()
            self.cache.remove(node)
            taken += self.host.take(1)
        return taken + self.host.take(count - len(taken))

    def drop(self, block_ids: Iterable[int]) -> None:
        """Remove a holder from each device block; keeps this plan's copy sources, cancels moves to freed blocks."""
        moves, counts = self.moves, self.device.ref_counts
        if not (moves.copies or moves.swap_ins):
            # No move of this plan writes to a device block.
            self.device.drop(block_ids)
            return
        for block_id in block_ids:
            if counts[block_id] == 1 and block_id in moves.copy_sources and block_id not in moves.kept_sources:
                moves.kept_sources[block_id] = None
                continue
            self.device.drop((block_id,))
            if counts[block_id] == 0 and self.cancel(block_id):
                self.uncache(block_id)

    def drop_table(self, block_ids: list[int], shared: SharedBlocks | None) -> None:
        """Remove a sequence from the holders of its device blocks; `shared`: blocks that its group holds as one holder.

        The last block goes first, so that it is evicted before its parent.
        """
        if shared is None:
            self.drop(block_ids[::-1])
            return
        self.drop(block_ids[len(shared.block_ids) :][::-1])
        if self.device.leave(shared):
            self.drop(shared.block_ids[::-1])

    def drop_host_table(self, host_block_ids: list[int], shared: SharedBlocks | None) -> None:
        """Remove a sequence from the holders of its host blocks; cancels swap-outs to freed ones."""
        if shared is not None:
            if self.host.leave(shared):
                self._drop_host(shared.block_ids)
            host_block_ids = host_block_ids[len(shared.block_ids) :]
        self._drop_host(host_block_ids)

    def _drop_host(self, host_block_ids: list[int]) -> None:
        self.host.drop(host_block_ids)
        for host_block_id in host_block_ids if self.moves.swap_outs else ():
            if self.host.ref_counts[host_block_id] == 0:
                self.moves.swap_outs.pop(host_block_id, None)

    def copy(self, source: int, destination: int) -> None:
        """Record a copy of the content that a device block has when the plan computes."""
        self.moves.copy(source, destination)

    def swap_out(self, block_id: int, host_block_id: int) -> None:
        """Record a swap-out; raises InvariantError if this plan swaps the block in."""
        self.moves.swap_out(block_id, host_block_id)

    def swap_in(self, host_block_id: int, block_id: int) -> None:
        """Record a swap-in; raises InvariantError if this plan swaps the host block out."""
        self.moves.swap_in(host_block_id, block_id)

    def cancel(self, block_id: int) -> bool:
        """Cancel the move to a device block that lost its last holder; returns whether there was one."""
        return self.moves.cancel(block_id)

    def swap_out_all(self, host_of: dict[int, int]) -> None:
        """Record swap-outs, by device block: this plan swaps none of them in."""
        self.moves.swap_out_all(host_of)

    def swap_in_all(self, device_of: dict[int, int]) -> None:
        """Record swap-ins, by host block: this plan swaps none of them out."""
        self.moves.swap_in_all(device_of)

    def uncache(self, block_id: int) -> None:
        """Remove a device block from the prefix cache, if it is cached."""
        if block_id in self.device.cached:
            self.cache.remove(self.device.uncache(block_id))

    def remove_node(self, node: int) -> None:
        """Remove a node from the prefix cache."""
        place = self.cache.place(node)
        if place >= 0:
            self.device.uncache(place)
        else:
            self.host.uncache(host_place(place))
        self.cache.remove(node)

    def is_more_whole(self, block_id: int, node: int) -> bool:
        """Whether a held block has pages of windows that the block of a node with the same tokens lacks."""
        return False

    def replace(self, node: int, block_id: int) -> None:
        """Let a node name another device block with the same tokens, which is held and not cached."""
        place = self.cache.place(node)
        if place >= 0:
            self.device.uncache(place)
        else:
            self.host.uncache(host_place(place))
        self.cache.put(node, block_id)
        self.device.cache(block_id, node)

    def flush(self, most: int) -> int:
        """Remove at most so many nodes from the prefix cache, the latest first; returns how many it has removed."""
        nodes = self.cache.latest(most)
        for node in nodes:
            self.remove_node(node)
        return len(nodes)

    def remove_uncertain(self, first_node: int, block_ids: Iterable[int], host_block_ids: Iterable[int]) -> None:
        """Remove from the prefix cache the nodes from `first_node` on, and those of these device and host blocks."""
        nodes = self.cache.nodes_from(first_node)
        nodes += [self.device.cached[block_id] for block_id in block_ids if block_id in self.device.cached]
        nodes += [self.host.cached[block_id] for block_id in host_block_ids if block_id in self.host.cached]
        for node in dict.fromkeys(nodes):
            self.remove_node(node)

    def quarantine(self, host_block_ids: Iterable[int]) -> None:
        """Hold host blocks that this plan reads until the plan is complete."""
        more = [block_id for block_id in host_block_ids if block_id not in self.moves.quarantined]
        self.moves.quarantined.update(dict.fromkeys(more))
        self.host.share_all(more)

    def take_moves(self) -> Moves:
        """Close the plan: return its moves and release the blocks that were kept for it."""
        if self.moves.is_empty:
            return NO_MOVES
        moves, self.moves = self.moves, PendingMoves()
        self.device.drop(moves.kept_sources)
        self.host.drop(moves.quarantined)
        return moves.to_moves()

    def take_cached(self, nodes: tuple[int, ...], num_new: int) -> list[int]:
        """Take the blocks of these nodes, swapping in those on the host, and `num_new` other blocks.

        Raises InvariantError if too few are free, or if this plan swaps one of them out.
        """
        try:
            places = self.cache.places(nodes)
        except KeyError as exc:
            raise InvariantError(f"node {exc} has left the prefix cache") from exc
        counts, swap_outs = self.device.ref_counts, self.moves.swap_outs
        if min(places, default=0) >= 0:
            # Nothing is on the host. There may be 8,192 blocks: no Python call for each.
            num_idle = list(map(counts.__getitem__, places)).count(0)
            if (num_idle + num_new) * self.device.block_pages > self.device.num_free:
                raise InvariantError(f"{len(nodes)} cached blocks cannot be used, {self.device.num_free} are free")
            self.device.share_all(places)
            return places + self.take(num_new)
        num_host = sum(place < 0 for place in places)
        num_idle = sum(place >= 0 and counts[place] == 0 for place in places)
        too_many = (num_idle + num_host + num_new) * self.device.block_pages > self.device.num_free
        if too_many or any(host_place(place) in swap_outs for place in places):
            raise InvariantError(f"{len(nodes)} cached blocks cannot be used, {self.device.num_free} are free")
        # Shared first, so that none of them is evicted for another.
        for place in places:
            if place >= 0:
                self.device.share(place)
            else:
                self.quarantine((host_place(place),))
        taken = self.take(num_host + num_new)
        brought = iter(taken)
        for index, place in enumerate(places):
            if place < 0:
                places[index] = block_id = next(brought)
                self.swap_in(host_place(place), block_id)
                node = self.host.uncache(host_place(place))
                self.cache.put(node, block_id)
                self.device.cache(block_id, node)
        return places + taken[num_host:]

    def num_worth_using(self, places: list[int]) -> int:
        """Length of the prefix of `places` that saves the most time, given the cost of swapping in."""
        costs = None if self._rates is None else self._rates.costs
        if costs is None or min(places, default=0) >= 0:
            return len(places)
        ns_per_token, ns_per_block = costs[0], costs[1] * self.device.block_pages
        size = self._block_size
        best = num_host = 0
        for index, place in enumerate(places, 1):
            num_host += place < 0
            if not num_host or num_host * ns_per_block < (index - best) * size * ns_per_token:
                best, num_host = index, 0
        return best

    def check_integrity(self, holders: dict[int, int], host_holders: dict[int, int]) -> None:
        """Check that these holders (block id to number of holders), the cache and the moves are consistent."""
        self.device.check_integrity(holders)
        self.host.check_integrity(host_holders)
        places = [(node, block_id) for block_id, node in self.device.cached.items()]
        places += [(node, host_place(block_id)) for block_id, node in self.host.cached.items()]
        self.cache.check_integrity(places)
        self.moves.check_integrity(self.device.ref_counts)

    def _evict(self, count: int) -> None:
        """Evict idle device blocks; those worth swapping in later move to the host pool."""
        if count > self.device.num_idle:
            raise InvariantError(f"{count} more blocks needed than are unused, {self.device.num_idle} can be evicted")
        rates = self._rates
        pages = self.device.block_pages
        keeps = self.host.num_blocks > 0 and (rates is None or rates.swap_in_is_cheaper(self._block_size, pages))
        for _ in range(count):
            block_id, node = self.device.evict()
            if keeps and self.host.num_free >= self.host.block_pages and self.cache.is_reachable(node):
                (host_block_id,) = self.take_host(1)
                self.swap_out(block_id, host_block_id)
                self.cache.put(node, host_place(host_block_id))
                self.host.cache(host_block_id, node)
                self.host.drop((host_block_id,))
            else:
                self.cache.remove(node)
