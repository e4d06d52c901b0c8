"""Up to 32 rows of a panel through tiles, with rows of x as they are in memory. Reading the weight sets the pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executor_svc.cpu.kernels.amx.steps import (
    NUMBERS,
    STEP,
    STEP_BYTES,
    SUM_BYTES,
    add_products,
    copy_rest_of_panel,
    load_numbers,
    place_of_sums,
    write_rows,
)
from executor_svc.cpu.kernels.codegen import tiles
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Emitter, Int
from executor_svc.cpu.kernels.codegen.tiles import TILE_BYTES, TILE_ROWS
from executor_svc.cpu.kernels.matmul_tiles import Output

FEW_ROWS = 2 * TILE_ROWS


def few_rows(code: Code, output: Output, halves: int) -> Callable[..., None]:
    """Add a helper that computes up to 16 rows (one half) or 17 to 32 (two halves) of one panel.

    The tiles are configured for its number of rows. Returns a function that emits a call. Its arguments: x, and the
    distance of its rows in bytes; a panel, and the one that this thread will probably need next; the inner dimension;
    y, and the distance of its rows; the bias; the columns that it writes; the rows.
    """

    def body(
        emit: Emitter,
        x: Int,
        x_stride: Int,
        weight: Int,
        coming: Int,
        inner: Int,
        y: Int,
        y_stride: Int,
        bias: Int,
        left: Int,
        rows: Int,
    ) -> None:
        memory = tiles.scratch(emit, 2 * TILE_ROWS * SUM_BYTES)
        for tile in range(2 * halves):
            tiles.clear(emit, tile)
        steps, half_bytes = inner // STEP, x_stride * TILE_ROWS

        def advance(index: Int, _: Any) -> None:
            offset = index * STEP_BYTES
            emit.prefetch(coming + offset, STEP_BYTES, level=2)
            add_products(emit, halves, x + index * TILE_BYTES, half_bytes, x_stride, weight + offset)

        def rest() -> None:
            factors, weights = memory, memory + 2 * TILE_ROWS * TILE_BYTES
            _copy_rest(emit, x + steps * TILE_BYTES, x_stride, rows, inner % STEP, factors)
            copy_rest_of_panel(emit, weight + steps * STEP_BYTES, (inner % STEP + 1) // 2, weights)
            add_products(emit, halves, factors, TILE_ROWS * TILE_BYTES, emit.integer(TILE_BYTES), weights)

        emit.loop(0, steps, 1, advance)
        emit.when(emit.integer(0).less(inner % STEP), rest)
        for tile in range(2 * halves):
            tiles.store(emit, tile, memory + place_of_sums(tile), SUM_BYTES)
        write_rows(emit, output, memory, rows, y, y_stride, bias, left)

    return code.helper(f"tile_amx_{output}_{halves}", 10, body)


def _copy_rest(emit: Emitter, x: Int, x_stride: Int, rows: Int, count: Int, into: Int) -> None:
    """Copy `count` < 32 numbers of each row of x to rows of 32 numbers, with zeros."""

    def copy(row: Int, _: Any) -> None:
        emit.builder.store(
            load_numbers(emit, x + row * x_stride, count), emit.pointer(into + row * TILE_BYTES, NUMBERS)
        )

    emit.loop(0, rows, 1, copy)
