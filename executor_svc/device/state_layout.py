"""Where the recurrent layers' units lie in the pages of a state.

A state is a header of 64 bytes, at the beginning of its first page, and the units of its layers: memory that a kernel
reads and writes as one, such as a head's matrix. No unit lies in two pages. The pages may be any of the pool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

HEADER_BYTES = 64
"""int32 `folded`, the position at which the matrices stand; the rest is reserved."""
UNIT_MULTIPLE = 64
"""Units are whole cache lines, so that no two threads write to one."""


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

    def padding(self, page_bytes: int) -> float:
        """Return the part of a state's pages that holds nothing."""
        return 1 - self.used_bytes / (self.pages_per_state * page_bytes)


def page_sizes_for(sizes: set[int], units: Sequence[Sequence[int]], row: int) -> set[int]:
    """Return sizes of pages to try for a model that has units, in whole rows.

    sizes: those for its blocks. Each grows to whole units of the largest size, with and without the header.
    """
    largest = max(max(each) for each in units if each)
    grown = {-(-size // largest) * largest + header for size in sizes for header in (0, HEADER_BYTES)}
    return {row * -(-size // row) for size in (*grown, *sizes) if size >= largest}
