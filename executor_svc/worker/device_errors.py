"""The meaning of a device's errors: out of memory, or the device lost."""

from __future__ import annotations

import torch

_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
_DEVICE_LOST = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "launch timed out",
)


def is_out_of_memory(exc: Exception) -> bool:
    """Return whether a step failed for lack of memory. Only one allocator has an error class of its own for this."""
    return isinstance(exc, MemoryError | torch.OutOfMemoryError) or _mentions(exc, _OUT_OF_MEMORY)


def is_device_lost(exc: Exception) -> bool:
    """Return whether this process has lost the device, as after an illegal access on a GPU.

    Triton has no error class for this.
    """
    return isinstance(exc, torch.AcceleratorError) or _mentions(exc, _DEVICE_LOST)


def _mentions(exc: Exception, phrases: tuple[str, ...]) -> bool:
    return any(phrase in str(exc) for phrase in phrases)
