"""The second product of adapters: y += scale * (sums @ b.T), in place, rounded once.

An element is one chain of fused operations over the rank, ascending, then one with the scale and y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.lora.places import PART_FIELDS, PLACE_FIELDS
from executor_svc.cpu.kernels.lora.shrink import HALVES, ShrinkTile, heights
from executor_svc.cpu.kernels.matmul import split_rows
from executor_svc.cpu.kernels.matmul_tiles import Output
from executor_svc.cpu.kernels.panel_layout import UNIT_BYTES, inner_step, load_weights, widened_weights


@dataclass(frozen=True, slots=True)
class _ExpandedPart:
    """The fields of a part of a place."""

    first_sum: Int
    units: Int
    first_column: Int
    columns: Int
    b: Int
    scale: Int
    """Address."""

    @staticmethod
    def load(emit: Emitter, place: Int, which: Int) -> _ExpandedPart:
        fields = place + (which * PART_FIELDS + PLACE_FIELDS) * 8
        first_sum, units, first_column, columns, b = (emit.load_int(fields + 8 * field) for field in range(5))
        return _ExpandedPart(first_sum, units, first_column, columns, b, fields + 8 * 5)


def expand(code: Code, output: Output) -> str:
    """Add the kernel that adds the sums' products with b to y; returns its name.

    Items: HALVES for each tile, each with a half of every part's strips of b. Arguments: tiles; the table of tiles, the
    order of rows; y; the bytes of a row of y; the table of places and the bytes of its rows; sums, the bytes of a half
    of a position, as `shrink` has them; for each thread TILE_ROWS times as many bytes of scratch memory.
    """

    def body(
        emit: Emitter,
        item: Int,
        thread: Int,
        _: Int,
        tiles: Int,
        order: Int,
        y: Int,
        y_bytes: Int,
        places: Int,
        place_bytes: Int,
        sums: Int,
        half_bytes: Int,
        scratch: Int,
        scratch_bytes: Int,
    ) -> None:
        computed = {height: _rows(code, output, height) for height in heights(code)}
        last_strip = _rows(code, output, 1, whole=False)
        tile = ShrinkTile.load(emit, tiles, item, places, place_bytes)
        strips, parts = emit.load_int(tile.place), emit.load_int(tile.place + 16)
        whole_sums = scratch + thread * scratch_bytes
        _add_halves(emit, sums + tile.first * HALVES * half_bytes, half_bytes, strips, tile.rows, whole_sums)

        def part(which: Int, _: list[Vec]) -> None:
            fields = _ExpandedPart.load(emit, tile.place, which)
            num_strips = (fields.columns + (LANES - 1)) // LANES
            start, stop = num_strips * tile.half // HALVES, num_strips * (tile.half + 1) // HALVES
            whole_strips = fields.columns // LANES
            into = y + fields.first_column * ITEM_BYTES[output.out]
            factors = whole_sums + fields.first_sum * 4

            def call(helper: Callable[..., None], row: Int, first: Int, end: Int) -> None:
                rows, sums_of_rows = order + (tile.first + row) * 8, factors + row * half_bytes
                places = (rows, into, y_bytes, sums_of_rows, half_bytes, fields.b)
                helper(emit, *places, fields.units, first, end, fields.columns, fields.scale)

            for at, count, height in split_rows(tile.rows, tuple(computed)):

                def of_height(index: Int, _: list[Vec], at: Int = at, height: int = height) -> None:
                    call(computed[height], at + index * height, start, stop.least(whole_strips))

                emit.loop(0, count, 1, of_height)

            def of_last_strip() -> None:
                emit.loop(0, tile.rows, 1, lambda row, _: call(last_strip, row, whole_strips, stop))

            emit.when(whole_strips.less(stop), of_last_strip)

        emit.loop(0, parts, 1, part)

    return code.kernel(f"lora_expand_{output}", 11, body)


def _add_halves(emit: Emitter, sums: Int, half_bytes: Int, strips: Int, rows: Int, into: Int) -> None:
    """Emit: add the two halves of the sums of some rows."""

    def row(index: Int, _: list[Vec]) -> None:
        source, target = sums + index * HALVES * half_bytes, into + index * half_bytes

        def strip(which: Int, _: list[Vec]) -> None:
            at = which * (LANES * 4)
            total = emit.load(source + at, "float32") + emit.load(source + half_bytes + at, "float32")
            emit.store(total, target + at, "float32")

        emit.loop(0, strips, 1, strip)

    emit.loop(0, rows, 1, row)


def _rows(code: Code, output: Output, height: int, whole: bool = True) -> Callable[..., None]:
    """Add a helper that computes some strips' columns of `height` rows; returns a function that emits a call.

    whole: whether all strips are; else only the part's last one may have columns that are not written.
    Its arguments: the place of the first row's index; the part's first column of y, and the bytes of a row; sums of the
    first row, and the distance of the rows'; b; the units of its rows; the first strip, and the one to stop before; the
    part's columns; the place of the scale.
    """
    dtype, out = output.dtype, output.out
    step = inner_step(dtype)

    def body(
        emit: Emitter,
        rows: Int,
        y: Int,
        y_bytes: Int,
        sums: Int,
        stride: Int,
        b: Int,
        units: Int,
        start: Int,
        stop: Int,
        columns: Int,
        scale: Int,
    ) -> None:
        targets = [y + emit.load_int(rows + 8 * row) * y_bytes for row in range(height)]
        factor = emit.load_all(scale, "float32")

        def products(strip: Int) -> list[Vec]:
            weights = b + strip * units * (LANES * UNIT_BYTES)

            def add(unit: Int, totals: list[Vec]) -> list[Vec]:
                loaded = load_weights(emit, weights + unit * (LANES * UNIT_BYTES), dtype)
                for which, floats in enumerate(widened_weights(emit, loaded, dtype)):
                    at = sums + (unit * step + which) * 4
                    totals = [
                        emit.load_all(at + stride * row, "float32").times_plus(floats, total)
                        for row, total in enumerate(totals)
                    ]
                return totals

            return emit.loop(0, units, 1, add, [emit.vec(0.0)] * height)

        def add_strip(strip: Int, _: list[Vec]) -> None:
            column, left = strip * (LANES * ITEM_BYTES[out]), None if whole else columns - strip * LANES
            for target, total in zip(targets, products(strip), strict=True):
                at = target + column
                before = emit.load(at, out) if left is None else emit.load_some(at, out, left)
                output.write(emit, total.times_plus(factor, before), at, at, 0, left)

        emit.loop(start, stop, 1, add_strip)

    return code.helper(f"lora_expand_{output}_{height if whole else 'last'}", 11, body)
