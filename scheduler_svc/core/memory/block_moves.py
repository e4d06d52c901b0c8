"""The block moves of the plan that is being made.

An executor moves blocks out to the host, then copies, then moves blocks in, then computes. All moves of a plan are
therefore recorded by destination, with the source that has the content at that stage, whatever order they are asked in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.types import BlockPairs


@dataclass(frozen=True, slots=True)
class Moves:
    """Block moves of one plan, as StepPlan has them."""

    swapped_out: BlockPairs
    """(device block, host block)."""
    copied: BlockPairs
    """(source, destination), in the device pool; no block is both."""
    swapped_in: BlockPairs
    """(host block, device block)."""


NO_MOVES = Moves([], [], [])


class PendingMoves:
    """Moves by destination, and the blocks that must stay as they are until the plan has been made."""

    def __init__(self) -> None:
        self.out_to: dict[int, int] = {}
        """Device block by the host block that it goes to."""
        self.copied_to: dict[int, int] = {}
        """Device block by the device block that it is copied to."""
        self.in_to: dict[int, int] = {}
        """Host block by the device block that it goes to."""
        self.copy_sources: Counter[int] = Counter()
        """Device blocks that are copied, and to how many others."""
        self.kept_sources: dict[int, None] = {}
        """Copy sources that their last holder has left: nobody may write to them in this plan."""
        self.quarantined: dict[int, None] = {}
        """Host blocks that are swapped in: nothing may be swapped out to them in this plan."""

    @property
    def is_empty(self) -> bool:
        """Has nothing been recorded."""
        return not (self.out_to or self.copied_to or self.in_to or self.kept_sources or self.quarantined)

    @property
    def fill_blocks(self) -> bool:
        """Does a device block get its content by a move of this plan."""
        return bool(self.copied_to or self.in_to)

    def copy(self, source: int, destination: int) -> None:
        """Give a device block the content that another has when the plan computes."""
        host_block_id = self.in_to.get(source)
        if host_block_id is not None:
            self.in_to[destination] = host_block_id
            return
        source = self.copied_to.get(source, source)
        self.copied_to[destination] = source
        self.copy_sources[source] += 1

    def swap_out(self, block_id: int, host_block_id: int) -> None:
        """Move a device block's content out; raises InvariantError if it comes in by this plan only."""
        if block_id in self.in_to:
            raise InvariantError(f"block {block_id} would be swapped in and out by one plan")
        self.out_to[host_block_id] = self.copied_to.get(block_id, block_id)

    def swap_in(self, host_block_id: int, block_id: int) -> None:
        """Move a host block's content in; raises InvariantError if it goes out by this plan only."""
        if host_block_id in self.out_to:
            raise InvariantError(f"host block {host_block_id} would be swapped out and in by one plan")
        self.in_to[block_id] = host_block_id

    def cancel(self, block_id: int) -> bool:
        """Nobody holds this device block any more: nothing is moved to it. Returns whether something was to be."""
        source = self.copied_to.pop(block_id, None)
        if source is None:
            return self.in_to.pop(block_id, None) is not None
        self.copy_sources[source] -= 1
        if not self.copy_sources[source]:
            del self.copy_sources[source]
        return True

    def to_moves(self) -> Moves:
        """What the plan is told."""
        return Moves(
            swapped_out=[(source, destination) for destination, source in self.out_to.items()],
            copied=[(source, destination) for destination, source in self.copied_to.items()],
            swapped_in=[(source, destination) for destination, source in self.in_to.items()],
        )

    def check_integrity(self, device_ref_counts: list[int]) -> None:
        """Prove that no two moves depend on their order, and that blocks which get content are held."""
        if self.copy_sources != Counter(self.copied_to.values()):
            raise InvariantError("copy sources are not counted right")
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
                raise InvariantError(f"block {block_id} is moved, and nobody holds it")
