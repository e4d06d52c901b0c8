"""The simulated forward pass: writes digests through block tables, and sums the contributions that the tables read."""

from __future__ import annotations

import numpy as np

from executor_svc.batch.prompt_rows import PromptRows
from executor_svc.batch.ragged import spans
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.simulated.hashing import U64, contributions, position_keys, token_hashes
from executor_svc.simulated.memory import DigestPools


class SimulatedAttention:
    """Reads and writes the digest pools through the block tables of slots."""

    def __init__(self, slots: Slots, pools: DigestPools) -> None:
        self._slots = slots
        self._pools = pools
        places = np.arange(slots.limits.max_blocks_per_seq * pools.block_size)
        self._keys = position_keys(places).reshape(-1, pools.block_size)
        self._offsets = np.arange(pools.block_size)
        self.adapter_keys: U64 = np.zeros(slots.limits.num_slots, np.uint64)
        """By slot: `hashing.adapter_key` of its adapter."""

    def write(self, scheduled: Scheduled) -> None:
        """Write the digests of all scheduled tokens to their slots' blocks.

        Each chunk continues from the digest before it, which must be in the pool when the step begins.
        """
        rows, counts = scheduled.slots, scheduled.num_tokens
        context = self._slots.num_computed_tokens[rows]
        owner, positions = spans(context, counts)
        slots = rows[owner]
        token_ids = self._slots.token_ids[slots, positions].astype(np.int64)
        added = token_hashes(token_ids, positions, self.adapter_keys[slots])
        running: U64 = added.cumsum()
        first = counts.cumsum() - counts
        before = np.zeros(len(rows), np.uint64)
        late = context > 0
        before[late] = self._pools.read(self._places(rows[late], context[late] - 1))
        chunk_starts = before - (running[first] - added[first])
        self._pools.write(self._places(slots, positions), running + chunk_starts[owner])

    def contexts(self, rows: IntArray, lengths: IntArray) -> U64:
        """Return [n] sums over the first lengths[i] positions, one or more, of the block tables of slots rows[i]."""
        num_full, tails = np.divmod(lengths, self._pools.block_size)
        tables = self._slots.block_tables
        starts = rows * tables.shape[1]
        owner, entries = spans(starts, num_full)
        sums: U64 = np.zeros(len(rows), np.uint64)
        np.add.at(sums, owner, self._full_blocks(tables.reshape(-1)[entries].astype(np.int64), entries - starts[owner]))
        (late,) = tails.nonzero()
        blocks = tables[rows[late], num_full[late]]
        found = contributions(self._pools.device[blocks], self._keys[num_full[late]])
        found *= self._offsets < tails[late, None]
        sums[late] += found.sum(axis=1)
        return sums

    def _full_blocks(self, blocks: IntArray, index: IntArray) -> U64:
        """Return [B] the sums of whole blocks, read as the index[i]-th of a table; a sum is kept until a write."""
        (new,) = (self._pools.summed_at[blocks] != index).nonzero()
        sums = self._pools.sums[blocks]
        if len(new):
            unknown, places = blocks[new], index[new]
            sums[new] = contributions(self._pools.device[unknown], self._keys[places]).sum(axis=1)
            self._pools.sums[unknown] = sums[new]
            self._pools.summed_at[unknown] = places
        return sums

    def prompt_contexts(self, wanted: PromptRows) -> U64:
        """Return [Q] the context sum of each wanted prompt token: over all positions before it."""
        found, first = self._contributions(wanted.slots, wanted.starts + wanted.counts - 1)
        running = np.cumsum(found)
        size = self._pools.block_size
        # The sum up to a position, minus the contributions of the slots before.
        others = running[first * size] - found[first, 0]
        owner, places = spans(first * size + wanted.starts - 1, wanted.counts)
        sums: U64 = running[places] - others[owner]
        return sums

    def _contributions(self, rows: IntArray, lengths: IntArray) -> tuple[U64, IntArray]:
        """Return contributions of positions by block [B, block_size], 0 after lengths; each row's first block [n]."""
        size = self._pools.block_size
        num_blocks = -(-lengths // size)
        owner, index = spans(np.zeros(len(rows), np.int64), num_blocks)
        found = contributions(self._pools.device[self._slots.block_tables[rows[owner], index]], self._keys[index])
        ends = np.cumsum(num_blocks)
        tails = lengths - (num_blocks - 1) * size
        found[ends - 1] *= np.arange(size) < tails[:, None]
        return found, ends - num_blocks

    def _places(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Return [n] the places of slots' positions in the device pool: block * block_size + offset."""
        index, offsets = np.divmod(positions, self._pools.block_size)
        return self._slots.block_tables[rows, index].astype(np.int64) * self._pools.block_size + offsets
