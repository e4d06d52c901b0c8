"""A digest of all that is written to slots, by which ranks find that they hold the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from executor_svc.plan.arrays import BoolArray, IntArray


class Writes:
    """XXH3-64 over the columns that were written since `clear`, in their order: its cost is that of changes."""

    def __init__(self, kept: bool = True) -> None:
        """kept: False for a digest that nobody asks for, which costs nothing."""
        self._hash = xxhash.xxh3_64() if kept else None

    def clear(self) -> None:
        """Begin anew."""
        if self._hash is not None:
            self._hash.reset()

    def add(self, *columns: IntArray | BoolArray | Sequence[int]) -> None:
        """Add columns of integers or flags, of any width."""
        if self._hash is not None:
            for column in columns:
                self._hash.update(np.ascontiguousarray(column, np.int64).data)

    def digest(self) -> bytes:
        """Return 8 bytes; none if it is not kept."""
        return b"" if self._hash is None else self._hash.digest()
