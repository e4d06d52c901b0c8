"""Tiles of `all_rows`, and how the steps of all tiles of a weight are shared by the programs that run at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from executor_svc.device.stored_linear import QuantFormat


@dataclass(frozen=True, slots=True)
class AllRowsTile:
    """All rows of x, up to `rows`, with some features, by the number of rows."""

    rows: int
    features: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """That run at once, by registers and shared memory."""

    @property
    def max_registers(self) -> int:
        """Of a thread: a multiprocessor has 65,536."""
        return min(255, _REGISTERS // (32 * self.num_warps * self.programs_per_sm))


_REGISTERS = 65536
TILES = (
    AllRowsTile(rows=32, features=128, num_warps=8, num_stages=4, programs_per_sm=2),
    AllRowsTile(rows=64, features=128, num_warps=8, num_stages=4, programs_per_sm=2),
    AllRowsTile(rows=128, features=128, num_warps=8, num_stages=4, programs_per_sm=1),
    AllRowsTile(rows=256, features=128, num_warps=8, num_stages=3, programs_per_sm=1),
)
"""Not measured: they compile without spills in their loops."""
_64_OF_BYTES = replace(TILES[1], num_stages=3)
"""Two programs with codes of 8 bits in 4 stages do not fit the shared memory."""
TILE_ROWS = tuple(tile.rows for tile in TILES)
"""Maximum rows of each kernel, ascending."""
MOST_ROWS = TILE_ROWS[-1]

_LEAST_STEPS = 4
"""Of a program."""


@dataclass(frozen=True, slots=True)
class StepShare:
    """How the steps of all tiles are shared."""

    programs: int
    steps: int
    """Of a program; the last may have fewer."""


def all_rows_tile(rows: int, kind: QuantFormat) -> AllRowsTile:
    """Return the tile for so many rows, up to MOST_ROWS."""
    tile = next(tile for tile in TILES if rows <= tile.rows)
    return _64_OF_BYTES if tile is TILES[1] and kind.bits == 8 else tile


def share_of(tile: AllRowsTile, out_features: int, steps: int, num_sms: int) -> StepShare:
    """Return how a weight's steps are shared; no program is without one."""
    units = -(-out_features // tile.features) * steps
    wanted = max(1, min(tile.programs_per_sm * num_sms, units // _LEAST_STEPS))
    each = -(-units // wanted)
    return StepShare(-(-units // each), each)
