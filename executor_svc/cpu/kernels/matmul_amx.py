"""Matrix products of bfloat16 through tiles (AMX), for one row as for many.

A tile product takes 32 numbers of the inner dimension: it sums the products of even places and those of odd places
from zero, each in ascending order, and adds the sum of both to the element. Every element is a chain of such steps,
ascending, the last one filled up with zeros, so an element's bits depend only on its row of x and its row of the
weight. They differ from those of other levels, whose chains take the products one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen import tiles
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int
from executor_svc.cpu.kernels.codegen.tiles import TILE_BYTES, TILE_ROWS
from executor_svc.cpu.kernels.panel_layout import PANEL, coming_panel, panel_item

_STEP = 32
"""Numbers of a row of x that one tile product multiplies."""

_SIZE = ITEM_BYTES["bfloat16"]
_PAIR_BYTES = 2 * _SIZE * PANEL
"""Bytes of a panel's two consecutive numbers of the inner dimension."""

_SUM_BYTES = 4 * PANEL
_FACTORS = (4, 5)
_WEIGHTS = (6, 7)
"""Tiles: 0 to 3 are sums of 16 rows and 16 columns, the upper rows first, then 32 rows of x, then 32 columns."""


def matmul(code: Code, out: Dtype, with_bias: bool) -> str:
    """Add the kernel `matmul.matmul` for bfloat16, with the same name, items and arguments; returns its name."""

    def body(
        emit: Emitter,
        item: Int,
        _: Int,
        rows: Int,
        x: Int,
        weight: Int,
        y: Int,
        inner: Int,
        columns: Int,
        bias: Int,
        ahead: Int,
        following: Int,
    ) -> None:
        upper, both = (_tile(code, out, with_bias, halves) for halves in (1, 2))
        config = tiles.scratch(emit, 64)
        work = panel_item(item, rows, columns)
        x_stride, y_stride = inner * _SIZE, columns * ITEM_BYTES[out]
        start = x + work.first * x_stride
        panel_bytes = (inner + 1) // 2 * _PAIR_BYTES
        weights = weight + work.panel * panel_bytes
        into = y + work.first * y_stride + work.panel * (PANEL * ITEM_BYTES[out])
        biases = bias + work.panel * (PANEL * _SIZE)

        def call(tile: Callable[..., None], at: Int, count: Int) -> None:
            x_part, y_part = start + at * x_stride, into + at * y_stride
            coming = coming_panel(item, ahead, work.panels, rows, weight, following, panel_bytes)
            sizes = inner, y_part, y_stride, biases, work.left, count
            tile(emit, x_part, x_stride, weights, coming, *sizes)

        def whole() -> None:
            _configure(emit, config, emit.integer(2 * TILE_ROWS))
            emit.loop(0, full, 2 * TILE_ROWS, lambda at, _: call(both, at, emit.integer(2 * TILE_ROWS)))

        def some() -> None:
            _configure(emit, config, rest)
            emit.when(rest.less(TILE_ROWS + 1), lambda: call(upper, full, rest))
            emit.when(emit.integer(TILE_ROWS).less(rest), lambda: call(both, full, rest))

        rest = work.here % (2 * TILE_ROWS)
        full = work.here - rest
        emit.when(emit.integer(0).less(full), whole)
        emit.when(emit.integer(0).less(rest), some)
        tiles.release(emit)

    return code.kernel(f"matmul_bfloat16_{out}{'_bias' if with_bias else ''}", 9, body)


def _configure(emit: Emitter, config: Int, rows: Int) -> None:
    """Set the tiles' sizes for 1 to 32 rows of x. The lower tiles have a row even where nothing uses them."""
    upper, lower = rows.least(TILE_ROWS), (rows - TILE_ROWS).most(1)
    whole = emit.integer(TILE_ROWS)
    tiles.configure(emit, config, (upper, upper, lower, lower, upper, lower, whole, whole))


