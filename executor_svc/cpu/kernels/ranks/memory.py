"""Memory that the ranks of one host share: each rank's arrivals, and the data that it gives the others.

Every exchange has a number, which each rank counts. Its numbers lie in one of two halves, by that number's parity: a
rank that writes to a half has seen all others arrive at the exchange in between, so they have read this half before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LINE = 64
"""Bytes of a cache line: what another rank writes lies in a line of its own."""


@dataclass(frozen=True, slots=True)
class ExchangeSizes:
    """What the exchanges of a model's steps need."""

    num_ranks: int
    max_tokens: int
    hidden_size: int
    max_logits: int
    """Rows of logits."""
    vocab_size: int

    @property
    def control_bytes(self) -> int:
        """A line for each rank, and one for the failure."""
        return LINE * (self.num_ranks + 1)

    @property
    def sums_bytes(self) -> int:
        """Of one half."""
        return self.num_ranks * self.rows_bytes

    @property
    def rows_bytes(self) -> int:
        """Of one half; rows of a rank."""
        return _whole_lines(self.max_tokens * self.hidden_size * 4)

    @property
    def logits_bytes(self) -> int:
        """Of one half."""
        return _whole_lines(self.max_logits * self.vocab_size * 4)

    @property
    def num_bytes(self) -> int:
        """Of the whole memory, which begins as zeros."""
        return self.control_bytes + 2 * (self.sums_bytes + self.rows_bytes + self.logits_bytes)


class ExchangeMemory:
    """Addresses in the memory of all ranks, as one of them sees it."""

    def __init__(self, memory: NDArray[np.uint8], sizes: ExchangeSizes) -> None:
        """memory: [num_bytes], the same bytes in every rank."""
        assert memory.nbytes >= sizes.num_bytes
        self.sizes = sizes
        self._memory = memory
        start = int(memory.ctypes.data)
        self.arrivals = start
        """A rank's number of exchanges that it has given its part to, int64, a line apart."""
        self.sums = start + sizes.control_bytes
        self.rows = self.sums + 2 * sizes.sums_bytes
        self.logits = self.rows + 2 * sizes.rows_bytes
        control = memory[: sizes.control_bytes].view(np.int64)
        self._failed: NDArray[np.int64] = control[sizes.num_ranks * LINE // 8 :][:1]
        self._arrived: NDArray[np.int64] = control[:: LINE // 8][: sizes.num_ranks]

    @property
    def failed(self) -> int:
        """Address of 1 + the rank that failed; 0: none has, and exchanges wait for all."""
        return int(self._failed.ctypes.data)

    @property
    def failed_rank(self) -> int | None:
        """The rank that failed."""
        found = int(self._failed[0])
        return found - 1 if found else None

    def fail(self, rank: int) -> None:
        """Let every rank leave its exchanges."""
        if not self._failed[0]:
            self._failed[0] = rank + 1

    def reset(self) -> None:
        """Begin anew, while no rank is in an exchange."""
        self._failed[0] = 0
        self._arrived[:] = 0


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE
