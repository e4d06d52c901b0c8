"""Moves of whole states in the plan being made: to the host pool, within the device pool, back from the host pool.

As those of blocks (`block_moves`) they are recorded under their destination, with the source that has the content when
an executor moves: it swaps out, then copies, then swaps in, then computes.
"""

from __future__ import annotations

from collections import Counter

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.memory.paged_pool import PagedPool, Pages

Claim = tuple[PagedPool, int]
"""A pool, and a block of it whose snapshot is held until the plan is complete."""
PageMoves = tuple[list[int], list[int]]
"""Source and destination pages."""


class StateMoves:
    """Moves by destination, and what must not change until the plan is complete."""

    def __init__(self, device: PagedPool, host: PagedPool) -> None:
        self._device, self._host = device, host
        self._number = len(device.windows) - 1
        self._swap_outs: dict[Pages, Pages] = {}
        self._copies: dict[Pages, Pages] = {}
        self._swap_ins: dict[Pages, Pages] = {}
        self._claims: dict[Pages, Claim] = {}
        """By destination: the snapshot that it is loaded from."""
        self._read: tuple[set[Pages], set[Pages]] = set(), set()
        """States of device and host without a holder that this plan reads."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recorded."""
        return not (self._swap_outs or self._copies or self._swap_ins or any(self._read))

    def claim(self, pool: PagedPool, block_id: int) -> Claim:
        """Hold the snapshot of a block, so that nothing of it is evicted; for `load`."""
        pool.hold_window(self._number, block_id)
        return pool, block_id

    def load(self, claim: Claim, destination: Pages) -> None:
        """Copy a snapshot to a state on the device."""
        pool, block_id = self._claims[destination] = claim
        moves = self._copies if pool is self._device else self._swap_ins
        moves[destination] = pool.windows[self._number][block_id]

    def copy(self, source: Pages, destination: Pages) -> None:
        """Copy the content that a state on the device has when the plan computes."""
        if source in self._claims:
            self._claims[destination] = self.claim(*self._claims[source])
        if source in self._swap_ins:
            self._swap_ins[destination] = self._swap_ins[source]
        else:
            self._copies[destination] = self._copies.get(source, source)

    def swap_out(self, source: Pages, destination: Pages) -> None:
        """Move a state to the host; raises InvariantError if this plan swaps it in."""
        if source in self._swap_ins:
            raise InvariantError("a state would be swapped in and out by one plan")
        self._swap_outs[destination] = self._copies.get(source, source)

    def swap_in(self, source: Pages, destination: Pages) -> None:
        """Move a state to the device; raises InvariantError if this plan swaps it out."""
        if source in self._swap_outs:
            raise InvariantError("a state would be swapped out and in by one plan")
        self._swap_ins[destination] = source

    def drop(self, pool: PagedPool, pages: Pages) -> None:
        """Free a state; one that this plan reads, when the plan is complete. What was to come into it does not."""
        if pool is self._host:
            self._swap_outs.pop(pages, None)
        else:
            self._cancel(pages)
        reads = self._reads(pool)
        if pages in reads.values():
            self._read[pool is self._host].add(pages)
        else:
            pool.free_state(pages)

    def _reads(self, pool: PagedPool) -> dict[Pages, Pages]:
        return self._copies if pool is self._device else self._swap_ins

    def _cancel(self, destination: Pages) -> None:
        for pool in (self._device, self._host):
            reads, read = self._reads(pool), self._read[pool is self._host]
            source = reads.pop(destination, None)
            if source in read and source not in reads.values():
                read.remove(source)
                pool.free_state(source)
        claim = self._claims.pop(destination, None)
        if claim is not None:
            claim[0].leave_window(self._number, claim[1])

    def take(self) -> tuple[PageMoves, PageMoves, PageMoves]:
        """Close the plan: return its moves by page (swapped out, copied, swapped in); free what was kept for it."""
        moves = _columns(self._swap_outs), _columns(self._copies), _columns(self._swap_ins)
        for pool, block_id in self._claims.values():
            pool.leave_window(self._number, block_id)
        for pool in (self._device, self._host):
            read = self._read[pool is self._host]
            for pages in sorted(read):
                pool.free_state(pages)
            read.clear()
        for each in (self._swap_outs, self._copies, self._swap_ins, self._claims):
            each.clear()
        return moves

    def num_read(self, pool: PagedPool) -> int:
        """Number of states and snapshots of a pool that have no holder but this plan."""
        return len(self._read[pool is self._host]) + len(pool.window_refs[self._number])

    def kept(self, pool: PagedPool) -> set[Pages]:
        """States without a holder that this plan reads."""
        return self._read[pool is self._host]

    def check_integrity(self) -> None:
        """Check that no two moves depend on their order, and who holds snapshots."""
        if self._copies.keys() & (self._swap_ins.keys() | set(self._copies.values())):
            raise InvariantError("a state is both copied to and a source, or comes from two places")
        if self._swap_outs.keys() & set(self._swap_ins.values()):
            raise InvariantError("a state on the host is swapped out to and in from")
        if not (self._copies.keys() | self._swap_ins.keys()) <= self._device.states:
            raise InvariantError("a state is moved to without a holder")
        for pool in (self._device, self._host):
            claimed = Counter(block_id for claim, block_id in self._claims.values() if claim is pool)
            if dict(claimed) != pool.window_refs[self._number]:
                raise InvariantError("the holders of snapshots are miscounted")


def _columns(source_of: dict[Pages, Pages]) -> PageMoves:
    sources, destinations = list[int](), list[int]()
    for destination, source in source_of.items():
        sources += source
        destinations += destination
    return sources, destinations
