"""The block moves of the plan being made.

An executor swaps blocks out, then copies, then swaps in, then computes. Each move is therefore recorded under its
destination, with the source that has the content at that stage, whatever the order of the calls.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.types import BlockPairs


@dataclass(frozen=True, slots=True)
class Moves:
    """Block moves of one plan, as in StepPlan."""

    swapped_out: BlockPairs
    """(device block, host block)."""
    copied: BlockPairs
    """(source, destination), in the device pool; no block is both."""
    swapped_in: BlockPairs
    """(host block, device block)."""


NO_MOVES = Moves([], [], [])


class PendingMoves:
    """Moves by destination, and the blocks that must not change until the plan is complete."""

    def __init__(self) -> None:
        self.out_to: dict[int, int] = {}
        """Swap-outs: host block -> device block."""
        self.copied_to: dict[int, int] = {}
        """Copies: destination device block -> source device block."""
        self.in_to: dict[int, int] = {}
        """Swap-ins: device block -> host block."""
        self.copy_sources: Counter[int] = Counter()
        """Source device blocks, each with its number of copies."""
        self.kept_sources: dict[int, None] = {}
        """Copy sources without other holders: kept so that this plan does not write to them."""
        self.quarantined: dict[int, None] = {}
        """Sources of swap-ins: this plan must not swap out to them."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recorded."""
        return not (self.out_to or self.copied_to or self.in_to or self.kept_sources or self.quarantined)

    @property
    def fill_blocks(self) -> bool:
        """Whether a move of this plan writes to a device block."""
        return bool(self.copied_to or self.in_to)

    def copy(self, source: int, destination: int) -> None:
        """Copy the content that `source` has when the plan computes."""
        host_block_id = self.in_to.get(source)
        if host_block_id is not None:
            self.in_to[destination] = host_block_id
            return
        source = self.copied_to.get(source, source)
        self.copied_to[destination] = source
        self.copy_sources[source] += 1

    def swap_out(self, block_id: int, host_block_id: int) -> None:
        """Swap a device block out; raises InvariantError if this plan swaps it in."""
        if block_id in self.in_to:
            raise InvariantError(f"block {block_id} would be swapped in and out by one plan")
        self.out_to[host_block_id] = self.copied_to.get(block_id, block_id)

    def swap_in(self, host_block_id: int, block_id: int) -> None:
        """Swap a host block in; raises InvariantError if this plan swaps it out."""
        if host_block_id in self.out_to:
            raise InvariantError(f"host block {host_block_id} would be swapped out and in by one plan")
        self.in_to[block_id] = host_block_id

    def cancel(self, block_id: int) -> bool:
        """Cancel the move to a device block that lost its last holder; returns whether there was one."""
        source = self.copied_to.pop(block_id, None)
        if source is None:
            return self.in_to.pop(block_id, None) is not None
        self.copy_sources[source] -= 1
        if not self.copy_sources[source]:
            del self.copy_sources[source]
        return True

    def to_moves(self) -> Moves:
        """The moves as lists, for the plan."""
        return Moves(
            swapped_out=[(source, destination) for destination, source in self.out_to.items()],
            copied=[(source, destination) for destination, source in self.copied_to.items()],
            swapped_in=[(source, destination) for destination, source in self.in_to.items()],
        )

    def check_integrity(self, device_ref_counts: list[int]) -> None:
        """Check that no two moves depend on their order, and that all moved device blocks have holders."""
        if self.copy_sources != Counter(self.copied_to.values()):
            raise InvariantError("copy sources are miscounted")
        if self.copy_sources.keys() & (self.copied_to.keys() | self.in_to.keys()):
            raise InvariantError("a block is both source of a copy and destination of a move")
        if not self.copied_to.keys().isdisjoint(self.in_to):
            raise InvariantError("a block is copied to and swapped in to")
        if not self.out_to.keys().isdisjoint(self.quarantined):
            raise InvariantError("a host block is swapped out to and in from")
        if not self.quarantined.keys() >= set(self.in_to.values()):
            raise InvariantError("a host block is swapped in and free")
        for block_id in (*self.copied_to, *self.in_to, *self.copied_to.values()):
            if device_ref_counts[block_id] == 0:
                raise InvariantError(f"block {block_id} is moved without a holder")
