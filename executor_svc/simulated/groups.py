"""Tables of several KV groups beside the slots, which see a block as one page: the first of its pages in KV group 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import KV_GROUP, AdmittedSequence, GroupAppends, PrefixSource, StepPlan
from executor_svc.plan.arrays import IntArray, check_range, column, ints
from executor_svc.plan.limits import Limits


class SimulatedGroups:
    """By KV group, the pages of each slot's blocks."""

    def __init__(self, limits: Limits) -> None:
        self.shapes = limits.kv_groups
        self._limits = limits
        n, most = limits.num_slots, limits.max_blocks_per_seq
        self.tables = [np.zeros((n, most, shape.pages_per_block), np.int64) for shape in self.shapes]
        """[num_slots, max_blocks_per_seq, pages_per_block] of each group."""
        self.ends = [np.zeros(n, np.int64) for _ in self.shapes]
        """The number of blocks of each slot's table, those before its window included."""

    def seen_by_slots(self, plan: StepPlan) -> StepPlan:
        """Return the plan as an executor of one group would have it."""
        size = self.shapes[0].pages_per_block
        groups = tuple(f"{part}.{name}" for part in ("appends", "block_tables") for name in (KV_GROUP, "first_block"))
        return replace(
            plan,
            admitted=[self._seen(sequence, size) for sequence in plan.admitted],
            append_slots=column(ints(plan.append_slots)[::size]),
            append_block_ids=column(ints(plan.append_block_ids)[::size]),
            reserved=tuple(name for name in plan.reserved if not name.startswith(groups)),
        )

    def _seen(self, sequence: AdmittedSequence, size: int) -> AdmittedSequence:
        source, heads = sequence.source, ints(sequence.block_ids)[::size]
        heads = np.concatenate((np.zeros(sequence.first_block, np.int64), heads))
        if source is not None:
            source = PrefixSource(source.slot, source.num_tokens, source.num_blocks // size)
        return replace(sequence, block_ids=column(heads), source=source)

    def follow(self, plan: StepPlan) -> None:
        """Follow a plan that the slots have taken; raises InvalidPlan."""
        for sequence in plan.admitted:
            pages, source, slot = ints(sequence.block_ids), sequence.source, sequence.slot
            if source is not None:
                shared = self.tables[0][source.slot].reshape(-1)[: source.num_blocks]
                pages = np.concatenate((shared, pages))
            for end in self.ends:
                end[slot] = 0
            self._set(0, slot, sequence.first_block, pages)
            for table in sequence.group_tables:
                self._check_group(table.kv_group)
                self._set(table.kv_group, slot, table.first_block, ints(table.page_ids))
        first = GroupAppends(0, plan.append_slots, plan.append_block_ids)
        for appends in (first, *plan.group_appends):
            self._check_group(appends.kv_group)
            self._append(appends.kv_group, ints(appends.slots), appends.page_ids)

    def _check_group(self, group: int) -> None:
        if not 0 <= group < len(self.shapes):
            raise InvalidPlan(f"KV group {group}: there are {len(self.shapes)}")

    def _set(self, group: int, slot: int, first: int, page_ids: IntArray) -> None:
        size = self.shapes[group].pages_per_block
        num_blocks, rest = divmod(len(page_ids), size)
        if rest or first + num_blocks > self._limits.max_blocks_per_seq:
            raise InvalidPlan(f"slot {slot}: {len(page_ids)} pages from block {first} on in KV group {group}")
        check_range(page_ids, self._limits.num_device_blocks, f"slot {slot}: KV group {group}: page")
        self.tables[group][slot, first : first + num_blocks] = page_ids.reshape(-1, size)
        self.ends[group][slot] = first + num_blocks

    def _append(self, group: int, slots: IntArray, page_ids: Sequence[int]) -> None:
        size = self.shapes[group].pages_per_block
        for first in range(0, len(slots), size):
            slot, pages = int(slots[first]), ints(page_ids)[first : first + size]
            self._set(group, slot, int(self.ends[group][slot]), pages)

    def check_room(self, slots: IntArray, ends: IntArray) -> None:
        """Check that the tables of slots hold so many tokens in every group; raises InvalidPlan."""
        for group, num_blocks in enumerate(self.ends):
            short = ends > num_blocks[slots] * self._limits.block_size
            if short.any():
                raise InvalidPlan(f"the block table of slot {slots[short][0]} is too short in KV group {group}")
