"""Large memory of the host, in huge pages: of weights in panels, and of KV pools."""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

_LEAST_MAPPED_BYTES = 1 << 20
_HUGE_PAGE_BYTES = 1 << 21
_SLAB_BYTES = 1 << 26
_MOST_BYTES_IN_SLAB = 1 << 23
_ALIGNMENT = 64


def new_memory(num_bytes: int) -> Tensor:
    """Return [num_bytes] uint8, all zeros.

    Much of it is in huge pages where the system has them: those take a fifth of the time to fill, and fewer entries of
    the table by which the processor finds pages.
    """
    if num_bytes < _LEAST_MAPPED_BYTES or not _has_huge_pages():
        return torch.zeros(num_bytes, dtype=torch.uint8)
    return torch.frombuffer(_mapped(num_bytes), dtype=torch.uint8)


class WeightMemory:
    """Memory of weights that stay as long as their model, side by side: a small one alone lies in no huge page."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab: mmap.mmap | None = None
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8, all zeros; a slab is freed with the last weight in it."""
        if not 0 < num_bytes <= _MOST_BYTES_IN_SLAB or not _has_huge_pages():
            return new_memory(num_bytes)
        with self._lock:
            if self._slab is None or self._used + num_bytes > len(self._slab):
                self._slab = _mapped(_SLAB_BYTES + _HUGE_PAGE_BYTES)
                self._used = -torch.frombuffer(self._slab, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES
            taken = torch.frombuffer(self._slab, dtype=torch.uint8, offset=self._used, count=num_bytes)
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken


new_weight_memory = WeightMemory().take
"""Of all models of this process."""


def _has_huge_pages() -> bool:
    return hasattr(mmap, "MADV_HUGEPAGE")


def _mapped(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
