"""Tiles and parts of exact products: by the weight's shape and type alone, but for the rows of x that a tile holds."""

from __future__ import annotations

from executor_svc.gpu.kernels.linear_w8 import W8Tile

REFERENCE_ROWS = 64
"""Rows of the tile that defines a result; tiles of other numbers of rows must give its bits."""
SPLIT_ROWS = REFERENCE_ROWS
"""Up to so many rows each part of the columns is a program of its own."""
EXPERT_ROWS = REFERENCE_ROWS
"""Rows of the blocks of experts, whatever the number of tokens: one tile for all."""

_TILE_FEATURES = 64
_PROGRAMS = 96
"""Wanted for few rows: most multiprocessors of a large GPU."""
_MOST_PARTS = 8
_LEAST_PART = 512
_PART_STEP = 128
"""Parts are in whole steps of all kernels."""

_16_BITS = (
    W8Tile(rows=16, features=64, inner=64, num_warps=4, num_stages=6, may_split=True),
    W8Tile(rows=64, features=64, inner=64, num_warps=4, num_stages=3, may_split=True),
    W8Tile(rows=128, features=128, inner=64, num_warps=8, num_stages=3, may_split=False),
)
_8_BITS = (
    W8Tile(rows=16, features=64, inner=64, num_warps=4, num_stages=6, may_split=True),
    W8Tile(rows=64, features=64, inner=64, num_warps=4, num_stages=5, may_split=True),
    W8Tile(rows=128, features=128, inner=64, num_warps=8, num_stages=3, may_split=False),
)
_8_BIT_ROWS = (
    W8Tile(rows=16, features=64, inner=128, num_warps=4, num_stages=6, may_split=True),
    W8Tile(rows=64, features=64, inner=128, num_warps=4, num_stages=5, may_split=True),
    W8Tile(rows=128, features=128, inner=128, num_warps=8, num_stages=3, may_split=False),
)
_32_BITS = (
    W8Tile(rows=16, features=64, inner=16, num_warps=4, num_stages=3, may_split=True),
    W8Tile(rows=64, features=64, inner=16, num_warps=4, num_stages=2, may_split=True),
)
"""Of products without tensor cores."""


def product_tiles(weight_bytes: int, narrow_rows: bool = False) -> tuple[W8Tile, ...]:
    """Return the tiles for weights of numbers of so many bytes, by rows, ascending; narrow_rows: x is in fp8, too."""
    if narrow_rows:
        return _8_BIT_ROWS
    return {1: _8_BITS, 2: _16_BITS, 4: _32_BITS}[weight_bytes]


def reference_tile(tiles: tuple[W8Tile, ...]) -> W8Tile:
    """Return the tile that defines the bits."""
    return next(tile for tile in tiles if tile.rows == REFERENCE_ROWS)


def part_columns(out_features: int, in_features: int) -> int:
    """Return the columns of a part, all but the last: of all numbers of rows, on all GPUs."""
    wanted = -(-_PROGRAMS // -(-out_features // _TILE_FEATURES))
    parts = max(1, min(wanted, _MOST_PARTS, in_features // _LEAST_PART))
    return -(-in_features // (parts * _PART_STEP)) * _PART_STEP


def num_parts(out_features: int, in_features: int) -> int:
    """Return the number of parts."""
    return -(-in_features // part_columns(out_features, in_features))


def sums_size(out_features: int, in_features: int) -> int:
    """Return the float32 numbers that products of this shape need as workspace."""
    parts = num_parts(out_features, in_features)
    return parts * SPLIT_ROWS * out_features if parts > 1 else 0
