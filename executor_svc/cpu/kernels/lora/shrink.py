"""The first product of adapters, x @ a.T: sums of the rows of a tile, in fp32.

A sum is two chains of fused operations over halves of the inner dimension, each ascending, which `expand` adds. So its
bits depend on its row of x and its row of a only, and two threads share the work of a single tile.
"""

from __future__ import annotations

from collections.abc import Callable

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.lora.rows import TILE_FIELDS
from executor_svc.cpu.kernels.matmul import split_rows
from executor_svc.cpu.kernels.matmul_tiles import dot, has_pairs, load_pair
from executor_svc.cpu.kernels.panel_layout import UNIT_BYTES, inner_step, load_weights, widened_weights

HALVES = 2
"""Items of a tile, in both products."""

STRIP_UNIT_BYTES = LANES * UNIT_BYTES
"""Of the same unit of all rows of a strip."""


def heights(code: Code) -> tuple[int, ...]:
    """Return the rows that are computed together, most first: their sums fit into registers."""
    return (8, 4, 2, 1) if code.isa.has("avx512f") else (4, 2, 1)


def shrink(code: Code, dtype: Dtype) -> str:
    """Add the kernel sums[position, half] = x[row, half] @ a[:, half].T; returns its name.

    Items: HALVES for each tile. Arguments: tiles; the table of tiles and the order of rows (`rows.CpuAdapterRows`);
    x [rows, K]; K; the table of places and the bytes of its rows (`places`); sums [positions, HALVES, any] float32 and
    the bytes of a half of a position.
    """
    step = inner_step(dtype)

    def body(
        emit: Emitter,
        item: Int,
        _: Int,
        __: Int,
        tiles: Int,
        order: Int,
        x: Int,
        inner: Int,
        places: Int,
        place_bytes: Int,
        sums: Int,
        half_bytes: Int,
    ) -> None:
        computed = {height: row_sums(code, dtype, height) for height in heights(code)}
        tile = ShrinkTile.load(emit, tiles, item, places, place_bytes)
        strips, a = emit.load_int(tile.place), emit.load_int(tile.place + 8)
        units = (inner + (step - 1)) // step
        middle = (units + 1) // 2
        start = tile.half * middle
        stop = (start + middle).least(units)
        stride = half_bytes * HALVES

        def strip(which: Int, _: list[Vec]) -> None:
            weights = a + which * units * STRIP_UNIT_BYTES
            into = sums + (tile.first * HALVES + tile.half) * half_bytes + which * (LANES * 4)
            for at, count, height in split_rows(tile.rows, tuple(computed)):

                def call(index: Int, _: list[Vec], at: Int = at, height: int = height) -> None:
                    row = at + index * height
                    rows = order + (tile.first + row) * 8
                    computed[height](emit, rows, x, inner, weights, start, stop, into + row * stride, stride)

                emit.loop(0, count, 1, call)

        emit.loop(0, strips, 1, strip)

    return code.kernel(f"lora_shrink_{dtype}", 9, body)


class ShrinkTile:
    """A tile of rows, and the half of its work that an item does."""

    def __init__(self, place: Int, first: Int, rows: Int, half: Int) -> None:
        """place: address of the place's fields; first: position of the first row in the order."""
        self.place, self.first, self.rows, self.half = place, first, rows, half

    @staticmethod
    def load(emit: Emitter, tiles: Int, item: Int, places: Int, place_bytes: Int) -> ShrinkTile:
        """Emit: read the fields of an item's tile."""
        fields = tiles + item // HALVES * (TILE_FIELDS * 8)
        place, first, rows = (emit.load_int(fields + 8 * field) for field in range(TILE_FIELDS))
        return ShrinkTile(places + place * place_bytes, first, rows, item % HALVES)


def row_sums(code: Code, dtype: Dtype, height: int) -> Callable[..., None]:
    """Add a helper that computes 16 sums of `height` rows; returns a function that emits a call.

    Its arguments: the place of the first row's index; x; K; a strip of a matrix; the first unit of K and the one to
    stop before; the place of the first row's sums, float32, and the distance of the rows'.
    """
    pairs, step = has_pairs(code.isa, dtype), inner_step(dtype)

    def body(
        emit: Emitter, rows: Int, x: Int, inner: Int, weights: Int, start: Int, stop: Int, into: Int, stride: Int
    ) -> None:
        row_bytes = inner * ITEM_BYTES[dtype]
        sources = [x + emit.load_int(rows + 8 * row) * row_bytes for row in range(height)]

        def add(unit: Int, sums: list[Vec], last: bool = False) -> list[Vec]:
            loaded = load_weights(emit, weights + unit * STRIP_UNIT_BYTES, dtype)
            places = [source + unit * UNIT_BYTES for source in sources]
            if dtype == "float32":
                floats = Vec(emit, loaded)
                return [
                    emit.load_all(place, dtype).times_plus(floats, total)
                    for place, total in zip(places, sums, strict=True)
                ]
            if pairs:
                return [
                    dot(emit, total, load_pair(emit, place, last), loaded)
                    for place, total in zip(places, sums, strict=True)
                ]
            both = widened_weights(emit, loaded, dtype)
            return [_add_pair(emit, place, total, both, last) for place, total in zip(places, sums, strict=True)]

        whole = stop.least(inner // step)
        sums = emit.loop(start, whole, 1, add, [emit.vec(0.0)] * height)
        if step > 1:  # odd K: the last number has no partner
            sums = emit.loop(whole.most(start), stop, 1, lambda unit, each: add(unit, each, True), sums)
        for row, total in enumerate(sums):
            emit.store(total, into + stride * row, "float32")

    return code.helper(f"lora_shrink_{dtype}_{height}", 8, body)


def _add_pair(emit: Emitter, place: Int, total: Vec, weights: list[Vec], last: bool) -> Vec:
    """Add the products of a pair of bfloat16 of x, one after the other."""
    numbers = widened_weights(emit, load_pair(emit, place, last), "bfloat16")
    for number, floats in zip(numbers, weights, strict=True):
        total = number.times_plus(floats, total)
    return total
