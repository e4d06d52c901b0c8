"""KV pools of the simulated executor: a digest per token position in place of keys and values.

A page holds KV or a part of a state, and what is written as one spoils the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cadenza_common.plan.plan import BlockMoves, StepPlan
from executor_svc.plan.arrays import IntArray, ints
from executor_svc.plan.limits import GroupShape
from executor_svc.simulated.hashing import U64

_DIGEST_BYTES = 8
_SPOILT = np.uint64(0xBAD_0BAD_0BAD)


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The sizes of the pools."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    kv_groups: tuple[GroupShape, ...] = ()
    pages_per_state: int = 0

    @property
    def bytes_per_block(self) -> int:
        return _DIGEST_BYTES * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.bytes_per_block * (self.num_device_blocks + self.num_host_blocks)


class DigestPools:
    """A device and a host pool, [num_blocks, block_size] uint64 each; 0: a place never written."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int, block_size: int, state_width: int = 0) -> None:
        """state_width: numbers that a page holds of a state; 0: there are no states."""
        self.block_size = block_size
        self.device_states: U64 = np.zeros((num_device_blocks, state_width), np.uint64)
        self.host_states: U64 = np.zeros((num_host_blocks, state_width), np.uint64)
        """[num_blocks, state_width] of each page as a part of a state."""
        self.device: U64 = np.zeros((num_device_blocks, block_size), np.uint64)
        self.host: U64 = np.zeros((num_host_blocks, block_size), np.uint64)
        # Sums of device blocks' contributions, and the index in a table that they were read at; -1: not since a write.
        self.sums: U64 = np.zeros(num_device_blocks, np.uint64)
        self.summed_at = np.full(num_device_blocks, -1, np.int64)

    def move(self, plan: StepPlan) -> int:
        """Swap out, copy, swap in, in this order; return the number of moved blocks."""
        self.summed_at[ints(plan.copies.destinations)] = -1
        self.summed_at[ints(plan.swap_in.destinations)] = -1
        if self.device_states.shape[1]:
            _move(self.device_states, self.host_states, plan.swap_out)
            _move(self.device_states, self.device_states, plan.copies)
            _move(self.host_states, self.device_states, plan.swap_in)
        return (
            _move(self.device, self.host, plan.swap_out)
            + _move(self.device, self.device, plan.copies)
            + _move(self.host, self.device, plan.swap_in)
        )

    def write(self, places: IntArray, digests: U64) -> None:
        """Write digests to places of the device pool, block * block_size + offset; [n] each."""
        self.device.reshape(-1)[places] = digests
        self.summed_at[places // self.block_size] = -1

    def write_state(self, pages: IntArray, parts: U64) -> None:
        """Write the parts of a state to its pages; [n] and [n, state_width]."""
        self.device_states[pages] = parts
        self.device[pages], self.summed_at[pages] = _SPOILT, -1

    def spoil_states(self, pages: IntArray) -> None:
        """KV is written to pages: what they held of states is gone; [n]."""
        self.device_states[pages] = _SPOILT

    def read(self, places: IntArray) -> U64:
        """Return [n] the digests at places of the device pool."""
        return self.device.reshape(-1)[places]


def _move(source: U64, target: U64, moves: BlockMoves) -> int:
    if moves:
        # All sources are read before any destination is written.
        target[ints(moves.destinations)] = source[ints(moves.sources)]
    return len(moves)
