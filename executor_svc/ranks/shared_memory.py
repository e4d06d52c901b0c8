"""Memory that all ranks of one machine have."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class SharedMemory:
    """One rank's view of it."""

    def __init__(self, descriptor: int, meet: Callable[[int], None]) -> None:
        """meet: called before it is mapped, with how many bytes; rank 0 gives it its size, and the others wait."""
        self.descriptor = descriptor
        self._meet = meet

    def open(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return it, all zeros at first; it lives as long as the array. Raises StartError."""
        self._meet(num_bytes)
        return np.frombuffer(mmap.mmap(self.descriptor, num_bytes), np.uint8)
