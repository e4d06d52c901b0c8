"""Device and host blocks under one roof: what is taken, moved between them, cached and evicted.

Blocks are freed at once: plans run in the order in which they are sent, so a later plan that uses a block again comes
after every plan that could still touch it. Within a plan only the moves recorded here need care.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.memory.block_moves import NO_MOVES, Moves, PendingMoves
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.prefix_cache import PrefixCache, on_host
from scheduler_svc.core.memory.rates import MeasuredRates


class BlockTiers:
    """Both pools, the prefix cache over them, and the moves of the plan in the making.

    Without `rates` every move counts as cheaper than computing.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int, rates: MeasuredRates | None) -> None:
        self.device = BlockPool(num_blocks)
        self.host = BlockPool(num_host_blocks)
        self.cache = PrefixCache()
        self.moves = PendingMoves()
        self._block_size = block_size
        self._rates = rates

    @property
    def num_used_host(self) -> int:
        """Host blocks that somebody holds, except those that are held only while this plan reads them."""
        counts = self.host.ref_counts
        num_read = sum(counts[block_id] == 1 for block_id in self.moves.quarantined)
        return self.host.num_blocks - self.host.num_free - num_read

    def take(self, count: int) -> list[int]:
        """Free device blocks; raises InvariantError if there are not as many. Evicts for it what is cached and idle."""
        num_short = count - self.device.num_unused
        if num_short > 0:
            self._evict(num_short)
        return self.device.take(count)

    def take_host(self) -> int:
        """A free host block, the least recently used cached one if all others are held."""
        if not self.host.num_unused and self.host.num_idle:
            _, node = self.host.evict()
            self.cache.forget(node)
        return self.host.take(1)[0]

    def drop(self, block_ids: Iterable[int]) -> None:
        """Take a holder of each device block away, but keep what this plan reads, and forget what it was to bring."""
        moves, counts = self.moves, self.device.ref_counts
        if not moves.fill_blocks:
            self.device.drop(block_ids)
            return
        for block_id in block_ids:
            if counts[block_id] == 1 and block_id in moves.copy_sources and block_id not in moves.kept_sources:
                moves.kept_sources[block_id] = None
                continue
            self.device.drop((block_id,))
            if counts[block_id] == 0 and moves.cancel(block_id):
                self.uncache(block_id)

    def drop_host(self, host_block_ids: list[int]) -> None:
        """Take a holder of each host block away; nothing is swapped out to one without holders."""
        self.host.drop(host_block_ids)
        for host_block_id in host_block_ids:
            if self.host.ref_counts[host_block_id] == 0:
                self.moves.out_to.pop(host_block_id, None)

    def uncache(self, block_id: int) -> None:
        """Let nobody find this device block, if it is cached."""
        if block_id in self.device.cached:
            self.cache.forget(self.device.uncache(block_id))

    def forget(self, node: int) -> None:
        """Let nobody find this node."""
        place = self.cache.place(node)
        if place >= 0:
            self.device.uncache(place)
        else:
            self.host.uncache(on_host(place))
        self.cache.forget(node)

    def quarantine(self, host_block_id: int) -> None:
        """Hold a host block, which this plan reads, until the plan is complete."""
        if host_block_id not in self.moves.quarantined:
            self.moves.quarantined[host_block_id] = None
            self.host.share(host_block_id)

    def take_moves(self) -> Moves:
        """The moves of the plan, which is complete; what was kept for it is let go."""
        if self.moves.is_empty:
            return NO_MOVES
        moves, self.moves = self.moves, PendingMoves()
        self.device.drop(moves.kept_sources)
        self.host.drop(moves.quarantined)
        return moves.to_moves()

    def use(self, nodes: tuple[int, ...], num_new: int) -> list[int]:
        """Hold the blocks of these nodes, bringing those on the host in, and `num_new` others.

        Raises InvariantError if too few are free, or if this plan moves one of them out.
        """
        places = [self.cache.place(node) for node in nodes]
        counts, out_to = self.device.ref_counts, self.moves.out_to
        num_host = sum(place < 0 for place in places)
        num_idle = sum(place >= 0 and counts[place] == 0 for place in places)
        if num_idle + num_host + num_new > self.device.num_free or any(on_host(place) in out_to for place in places):
            raise InvariantError(f"{len(nodes)} cached blocks cannot be used, {self.device.num_free} are free")
        # Held first, so that none of them is evicted for another.
        for place in places:
            if place >= 0:
                self.device.share(place)
            else:
                self.quarantine(on_host(place))
        taken = self.take(num_host + num_new)
        brought = iter(taken)
        for index, place in enumerate(places):
            if place < 0:
                places[index] = block_id = next(brought)
                node = self.host.uncache(on_host(place))
                self.moves.swap_in(on_host(place), block_id)
                self.cache.put(node, block_id)
                self.device.cache(block_id, node)
        return places + taken[num_host:]

    def num_worth_using(self, places: list[int]) -> int:
        """How many of these places, from the first, are worth their moves: the prefix that saves most time."""
        rates = self._rates
        if rates is None or not any(place < 0 for place in places):
            return len(places)
        best = num_host = 0
        for index, place in enumerate(places, 1):
            num_host += place < 0
            if not num_host or rates.swap_in_is_cheaper((index - best) * self._block_size, num_host):
                best, num_host = index, 0
        return best

    def check_integrity(self, holders: dict[int, int], host_holders: dict[int, int]) -> None:
        """Prove that these (block id to number of holders) account for all blocks, with cache and moves."""
        self.device.check_integrity(holders)
        self.host.check_integrity(host_holders)
        places = [(node, block_id) for block_id, node in self.device.cached.items()]
        places += [(node, on_host(block_id)) for block_id, node in self.host.cached.items()]
        self.cache.check_integrity(places)
        self.moves.check_integrity(self.device.ref_counts)

    def _evict(self, count: int) -> None:
        """Make so many idle device blocks unused; what is worth it lives on in the host pool."""
        if count > self.device.num_idle:
            raise InvariantError(f"{count} more blocks wanted than are unused, {self.device.num_idle} can be evicted")
        rates = self._rates
        keeps = self.host.num_blocks > 0 and (rates is None or rates.swap_in_is_cheaper(self._block_size, 1))
        for _ in range(count):
            block_id, node = self.device.evict()
            if keeps and self.host.num_free and self.cache.is_reachable(node):
                host_block_id = self.take_host()
                self.moves.swap_out(block_id, host_block_id)
                self.cache.put(node, on_host(host_block_id))
                self.host.cache(host_block_id, node)
                self.host.drop((host_block_id,))
            else:
                self.cache.forget(node)
