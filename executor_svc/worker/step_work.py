"""What steps do alike on every device: block moves, and telling what an error means."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from executor_svc.plan.plan import StepPlan

_NO_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
_LOST = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "launch timed out",
)


class BlockPools(Protocol):
    """What moves blocks: `kv_cache.KVCache`. Ids are lists or int64 tensors."""

    def copy(self, sources: list[int], destinations: list[int]) -> None: ...
    def swap_out(self, device_ids: list[int], host_ids: list[int]) -> None: ...
    def swap_in(self, host_ids: list[int], device_ids: list[int]) -> None: ...


def move_blocks(pools: BlockPools, plan: StepPlan) -> int:
    """Swap-out, copy, swap-in, in this order; returns the nanoseconds that took, 0 if there was nothing to move."""
    taken_ns = 0
    for moves, move in ((plan.swap_out, pools.swap_out), (plan.copies, pools.copy), (plan.swap_in, pools.swap_in)):
        if len(moves.sources):
            began = time.monotonic_ns()
            move(moves.sources.tolist(), moves.destinations.tolist())
            taken_ns += time.monotonic_ns() - began
    return taken_ns


def is_out_of_memory(exc: Exception) -> bool:
    """Did a step fail for want of memory; but for one allocator, that is an error like any other."""
    return isinstance(exc, MemoryError | torch.OutOfMemoryError) or _says(exc, _NO_MEMORY)


def is_device_lost(exc: Exception) -> bool:
    """Is the device lost for this process, as after an illegal access on a GPU; Triton has no error for that."""
    return isinstance(exc, torch.AcceleratorError) or _says(exc, _LOST)


def _says(exc: Exception, words: tuple[str, ...]) -> bool:
    return any(each in str(exc) for each in words)
