"""The kernel y = x @ weight.T (+ bias) of a packed weight in few bits, its codes as they are and rows of x as they are.

`few_rows` has the order of an element's sum. It does not depend on the number of rows, the tile or the thread.
"""

from __future__ import annotations

from collections.abc import Callable

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int
from executor_svc.cpu.kernels.matmul import split_rows
from executor_svc.cpu.kernels.matmul_tiles import Output, has_pairs
from executor_svc.cpu.kernels.panel_layout import PANEL, ROWS_AT_ONCE, panel_item
from executor_svc.cpu.kernels.quantized.code_values import CodeValues
from executor_svc.cpu.kernels.quantized.few_rows import TOTALS_BYTES, FewRows, TileArguments, few_row_shapes, format_key
from executor_svc.cpu.kernels.quantized.layout import STEP, PackedLayout
from executor_svc.cpu.kernels.quantized.many_rows import ChunkScratch, clear, many_row_shapes, tile, widen

_MOST_FEW = 16
_MOST_FEW_OF_TWO_PLANES = 4
_MOST_FEW_BY_TABLE = 48
"""Where a pair of codes becomes numbers by one permutation."""
_TOTALS = ROWS_AT_ONCE * TOTALS_BYTES


def most_few_rows(code: Code, layout: PackedLayout, dtype: Dtype) -> int:
    """Return the most rows for which codes become numbers in registers; for more, they do in the cache."""
    if layout.high_words:
        return _MOST_FEW_OF_TWO_PLANES
    return _MOST_FEW_BY_TABLE if has_pairs(code.isa, dtype) and layout.kind.bits in (2, 4) else _MOST_FEW


def scratch_bytes(code: Code, layout: PackedLayout, dtype: Dtype) -> int:
    """Return the bytes of scratch memory of a thread."""
    return _TOTALS + ChunkScratch(layout, has_pairs(code.isa, dtype)).num_bytes


def product(code: Code, layout: PackedLayout, output: Output) -> str:
    """Add the kernel; returns its name.

    Items: as `panel_item` has them. Arguments: rows; x [rows, steps * 32], as `rows.arrange` leaves it;
    the packed panels; y, its first column that this weight computes; the steps of a row; the columns that it computes;
    the distance of rows of y in columns; bias or 0; sums of x [rows, groups] or 0; scratch memory of all threads;
    `streams` of `panel_item`, `following` and `stride` of `PanelItem.coming`.
    """
    return code.kernel(f"quantized_{format_key(layout)}_{output}", 13, _Product(code, layout, output).body)


