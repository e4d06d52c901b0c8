"""Where the recurrent layers' units lie in the pages of a state.

A state is a header of 64 bytes, at the beginning of its first page, and the units of its layers: memory that a kernel
reads and writes as one, such as a head's matrix. No unit lies in two pages. The pages may be any of the pool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.device.states import StateMemory
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.state_sizes import HEADER_BYTES


class UnitPlace(NamedTuple):
    """Where a unit lies."""

    page: int
    """Which of a state's pages."""
    offset: int
    """Bytes from the beginning of the page."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The table of places."""

    layers: tuple[tuple[UnitPlace, ...], ...]
    """Of each layer's units; none: the layer keeps no state."""
    pages_per_state: int
    used_bytes: int
    """Of a state: its header and its units."""

    @staticmethod
    def of(units: Sequence[Sequence[int]], page_bytes: int) -> StateLayout:
        """Pack units into pages: the largest first, each into the page with the least room that takes it.

        units: of each layer the bytes of its units, multiples of 64, of which a page holds the largest.
        """
        order = [(size, layer, index) for layer, sizes in enumerate(units) for index, size in enumerate(sizes)]
        order.sort(key=lambda each: -each[0])
        places: dict[tuple[int, int], UnitPlace] = {}
        rooms, num_pages = [(page_bytes - HEADER_BYTES, 0)], 1
        for size, layer, index in order:
            at = bisect_left(rooms, (size, 0))
            if at == len(rooms):
                rooms.append((page_bytes, num_pages))
                num_pages += 1
            room, page = rooms.pop(at)
            places[layer, index] = UnitPlace(page, page_bytes - room)
            insort(rooms, (room - size, page))
        layers = tuple(tuple(places[layer, index] for index in range(len(sizes))) for layer, sizes in enumerate(units))
        return StateLayout(layers, num_pages, HEADER_BYTES + sum(map(sum, units)))

    def memories(self, pool: Tensor) -> tuple[StateMemory | None, ...]:
        """Return each layer's memory in a pool [num_pages, page_bytes] uint8; None for layers without a state."""
        return tuple(
            StateMemory(pool, tuple(place.page for place in places), tuple(place.offset for place in places))
            if places
            else None
            for places in self.layers
        )

    def padding(self, page_bytes: int) -> float:
        """Return the part of a state's pages that holds nothing."""
        return 1 - self.used_bytes / (self.pages_per_state * page_bytes)


def page_sizes_for(sizes: set[int], units: Sequence[Sequence[int]], row: int) -> set[int]:
    """Return sizes of pages to try for a model that has units, in whole rows.

    sizes: those for its blocks. Each grows to whole units of each size, with and without the header.
    """
    kinds = {size for each in units for size in each}
    largest = max(kinds)
    grown = {-(-size // unit) * unit + header for size in sizes for unit in kinds for header in (0, HEADER_BYTES)}
    return {row * -(-size // row) for size in (*grown, *sizes) if size >= largest}


class StateHeaders:
    """The headers of states in a pool on the CPU: where the matrices of each stand."""

    def __init__(self, pool: Tensor) -> None:
        """pool: [num_pages, page_bytes] uint8."""
        self._folded: NDArray[np.int32] = pool.view(torch.int32).numpy()[:, 0]

    def read(self, tables: NDArray[np.int32], context: IntArray) -> IntArray:
        """Return [S] where the states in pages tables [S, P] stand: at 0 with no context, whatever the pages hold."""
        return np.where(context > 0, self._folded[tables[:, 0]], 0)

    def write(self, tables: Tensor, folded: Tensor) -> None:
        """Set where the states in pages tables [S, P] int32 stand: at folded [S] int32."""
        self._folded[tables.numpy()[:, 0]] = folded.numpy()
