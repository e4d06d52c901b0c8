"""The recurrent states of sequences: each has one, in pages of its own, where its blocks are.

A state is mutable and nobody shares it: what others need of it is copied. It begins as zeros, which takes no copy, or
as a copy of a snapshot, and it moves with the blocks (docs/decisions/0071).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.memory.paged_tiers import PagedTiers
from scheduler_svc.core.memory.prefix_cache import host_place
from scheduler_svc.core.memory.snapshots import Snapshots
from scheduler_svc.core.memory.state_moves import Claim, StateMoves
from scheduler_svc.core.sequences.sequence import Sequence


class HoldsState(Protocol):
    """What has a state: a sequence."""

    state_pages: tuple[int, ...]


class StateTables:
    """The states of all sequences with blocks in either pool."""

    def __init__(self, tiers: PagedTiers, moves: StateMoves, state_pages: int, block_size: int) -> None:
        self.num_pages = state_pages
        self.snapshots = Snapshots(tiers, block_size)
        self._tiers = tiers
        self._moves = moves

    def num_to_open(self, places: list[int]) -> int:
        """Number of free pages that `open` takes behind these cached blocks: a snapshot is free no more until the plan
        is complete."""
        device = self._tiers.device
        is_idle = bool(places) and places[-1] >= 0 and places[-1] not in device.window_refs[-1]
        return self.num_pages * (1 + is_idle)

    def claim(self, places: list[int]) -> Claim | None:
        """Hold the snapshot at the end of these cached blocks, so that it is not evicted; for `open`."""
        if not places:
            return None
        on_device, place = places[-1] >= 0, places[-1]
        pool = self._tiers.device if on_device else self._tiers.host
        return self._moves.claim(pool, place if on_device else host_place(place))

    def open(self, sequence: HoldsState, claim: Claim | None = None) -> None:
        """Give a sequence a state: a copy of what was claimed, or garbage, which stands for zeros at position 0."""
        sequence.state_pages = self._tiers.take_state(self._tiers.device)
        if claim is not None:
            self._moves.load(claim, sequence.state_pages)

    def copy(self, source: HoldsState, child: HoldsState) -> None:
        """Let the plan being made copy a state, as it is before it computes; nothing if either is there no more."""
        if source.state_pages and child.state_pages:
            self._moves.copy(source.state_pages, child.state_pages)

    def drop(self, sequence: Sequence) -> None:
        """Free the state of a sequence."""
        if sequence.state_pages:
            pool = self._tiers.host if sequence.host_block_ids else self._tiers.device
            self._moves.drop(pool, sequence.state_pages)
            sequence.state_pages = ()

    def move(self, sequence: Sequence, source: PagedPool, target: PagedPool) -> None:
        """Move a state to the pool where the blocks of its sequence go."""
        before = sequence.state_pages
        if not before:
            return
        if not (sequence.block_ids or sequence.host_block_ids):
            self.drop(sequence)
            return
        sequence.state_pages = self._tiers.take_state(target)
        move = self._moves.swap_in if source is self._tiers.host else self._moves.swap_out
        move(before, sequence.state_pages)
        self._moves.drop(source, before)

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Check that states, copies to be made and the plan being made account for all pages of states."""
        found: dict[bool, list[tuple[int, ...]]] = {True: [], False: [*self.snapshots.pages]}
        for sequence in holders:
            if len(sequence.state_pages) != self.num_pages:
                raise InvariantError(
                    f"sequence {sequence.sequence_id} has a state of {len(sequence.state_pages)} pages"
                )
            found[bool(sequence.host_block_ids)].append(sequence.state_pages)
        for pool in (self._tiers.device, self._tiers.host):
            held = found[pool is self._tiers.host] + list(self._moves.kept(pool))
            if sorted(held) != sorted(pool.states):
                raise InvariantError("a state has no holder, or several")
        self._moves.check_integrity()
