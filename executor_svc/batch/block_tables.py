"""Where the pages that plans name go in the block tables of slots.

A sequence has a table for each strip of each KV group, in the order of groups: entry i is the page of its block i. The
table of a group with a window may begin at a later block: the entries before have no meaning, and nobody reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import AdmittedSequence, GroupAppends, GroupTable, StepPlan
from executor_svc.plan.arrays import IntArray, check_range, ints
from executor_svc.plan.limits import Limits


class TablePlaces:
    """Keeps the ends of all tables, and says where pages go; whoever holds the tables writes them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._groups = limits.groups
        self._first_tables = list(accumulate((group.pages_per_block for group in limits.groups), initial=0))
        self.num_blocks = np.zeros((len(limits.groups), limits.num_slots), np.int64)
        """[groups, num_slots]: the end of each slot's tables in blocks, those before its window included."""

    def room(self, slots: IntArray) -> IntArray:
        """Return [n] the number of blocks that the tables of slots [n] reach in every group."""
        result: IntArray = self.num_blocks[:, slots].min(axis=0)
        return result

    def admitted(self, sequence: AdmittedSequence) -> Iterator[tuple[int, int, IntArray]]:
        """Yield (table, first entry, pages) of a checked admission without a source, and note its ends."""
        self.num_blocks[:, sequence.slot] = 0
        for table in (GroupTable(0, sequence.first_block, sequence.block_ids), *sequence.group_tables):
            blocks = self._by_block(table.kv_group, ints(table.page_ids))
            self.num_blocks[table.kv_group, sequence.slot] = table.first_block + len(blocks)
            for strip, pages in enumerate(blocks.T):
                yield self._first_tables[table.kv_group] + strip, table.first_block, pages

    def appended(self, plan: StepPlan) -> Iterator[tuple[int, IntArray, IntArray, IntArray]]:
        """Yield (table, slots, entries, pages) of a plan's appends, [n] each, and note the new ends.

        Raises InvalidPlan for appends that do not fit; slots must be checked.
        """
        first = GroupAppends(0, plan.append_slots, plan.append_block_ids)
        for appends in (first, *plan.group_appends) if plan.group_appends else (first,):
            if len(appends.slots):
                yield from self._appended(appends)

    def _appended(self, appends: GroupAppends) -> Iterator[tuple[int, IntArray, IntArray, IntArray]]:
        group, most = appends.kv_group, self._limits.max_blocks_per_seq
        slots, blocks = self._by_block(group, ints(appends.slots)), self._by_block(group, ints(appends.page_ids))
        slots = slots[:, 0]
        order = np.argsort(slots, kind="stable")
        slots, blocks = slots[order], blocks[order]
        _, first, counts = np.unique(slots, return_index=True, return_counts=True)
        entries = self.num_blocks[group, slots] + np.arange(len(slots)) - np.repeat(first, counts)
        if entries.max() >= most:
            slot = slots[entries.argmax()]
            raise InvalidPlan(f"appends: the block table of slot {slot} would exceed {most} blocks")
        self.num_blocks[group, slots[first]] += counts
        for strip, pages in enumerate(blocks.T):
            yield self._first_tables[group] + strip, slots, entries, pages

    def read(self, slot: int, num_computed: int, tables: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
        """Yield of each KV group the entries [strips, blocks] of a slot's tables that rows still read.

        tables: [tables, blocks]; with a window they begin where the row behind its computed tokens reads first.
        """
        for group, shape in enumerate(self._groups):
            first, start = self._first_tables[group], 0
            if shape.window:
                start = max(0, int(num_computed) + 1 - shape.window) // self._limits.block_size
            yield tables[first : first + shape.pages_per_block, start : self.num_blocks[group, slot]]

    def _by_block(self, group: int, column: IntArray) -> IntArray:
        return column.reshape(-1, self._groups[group].pages_per_block)

    def check_room(self, slots: IntArray, ends: IntArray) -> None:
        """Check that the tables of slots [n] hold so many tokens in every group; raises InvalidPlan."""
        for group, num_blocks in enumerate(self.num_blocks):
            short = ends > num_blocks[slots] * self._limits.block_size
            if short.any():
                i = short.argmax()
                raise InvalidPlan(
                    f"the block table of slot {slots[i]} is too short{_named(group)}: {ends[i]} tokens need more than "
                    f"its {num_blocks[slots[i]]} blocks"
                )


def check_tables(sequence: AdmittedSequence, limits: Limits, where: str) -> None:
    """Check the block tables of an admission; raises InvalidPlan, whose message begins with `where`."""
    computed = sequence.num_computed_tokens
    for table in (GroupTable(0, sequence.first_block, sequence.block_ids), *sequence.group_tables):
        group = table.kv_group
        _check_group(group, limits, where)
        num_blocks, rest = divmod(len(table.page_ids), limits.groups[group].pages_per_block)
        num_blocks, name = num_blocks + table.first_block, _named(group)
        if rest:
            raise InvalidPlan(f"{where} has {len(table.page_ids)} pages{name}: no whole number of blocks")
        if table.first_block and not limits.groups[group].window:
            raise InvalidPlan(f"{where}: first_block {table.first_block}{name or ' in KV group 0'} without a window")
        if num_blocks > limits.max_blocks_per_seq:
            raise InvalidPlan(
                f"{where} has {num_blocks} blocks{name}: over the {limits.max_blocks_per_seq} of max_model_len"
            )
        check_range(table.page_ids, limits.num_device_blocks, f"{where}{name}: block")
        if not group and computed > num_blocks * limits.block_size:
            raise InvalidPlan(f"{where}: {num_blocks} blocks are too few for {computed} computed tokens")


def check_appends(plan: StepPlan, limits: Limits) -> None:
    """Check the appends of a plan without the state of slots; raises InvalidPlan."""
    for appends in (GroupAppends(0, plan.append_slots, plan.append_block_ids), *plan.group_appends):
        if not len(appends.slots):
            continue
        group = appends.kv_group
        _check_group(group, limits, "appends")
        check_range(appends.page_ids, limits.num_device_blocks, f"appends{_named(group)}: block")
        size = limits.groups[group].pages_per_block
        slots = ints(appends.slots)
        if len(slots) % size or (slots.reshape(-1, size) != slots[::size, None]).any():
            raise InvalidPlan(f"appends{_named(group)}: blocks of other than {size} pages")


def _check_group(group: int, limits: Limits, where: str) -> None:
    if group >= len(limits.groups):
        raise InvalidPlan(f"{where}: KV group {group}: there are {len(limits.groups)}")


def _named(group: int) -> str:
    return f" in KV group {group}" if group else ""
