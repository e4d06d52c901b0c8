"""The simulated forward pass over pages of several KV groups.

Tokens are those of one group: what a row reads in each strip of each group is compared with what the slot's own tokens
give, and a difference goes into the sum, so that a slot that reads KV not its own shows in its tokens. What it writes
then is spoilt too. A group with a window reads its last positions only.
"""

from __future__ import annotations

import numpy as np

from executor_svc.batch.prompt_rows import PromptRows
from executor_svc.batch.ragged import spans
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import IntArray
from executor_svc.sampling.splitmix64 import mix
from executor_svc.simulated.hashing import U64, contributions, position_keys, token_hashes
from executor_svc.simulated.memory import DigestPools
from executor_svc.simulated.states import SimulatedStates


class GroupedAttention:
    """As `SimulatedAttention`, over the tables of several groups."""

    def __init__(self, slots: Slots, pools: DigestPools, states: SimulatedStates | None = None) -> None:
        """states: of the recurrent layers, which are compared too; None: there are none."""
        self._states = states
        self._slots = slots
        self._pools = pools
        shapes = slots.limits.groups
        self._strips = [(g, strip, shape) for g, shape in enumerate(shapes) for strip in range(shape.pages_per_block)]
        """Group, number in it and shape of what each of the slots' tables is of."""
        self._keys = position_keys(np.arange(slots.limits.max_model_len + 1))
        self.adapter_keys: U64 = np.zeros(slots.limits.num_slots, np.uint64)
        """By slot: `hashing.adapter_key` of its adapter."""
        if states is not None:
            states.adapter_keys = self.adapter_keys

    def write(self, scheduled: Scheduled) -> None:
        """Write the digests of all scheduled tokens; a slot that reads wrong KV writes wrong digests."""
        starts = self._slots.num_computed_tokens[scheduled.slots]
        ends = starts + scheduled.num_tokens
        chunks = list(zip(scheduled.slots.tolist(), starts.tolist(), ends.tolist(), strict=True))
        if self._states is not None:
            self._states.step(scheduled)
        for slot, start, end in chunks:
            self._write(slot, start, self._digests(slot, end)[start:])
        for slot, start, end in chunks:
            digests = self._digests(slot, end)
            error = self._errors(slot, digests, start)[start:].sum(dtype=np.uint64)
            if self._states is not None:
                error = np.append(error, self._states.errors[slot]).sum(dtype=np.uint64)
            if error:
                self._write(slot, start, digests[start:] + error)

    def contexts(self, rows: IntArray, lengths: IntArray) -> U64:
        """Return [n] the sums of the rows at the end of lengths[i] positions, one or more, of slots rows[i]."""
        sums: U64 = np.zeros(len(rows), np.uint64)
        for index, (slot, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            digests = self._digests(slot, length)
            # An array: numpy warns of sums of scalars beyond 64 bits.
            read = np.append(contributions(digests, self._keys[:length]), self._errors(slot, digests, length - 1)[-1:])
            if self._states is not None:
                read = np.append(read, self._states.errors[slot])
            sums[index] = read.sum(dtype=np.uint64)
        return sums

    def prompt_contexts(self, wanted: PromptRows) -> U64:
        """Return [Q] the context sum of each wanted prompt token: over all positions before it."""
        owner, lengths = spans(wanted.starts, wanted.counts)
        return self.contexts(wanted.slots[owner], lengths)

    def _digests(self, slot: int, length: int) -> U64:
        """Return [length] what the slot's tokens give."""
        positions = np.arange(length)
        token_ids = self._slots.token_ids[slot, :length].astype(np.int64)
        digests: U64 = token_hashes(token_ids, positions, self.adapter_keys[np.full(length, slot)]).cumsum(
            dtype=np.uint64
        )
        return digests

    def _write(self, slot: int, start: int, digests: U64) -> None:
        index, offsets = np.divmod(np.arange(start, start + len(digests)), self._pools.block_size)
        for table, (group, strip, _) in enumerate(self._strips):
            pages = self._slots.tables[slot, table, index]
            self._pools.device[pages, offsets] = digests + _salt(group, strip)
            if self._states is not None:
                self._pools.spoil_states(pages)

    def _errors(self, slot: int, digests: U64, start: int) -> U64:
        """Return [length] by row what its reads differ from what its tokens give; rows before `start` are not read."""
        length = len(digests)
        errors: U64 = np.zeros(length, np.uint64)
        rows = np.arange(start, length)
        for table, (group, strip, shape) in enumerate(self._strips):
            first = max(0, start + 1 - shape.window) if shape.window else 0
            positions = np.arange(first, length)
            index, offsets = np.divmod(positions, self._pools.block_size)
            right = contributions(digests[first:], self._keys[first:length])
            read = self._pools.device[self._slots.tables[slot, table, index], offsets] - _salt(group, strip)
            wrong = np.concatenate(
                (np.zeros(1, np.uint64), (contributions(read, self._keys[first:length]) - right).cumsum())
            )
            begins = np.maximum(rows + 1 - shape.window, 0) if shape.window else np.zeros(len(rows), np.int64)
            errors[start:] += wrong[rows + 1 - first] - wrong[begins - first]
        return errors


def _salt(group: int, strip: int) -> np.uint64:
    """Return what distinguishes the pages of a strip; 0 in the first one of the first group."""
    return np.uint64(mix(group * 64 + strip)) if group or strip else np.uint64(0)
