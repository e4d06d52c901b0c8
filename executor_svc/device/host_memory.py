"""Large memory of the host, in huge pages: of weights in panels, and of KV pools."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_LEAST_MAPPED_BYTES = 1 << 20


def new_memory(num_bytes: int) -> Tensor:
    """Return [num_bytes] uint8, all zeros.

    Much of it is in huge pages where the system has them: those take a fifth of the time to fill, and fewer entries of
    the table by which the processor finds pages.
    """
    if num_bytes < _LEAST_MAPPED_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