def _tile(code: Code, out: Dtype, with_bias: bool, halves: int) -> Callable[..., None]:
    """Add a helper that computes up to 16 rows (one half) or 17 to 32 (two halves) of one panel.

    The tiles are configured for its number of rows, its last argument. It writes the first `left` columns.
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
        memory = tiles.scratch(emit, 2 * TILE_ROWS * _SUM_BYTES)
        for tile in range(2 * halves):
            tiles.clear(emit, tile)
        steps = inner // _STEP

        def advance(index: Int, _: Any) -> None:
            offset = index * (_STEP // 2 * _PAIR_BYTES)
            emit.prefetch(coming + offset, _STEP // 2 * _PAIR_BYTES, level=2)
            _add_products(emit, halves, x + index * TILE_BYTES, x_stride, weight + offset)

        def finish(row: Int, _: Any) -> None:
            for half in range(2):
                place, count = half * LANES, left - half * LANES
                total = emit.load(memory + row * _SUM_BYTES + 4 * place, "float32")
                if with_bias:
                    total = total + emit.load_some(bias + _SIZE * place, "bfloat16", count)
                address = y + row * y_stride + place * ITEM_BYTES[out]
                emit.store_some(total.rounded("bfloat16"), address, out, count)

        def rest() -> None:
            factors, weights = memory, memory + 2 * TILE_ROWS * TILE_BYTES
            _copy_rest(emit, x + steps * TILE_BYTES, x_stride, rows, inner % _STEP, factors)
            _copy_rest_of_panel(emit, weight + steps * (_STEP // 2 * _PAIR_BYTES), (inner % _STEP + 1) // 2, weights)
            _add_products(emit, halves, factors, emit.integer(TILE_BYTES), weights)

        emit.loop(0, steps, 1, advance)
        emit.when(emit.integer(0).less(inner % _STEP), rest)
        for tile in range(2 * halves):
            place = tile // 2 * TILE_ROWS * _SUM_BYTES + tile % 2 * TILE_BYTES
            tiles.store(emit, tile, memory + place, _SUM_BYTES)
        emit.loop(0, rows, 1, finish)

    return code.helper(f"tile_amx_{out}{'_bias' if with_bias else ''}_{halves}", 10, body)


def _add_products(emit: Emitter, halves: int, x: Int, x_stride: Int, weight: Int) -> None:
    """Multiply 32 numbers of the inner dimension: rows of x that are x_stride bytes apart, and a part of a panel."""
    for half in range(halves):
        tiles.load(emit, _FACTORS[half], x + x_stride * (half * TILE_ROWS), x_stride)
    for half in range(2):
        tiles.load(emit, _WEIGHTS[half], weight + half * TILE_BYTES, _PAIR_BYTES)
    for row_half in range(halves):
        for half in range(2):
            tiles.add_product(emit, 2 * row_half + half, _FACTORS[row_half], _WEIGHTS[half])


def _copy_rest(emit: Emitter, x: Int, x_stride: Int, rows: Int, count: Int, into: Int) -> None:
    """Copy `count` < 32 numbers of each row of x to rows of 32 numbers, with zeros."""

    def copy(row: Int, _: Any) -> None:
        emit.builder.store(
            _load_numbers(emit, x + row * x_stride, count), emit.pointer(into + row * TILE_BYTES, _NUMBERS)
        )

    emit.loop(0, rows, 1, copy)


def _copy_rest_of_panel(emit: Emitter, weight: Int, pairs: Int, into: Int) -> None:
    """Copy `pairs` < 16 pairs of a panel's inner dimension to 16 pairs, with zeros."""

    def copy(pair: Int, _: Any) -> None:
        for place in range(0, _PAIR_BYTES, TILE_BYTES):
            emit.store(
                emit.load(weight + pair * _PAIR_BYTES + place, "float32"), into + pair * _PAIR_BYTES + place, "float32"
            )

    def clear(pair: Int, _: Any) -> None:
        for place in range(0, _PAIR_BYTES, TILE_BYTES):
            emit.store(emit.vec(0.0), into + pair * _PAIR_BYTES + place, "float32")

    emit.loop(0, pairs, 1, copy)
    emit.loop(pairs, _STEP // 2, 1, clear)


_NUMBERS = ir.VectorType(ir.IntType(16), _STEP)


def _load_numbers(emit: Emitter, address: Int, count: Int) -> Any:
    """Read `count` bfloat16 numbers; further ones of 32 are 0, without a read."""
    builder, i32 = emit.builder, ir.IntType(32)
    wide, flags = ir.VectorType(i32, _STEP), ir.VectorType(ir.IntType(1), _STEP)
    nothing = ir.Constant(wide, ir.Undefined)
    one = builder.insert_element(nothing, builder.trunc(count.value, i32), ir.Constant(i32, 0))
    every = builder.shuffle_vector(one, nothing, ir.Constant(wide, [0] * _STEP))
    mask = builder.icmp_signed("<", ir.Constant(wide, list(range(_STEP))), every)
    function = emit.declare("llvm.masked.load.v32i16.p0", _NUMBERS, [_NUMBERS.as_pointer(), i32, flags, _NUMBERS])
    zeros = ir.Constant(_NUMBERS, [0] * _STEP)
    return builder.call(function, [emit.pointer(address, _NUMBERS), ir.Constant(i32, _SIZE), mask, zeros])
