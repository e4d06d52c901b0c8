"""How many keys and values of a draft model blocks hold: by block, since blocks are shared, moved and used again."""

from __future__ import annotations

from itertools import takewhile

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray, ints
from executor_svc.plan.limits import Limits

_UNKNOWN = -1


class DraftKV:
    """Counts of the draft's layers. They are lower bounds: what is computed again does no harm."""

    def __init__(self, limits: Limits) -> None:
        self._size = limits.block_size
        # A block has these pages in KV group 0, where the draft's layers are; the first stands for it.
        self._pages = limits.groups[0].pages_per_block
        # By block: the number of its first places that hold the KV of the tokens that a sequence has there.
        self._filled = np.zeros(limits.num_device_blocks, np.int64)
        self._filled_on_host = np.zeros(limits.num_host_blocks, np.int64)
        # By slot: the number of its first tokens whose KV is there.
        self._computed = np.full(limits.num_slots, _UNKNOWN)
        # By slot: where its last drafts begin, and their ids.
        self._drafts: dict[int, tuple[int, list[int]]] = {}

    def forget(self, slot: int) -> None:
        """Note that another sequence is in this slot: what is there follows from its blocks."""
        self._computed[slot] = _UNKNOWN
        self._drafts.pop(slot, None)

    def follow(self, plan: StepPlan) -> None:
        """Move counts with blocks, and reset those of blocks that get other tokens, in the order of execution.proto."""
        filled = self._filled
        if plan.swap_out:
            self._filled_on_host[ints(plan.swap_out.destinations)] = filled[ints(plan.swap_out.sources)]
        # First: a fork's new block is appended, and the copy of the one that it shared until now.
        filled[ints(plan.append_block_ids)] = 0
        filled[ints(plan.copies.destinations)] = filled[ints(plan.copies.sources)]
        filled[ints(plan.swap_in.destinations)] = self._filled_on_host[ints(plan.swap_in.sources)]
        for sequence in plan.admitted:
            # Blocks that it takes from a source keep their counts.
            first = sequence.source.num_blocks // self._pages if sequence.source is not None else 0
            block_ids = ints(sequence.block_ids)[:: self._pages]
            starts = (first + np.arange(len(block_ids))) * self._size
            present = np.maximum(sequence.num_computed_tokens - starts, 0)
            filled[block_ids] = np.minimum(filled[block_ids], present)

    def num_computed(self, slots: Slots, rows: IntArray) -> IntArray:
        """Return [n] the number of first tokens of the slots rows [n] whose KV is there, less than all of them."""
        for slot in rows.tolist():
            if self._computed[slot] == _UNKNOWN:
                self._computed[slot] = self._found(slots, slot)
            self._settle(slots, slot)
        result: IntArray = np.minimum(self._computed[rows], slots.num_tokens[rows] - 1)
        return result

    def computed(self, slots: Slots, rows: IntArray, ends: IntArray) -> None:
        """Note that the KV of the first ends[i] tokens of rows[i] is there now; all are known tokens."""
        for slot, end in zip(rows.tolist(), ends.tolist(), strict=True):
            self._fill(slots, slot, end)

    def drafted(self, rows: IntArray, starts: IntArray, counts: IntArray, token_ids: IntArray) -> None:
        """Note the drafts of slots, of which all but the last were computed; arguments as the columns of `Drafts`.

        starts: [n] the position of each slot's first draft.
        """
        ends = counts.cumsum()
        for slot, start, count, end in zip(rows.tolist(), starts.tolist(), counts.tolist(), ends.tolist(), strict=True):
            self._drafts[slot] = start, token_ids[end - count : end].tolist()

    def _found(self, slots: Slots, slot: int) -> int:
        """Return what the blocks of a slot hold, from its first token on."""
        blocks = slots.block_tables[slot, : slots.num_blocks[slot]]
        filled = self._filled[blocks]
        (gaps,) = (filled < self._size).nonzero()
        return int(gaps[0] * self._size + filled[gaps[0]]) if len(gaps) else len(blocks) * self._size

    def _settle(self, slots: Slots, slot: int) -> None:
        """Count the drafts that have become tokens."""
        start, drafts = self._drafts.pop(slot, (0, []))
        known = slots.token_ids[slot, start : slots.num_tokens[slot]].tolist()
        # Shorter if not all of the drafts are known by now.
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts[:-1], known)))  # noqa: B905
        if num_right:
            self._fill(slots, slot, start + num_right)

    def _fill(self, slots: Slots, slot: int, end: int) -> None:
        first, last = max(0, int(self._computed[slot])) // self._size, -(-end // self._size)
        blocks = slots.block_tables[slot, first:last]
        present = np.minimum(end - np.arange(first, last) * self._size, self._size)
        self._filled[blocks] = np.maximum(self._filled[blocks], present)
        self._computed[slot] = end
