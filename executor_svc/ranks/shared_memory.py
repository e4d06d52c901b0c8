"""Memory that all ranks of one machine have."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A file in memory."""

    descriptor: int

    def map(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return it, once it has this size; all zeros at first. It lives as long as the array."""
        return np.frombuffer(mmap.mmap(self.descriptor, num_bytes), np.uint8)
