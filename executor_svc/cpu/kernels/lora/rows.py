"""The rows of a step that have adapters, sorted by place and cut into tiles, at fixed addresses for launches."""

from __future__ import annotations

import itertools

import numpy as np

from executor_svc.plan.arrays import IntArray

TILE_ROWS = 8
"""Rows of a tile at most: they share each loaded number of an adapter."""

TILE_FIELDS = 3
"""Fields of a tile: place, first row in the order by place, number of rows."""

_names = itertools.count()


class CpuAdapterRows:
    """Implements `device.adapters.AdapterRows`."""

    def __init__(self, max_rows: int) -> None:
        self.name = f"adapter tiles{next(_names)}"
        self.num_tiles = 0
        self.max_rows = max_rows
        self.order = np.zeros(max_rows, np.int64)
        """Rows by place."""
        self.tiles = np.zeros((max_rows, TILE_FIELDS), np.int64)

    def fill(self, places: IntArray) -> None:
        """As in `AdapterRows`; rows of one place stay in their order."""
        rows = np.flatnonzero(places >= 0)
        self.num_tiles = 0
        if not len(rows):
            return
        chosen = places[rows]
        by_place = chosen.argsort(kind="stable")
        self.order[: len(rows)] = rows[by_place]
        chosen = chosen[by_place]
        starts = np.flatnonzero(np.diff(chosen, prepend=NOT_A_PLACE))
        counts = np.diff(starts, append=len(rows))
        per_place = -(-counts // TILE_ROWS)
        owner = np.repeat(np.arange(len(starts)), per_place)
        offset = (np.arange(len(owner)) - np.repeat(np.cumsum(per_place) - per_place, per_place)) * TILE_ROWS
        self.num_tiles = len(owner)
        tiles = self.tiles[: len(owner)]
        tiles[:, 0] = chosen[starts[owner]]
        tiles[:, 1] = starts[owner] + offset
        tiles[:, 2] = np.minimum(counts[owner] - offset, TILE_ROWS)


NOT_A_PLACE = -2
