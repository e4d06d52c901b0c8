"""Block tables of sequences that move to the host pool and back, with their windows and states."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import cast

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.block_tables import (
    MovedTables,
    Table,
    clear_tables,
    device_tables,
    distinct_blocks,
    host_tables,
)
from scheduler_svc.core.memory.cached_blocks import CachedBlocks
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.memory.state_tables import StateTables
from scheduler_svc.core.memory.window_tables import WindowTables
from scheduler_svc.core.sequences.sequence import Sequence


class SwappedBlocks(CachedBlocks):
    """Swaps of whole sequences."""

    windows: WindowTables | None = None
    """Of KV groups with a window; None: there are none."""
    states: StateTables | None = None
    """Recurrent states of sequences; None: there are none."""
    host_pool: BlockPool

    def num_to_swap(self, sequences: Iterable[Sequence]) -> int:
        """Number of pages of the distinct device blocks of these sequences, and of their states."""
        sequences = list(sequences)
        num_pages = self.pool.num_pages_of(distinct_blocks(device_tables(sequences)))
        return num_pages + sum(len(sequence.state_pages) for sequence in sequences if sequence.block_ids)

    def swap_out(self, sequences: Collection[Sequence]) -> bool:
        """Move all their blocks to the host pool, shared ones once; False without any change if they do not fit.

        Also False if the plan being made swaps one of the blocks in. A sequence without blocks gives up its state.
        """
        tiers = self.tiers
        block_ids = distinct_blocks(device_tables(sequences))
        if self.num_to_swap(sequences) > tiers.host.num_free or not tiers.moves.swap_ins.keys().isdisjoint(block_ids):
            return False
        host_of = dict(zip(block_ids, tiers.take_host(len(block_ids)), strict=True))
        tiers.swap_out_all(host_of)
        moved_tables = MovedTables(tiers.host, host_of)
        for sequence, table in zip(sequences, device_tables(sequences), strict=True):
            moved = moved_tables.hold(table)
            self._move_others(sequence, tiers.device, tiers.host, moved)
            tiers.drop_table(*table)
            clear_tables(sequence)
            sequence.host_block_ids, sequence.shared_blocks = moved
        return True

    def num_to_swap_in(self, sequences: Iterable[Sequence]) -> int:
        """Number of pages of the distinct host blocks of these sequences."""
        sequences = list(sequences)
        num_pages = self.host_pool.num_pages_of(distinct_blocks(host_tables(sequences)))
        return num_pages + sum(len(sequence.state_pages) for sequence in sequences)

    def swap_in(self, sequences: Collection[Sequence]) -> None:
        """Move all their blocks back; raises InvariantError if too few are free, or if this plan swaps them out."""
        tiers = self.tiers
        host_ids = distinct_blocks(host_tables(sequences))
        if not tiers.moves.swap_outs.keys().isdisjoint(host_ids):
            raise InvariantError("blocks would be swapped out and in by one plan")
        device_of = dict(zip(host_ids, tiers.take(len(host_ids)), strict=True))
        tiers.quarantine(device_of)
        tiers.swap_in_all(device_of)
        moved_tables = MovedTables(tiers.device, device_of)
        for sequence, table in zip(sequences, host_tables(sequences), strict=True):
            moved = moved_tables.hold(table)
            self._move_others(sequence, tiers.host, tiers.device, moved)
            tiers.drop_host_table(*table)
            clear_tables(sequence)
            sequence.block_ids, sequence.shared_blocks = moved

    def _move_others(self, sequence: Sequence, source: BlockPool, target: BlockPool, moved: Table) -> None:
        if self.windows is not None:
            self.windows.hold_all(sequence, cast("PagedPool", target), moved[0])
            self.windows.leave_all(sequence, cast("PagedPool", source))
        if self.states is not None:
            self.states.move(sequence, cast("PagedPool", source), cast("PagedPool", target))