class _Product:
    def __init__(self, code: Code, layout: PackedLayout, output: Output) -> None:
        self._code, self._layout, self._output, self._dtype = code, layout, output, output.dtype
        self._pairs = has_pairs(code.isa, output.dtype)
        self._x_bytes = ITEM_BYTES[output.dtype] if self._pairs else ITEM_BYTES["float32"]
        self._chunk = ChunkScratch(layout, self._pairs)

    def body(
        self,
        emit: Emitter,
        item: Int,
        thread: Int,
        rows: Int,
        x: Int,
        packed: Int,
        y: Int,
        steps: Int,
        columns: Int,
        y_columns: Int,
        bias: Int,
        sums: Int,
        scratch: Int,
        streams: Int,
        following: Int,
        stride: Int,
    ) -> None:
        layout, output = self._layout, self._output
        work = panel_item(item, rows, columns, streams)
        here = work.here
        panel_bytes = _panel_bytes(layout, steps)
        weights = packed + work.panel * panel_bytes
        coming = work.coming(weights, panel_bytes, following, stride)
        x_stride, sums_stride = steps * (STEP * self._x_bytes), _groups(layout, steps) * 4
        start, totals_of_x = x + work.first * x_stride, sums + work.first * sums_stride
        totals = scratch + thread * scratch_bytes(self._code, layout, self._dtype)
        given = TileArguments(start, x_stride, weights, coming, steps, totals_of_x, sums_stride, totals)
        few = most_few_rows(self._code, layout, self._dtype)
        emit.when(here.less(few + 1), lambda: self._few(emit, here, given))
        emit.when(emit.integer(few).less(here), lambda: self._many(emit, here, given))
        y_stride = y_columns * ITEM_BYTES[output.out]
        into = y + work.first * y_stride + work.panel * (PANEL * ITEM_BYTES[output.out])
        biases = bias + work.panel * (PANEL * ITEM_BYTES[output.dtype])
        finish(self._code, output)(emit, totals, here, into, y_stride, biases, work.left)

    def _few(self, emit: Emitter, rows: Int, given: TileArguments) -> None:
        shapes = few_row_shapes(self._code.isa)
        tiles = {shape.rows: FewRows(self._code, self._layout, self._dtype, shape).helper() for shape in shapes}
        for at, count, height in split_rows(rows, tuple(tiles)):

            def call(index: Int, _: object, at: Int = at, height: int = height) -> None:
                tiles[height](emit, *given.of_row(at + index * height))

            emit.loop(0, count, 1, call)

    def _many(self, emit: Emitter, rows: Int, given: TileArguments) -> None:
        layout, chunk = self._layout, self._chunk
        shapes = many_row_shapes(self._code.isa)
        vectors = shapes[0].vectors
        tiles = {shape.rows: tile(self._code, self._dtype, shape, layout.whole_row) for shape in shapes}
        fill = widen(self._code, layout, self._dtype)
        numbers = given.totals + _TOTALS
        minimums = emit.integer(0) if layout.kind.offsets != "minimum" else numbers + chunk.minimums
        half_bytes = emit.integer(chunk.steps * chunk.half_step_bytes)
        unit = 16 if self._pairs else 8
        clear(emit, given.totals, rows)

        def one_chunk(number: Int, _: object) -> None:
            first = number * chunk.steps
            count = (given.steps - first).least(chunk.steps)
            fill(emit, given.panel, given.coming, first, count, numbers)
            if layout.whole_row:
                groups, units = emit.integer(1), count * (STEP // unit)
            else:
                groups, units = count * STEP // layout.kind.group, emit.integer(layout.kind.group // unit)
            x_here, first_group = given.x + first * (STEP * self._x_bytes), _groups(layout, first)
            for half in range(0, PANEL // LANES, vectors):
                for at, number_of_tiles, height in split_rows(rows, tuple(tiles)):

                    def call(index: Int, _: object, at: Int = at, height: int = height, half: int = half) -> None:
                        row, offset = at + index * height, half * LANES * 4
                        tiles[height](
                            emit,
                            x_here + row * given.x_stride,
                            given.x_stride,
                            numbers + half_bytes * half,
                            half_bytes,
                            groups,
                            units,
                            numbers + (chunk.scales + offset),
                            minimums + offset if layout.kind.offsets == "minimum" else minimums,
                            given.sums + row * given.sums_stride + first_group * 4,
                            given.sums_stride,
                            given.totals + row * TOTALS_BYTES + offset,
                        )

                    emit.loop(0, number_of_tiles, 1, call)

        emit.loop(0, (given.steps + (chunk.steps - 1)) // chunk.steps, 1, one_chunk)
        if layout.whole_row:
            self._scale_rows(emit, given.panel, rows, given.sums, given.sums_stride, given.totals)

    def _scale_rows(self, emit: Emitter, panel: Int, rows: Int, sums: Int, sums_stride: Int, totals: Int) -> None:
        """Apply the scale, and the minimum, that whole rows of the weight have."""
        values = CodeValues(emit, self._layout, self._code.isa)
        scales = [values.group_numbers("scales", panel, panel, 0, half) for half in (0, 1)]
        minimums = []
        if self._layout.kind.offsets == "minimum":
            minimums = [values.group_numbers("minimums", panel, panel, 0, half) for half in (0, 1)]

        def row(index: Int, _: object) -> None:
            for half in (0, 1):
                place = totals + index * TOTALS_BYTES + half * LANES * 4
                total = scales[half].times_plus(emit.load(place, "float32"), 0.0)
                if minimums:
                    total = minimums[half].times_plus(emit.load_all(sums + index * sums_stride, "float32"), total)
                emit.store(total, place, "float32")

        emit.loop(0, rows, 1, row)


def finish(code: Code, output: Output) -> Callable[..., None]:
    """Add the function that writes totals of rows of a panel to y; returns a function that emits a call.

    Arguments: totals, rows, y and the distance of its rows in bytes, bias, columns.
    """

    def body(emit: Emitter, totals: Int, rows: Int, y: Int, y_stride: Int, bias: Int, left: Int) -> None:
        def all_rows(whole: bool) -> None:
            def row(index: Int, _: object) -> None:
                for half in (0, 1):
                    total = emit.load(totals + index * TOTALS_BYTES + half * LANES * 4, "float32")
                    output.write(emit, total, y + index * y_stride, bias, half, None if whole else left)

            emit.loop(0, rows, 1, row)

        emit.when(left.equals(PANEL), lambda: all_rows(True))
        emit.when(left.less(PANEL), lambda: all_rows(False))

    return code.helper(f"finish_{output}", 6, body)


def _groups(layout: PackedLayout, steps: Int) -> Int:
    """Return the groups of so many steps."""
    return steps.emit.integer(1) if layout.whole_row else steps * STEP // layout.kind.group


def _panel_bytes(layout: PackedLayout, steps: Int) -> Int:
    if layout.whole_row:
        return steps * layout.step_bytes + layout.head_bytes
    return steps // layout.steps_per_block * layout.block_bytes
