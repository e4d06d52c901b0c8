"""A step of a product of bfloat16 through tiles: 32 numbers of the inner dimension, and what is left of it at the end.

A tile product takes 32 numbers of the inner dimension: it sums the products of even places and those of odd places
from zero, each in ascending order, and adds the sum of both to the element. Every element is a chain of such steps,
ascending, the last one filled up with zeros, so an element's bits depend only on its row of x and its row of the
weight. Other levels take the products one by one, so their bits differ.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen import tiles
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Emitter, Int
from executor_svc.cpu.kernels.codegen.tiles import TILE_BYTES, TILE_ROWS
from executor_svc.cpu.kernels.matmul_tiles import Output
from executor_svc.cpu.kernels.panel_layout import PANEL

STEP = 32
"""Numbers of a row of x that one tile product multiplies."""

SIZE = ITEM_BYTES["bfloat16"]
PAIR_BYTES = 2 * SIZE * PANEL
"""Bytes of a panel's two consecutive numbers of the inner dimension."""
STEP_BYTES = STEP // 2 * PAIR_BYTES
"""Bytes of a panel's part that a step multiplies."""
SUM_BYTES = 4 * PANEL
"""Bytes of a row of sums."""
TILES_OF_SUMS = 4
NUMBERS = ir.VectorType(ir.IntType(16), STEP)
"""A step's numbers of a row of x."""
_FACTORS = (4, 5)
_WEIGHTS = (6, 7)
"""Tiles: 0 to 3 are sums of 16 rows and 16 columns, the upper rows first, then 32 rows of x, then 32 columns."""


def configure(emit: Emitter, memory: Int, rows: Int) -> None:
    """Set the tiles' sizes for 1 to 32 rows of x. The lower tiles have a row even where nothing uses them."""
    upper, lower = rows.least(TILE_ROWS), (rows - TILE_ROWS).most(1)
    whole = emit.integer(TILE_ROWS)
    tiles.configure(emit, memory, (upper, upper, lower, lower, upper, lower, whole, whole))


def place_of_sums(tile: int) -> int:
    """Return the offset of a tile of sums in memory that has rows of SUM_BYTES."""
    return tile // 2 * TILE_ROWS * SUM_BYTES + tile % 2 * TILE_BYTES


def add_products(emit: Emitter, halves: int, x: Int, half_bytes: Int | int, x_stride: Int, weight: Int) -> None:
    """Multiply 32 numbers of the inner dimension: rows of x that are x_stride bytes apart, and a part of a panel.

    half_bytes: the distance of the lower 16 rows.
    """
    for half in range(halves):
        tiles.load(emit, _FACTORS[half], x + emit.integer(half_bytes) * half, x_stride)
    for half in range(2):
        tiles.load(emit, _WEIGHTS[half], weight + half * TILE_BYTES, PAIR_BYTES)
    for row_half in range(halves):
        for half in range(2):
            tiles.add_product(emit, 2 * row_half + half, _FACTORS[row_half], _WEIGHTS[half])


def write_rows(
    emit: Emitter, output: Output, sums: Int, rows: Int, y: Int, y_stride: Int, bias: Int, left: Int | None
) -> None:
    """Write rows of sums, which are SUM_BYTES apart, as the first `left` columns of a panel of y; None: all."""

    def finish(row: Int, _: Any) -> None:
        for half in range(2):
            total = emit.load(sums + row * SUM_BYTES + 4 * LANES * half, "float32")
            output.write(emit, total, y + row * y_stride, bias, half, left)

    emit.loop(0, rows, 1, finish)


def copy_rest_of_panel(emit: Emitter, weight: Int, pairs: Int, into: Int) -> None:
    """Copy `pairs` < 16 pairs of a panel's inner dimension to 16 pairs, with zeros."""

    def copy(pair: Int, _: Any) -> None:
        for place in range(0, PAIR_BYTES, TILE_BYTES):
            emit.store(
                emit.load(weight + pair * PAIR_BYTES + place, "float32"), into + pair * PAIR_BYTES + place, "float32"
            )

    def clear(pair: Int, _: Any) -> None:
        for place in range(0, PAIR_BYTES, TILE_BYTES):
            emit.store(emit.vec(0.0), into + pair * PAIR_BYTES + place, "float32")

    emit.loop(0, pairs, 1, copy)
    emit.loop(pairs, STEP // 2, 1, clear)


def load_numbers(emit: Emitter, address: Int, count: Int) -> Any:
    """Read `count` bfloat16 numbers; further ones of 32 are 0, without a read."""
    builder, i32 = emit.builder, ir.IntType(32)
    wide, flags = ir.VectorType(i32, STEP), ir.VectorType(ir.IntType(1), STEP)
    nothing = ir.Constant(wide, ir.Undefined)
    one = builder.insert_element(nothing, builder.trunc(count.value, i32), ir.Constant(i32, 0))
    every = builder.shuffle_vector(one, nothing, ir.Constant(wide, [0] * STEP))
    mask = builder.icmp_signed("<", ir.Constant(wide, list(range(STEP))), every)
    function = emit.declare("llvm.masked.load.v32i16.p0", NUMBERS, [NUMBERS.as_pointer(), i32, flags, NUMBERS])
    zeros = ir.Constant(NUMBERS, [0] * STEP)
    return builder.call(function, [emit.pointer(address, NUMBERS), ir.Constant(i32, SIZE), mask, zeros])
