"""The block moves of a step, the same on every device."""

from __future__ import annotations

import time
from typing import Protocol

from cadenza_common.plan.plan import StepPlan


class BlockPools(Protocol):
    """Moves blocks, as `device.kv_cache.KVCache` does. Ids are lists or int64 tensors."""

    def copy(self, sources: list[int], destinations: list[int]) -> None: ...
    def swap_out(self, device_ids: list[int], host_ids: list[int]) -> None: ...
    def swap_in(self, host_ids: list[int], device_ids: list[int]) -> None: ...


def move_blocks(pools: BlockPools, plan: StepPlan) -> int:
    """Swap out, copy, swap in, in this order; return the nanoseconds that this took, 0 without moves."""
    moves_ns = 0
    for moves, move in ((plan.swap_out, pools.swap_out), (plan.copies, pools.copy), (plan.swap_in, pools.swap_in)):
        if moves:
            began = time.monotonic_ns()
            move(list(moves.sources), list(moves.destinations))
            moves_ns += time.monotonic_ns() - began
    return moves_ns
