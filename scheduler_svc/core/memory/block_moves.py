"""The block moves of the plan being made.

An executor swaps blocks out, then copies, then swaps in, then computes. Each move is therefore recorded under its
destination, with the source that has the content at that stage, whatever the order of the calls.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cadenza_common.plan.plan import BlockMoves
from scheduler_svc.core.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Moves:
    """Block moves of one plan, as in StepPlan."""

    swapped_out: BlockMoves
    """From the device pool to the host pool."""
    copied: BlockMoves
    """In the device pool; no block is both source and destination."""
    swapped_in: BlockMoves
    """From the host pool to the device pool."""
    pages: Moves | None = None
    """The same by page; None: a block is a page."""


NO_MOVES = Moves(BlockMoves(), BlockMoves(), BlockMoves())


class PendingMoves:
    """Moves by destination, and the blocks that must not change until the plan is complete."""

    def __init__(self) -> None:
        self.swap_outs: dict[int, int] = {}
        """Swap-outs: host block -> device block."""
        self.copies: dict[int, int] = {}
        """Copies: destination device block -> source device block."""
        self.swap_ins: dict[int, int] = {}
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
        return not (self.swap_outs or self.copies or self.swap_ins or self.kept_sources or self.quarantined)

    def copy(self, source: int, destination: int) -> None:
        """Copy the content that `source` has when the plan computes."""
        host_block_id = self.swap_ins.get(source)
        if host_block_id is not None:
            self.swap_ins[destination] = host_block_id
            return
        source = self.copies.get(source, source)
        self.copies[destination] = source
        self.copy_sources[source] += 1

    def swap_out(self, block_id: int, host_block_id: int) -> None:
        """Swap a device block out; raises InvariantError if this plan swaps it in."""
        if block_id in self.swap_ins:
            raise InvariantError(f"block {block_id} would be swapped in and out by one plan")
        self.swap_outs[host_block_id] = self.copies.get(block_id, block_id)

    def swap_out_all(self, host_of: dict[int, int]) -> None:
        """Swap device blocks out, given with their host blocks: none of them is swapped in by this plan."""
        if self.copies:
            for block_id, host_block_id in host_of.items():
                self.swap_out(block_id, host_block_id)
        else:
            self.swap_outs.update(zip(host_of.values(), host_of.keys(), strict=True))

    def swap_in_all(self, device_of: dict[int, int]) -> None:
        """Swap host blocks in, given with their device blocks: none of them is swapped out by this plan."""
        self.swap_ins.update(zip(device_of.values(), device_of.keys(), strict=True))

    def swap_in(self, host_block_id: int, block_id: int) -> None:
        """Swap a host block in; raises InvariantError if this plan swaps it out."""
        if host_block_id in self.swap_outs:
            raise InvariantError(f"host block {host_block_id} would be swapped out and in by one plan")
        self.swap_ins[block_id] = host_block_id

    def cancel(self, block_id: int) -> bool:
        """Cancel the move to a device block that lost its last holder; returns whether there was one."""
        source = self.copies.pop(block_id, None)
        if source is None:
            return self.swap_ins.pop(block_id, None) is not None
        self.copy_sources[source] -= 1
        if not self.copy_sources[source]:
            del self.copy_sources[source]
        return True

    def to_moves(self) -> Moves:
        """The moves in columns, for the plan."""
        return Moves(_columns(self.swap_outs), _columns(self.copies), _columns(self.swap_ins))

    def check_integrity(self, device_ref_counts: list[int]) -> None:
        """Check that no two moves depend on their order, and that all moved device blocks have holders."""
        if self.copy_sources != Counter(self.copies.values()):
            raise InvariantError("copy sources are miscounted")
        if self.copy_sources.keys() & (self.copies.keys() | self.swap_ins.keys()):
            raise InvariantError("a block is both source of a copy and destination of a move")
        if not self.copies.keys().isdisjoint(self.swap_ins):
            raise InvariantError("a block is copied to and swapped in to")
        if not self.swap_outs.keys().isdisjoint(self.quarantined):
            raise InvariantError("a host block is swapped out to and in from")
        if not self.quarantined.keys() >= set(self.swap_ins.values()):
            raise InvariantError("a host block is swapped in and free")
        for block_id in (*self.copies, *self.swap_ins, *self.copies.values()):
            if device_ref_counts[block_id] == 0:
                raise InvariantError(f"block {block_id} is moved without a holder")


def _columns(source_of: dict[int, int]) -> BlockMoves:
    """The moves to these destinations."""
    return BlockMoves(list(source_of.values()), list(source_of))
