"""The product of int8 rows and a weight in few bits: tiles of a few rows and a panel, and the kernel that has them.

Integer sums are exact and their floats are added in one order, so tiles of all heights have the bits that
`device.int8_reference` defines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen import tiles as frame
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.matmul_tiles import Output
from executor_svc.cpu.kernels.panel_layout import PANEL, panel_item, prefetched
from executor_svc.cpu.kernels.quantized.few_rows import format_key
from executor_svc.cpu.kernels.quantized.int8_chunks import ChunkProduct, goes_by_chunks
from executor_svc.cpu.kernels.quantized.int8_codes import PanelStep
from executor_svc.cpu.kernels.quantized.int8_steps import StepEmitter, Totals
from executor_svc.cpu.kernels.quantized.int8_tiles import TileProduct, TileScratch, rows_through_tiles
from executor_svc.cpu.kernels.quantized.layout import PackedLayout
from executor_svc.cpu.kernels.quantized.products import finish
from executor_svc.cpu.kernels.quantized.row_steps import RowSteps
from executor_svc.cpu.kernels.quantized.vectors import Vectors, register_lanes


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Rows of x and vectors of columns that are computed together."""

    rows: int
    vectors: int
    """A panel is computed in so many vectors at a time."""
    in_memory: bool
    """Whether the totals are in memory between steps, for there are too few registers."""


def tiles_of(isa: Isa) -> tuple[ProductTile, ...]:
    """Return the tiles of a level, most rows first."""
    if isa.has("avx512f"):
        return ProductTile(6, 2, False), ProductTile(4, 2, False), ProductTile(2, 2, False), ProductTile(1, 2, False)
    # One row reads a panel's lines in their order, not each second one: memory sets its pace.
    return ProductTile(4, 2, True), ProductTile(2, 2, True), ProductTile(1, 4, False)


def int8_product(code: Code, layout: PackedLayout, steps: RowSteps, output: Output) -> str:
    """Add the kernel y = x @ weight.T (+ bias) for rows in the form `steps` of `int8_steps`; returns its name.

    Items: as `panel_item` has them. Arguments: rows, x, packed weight, y, bytes from a row of y to the next, columns of
    y that the weight has, bias or 0, blocks of a row, steps of a block, blocks of rows of x or 0 (`row_steps`), scratch
    memory of all threads or 0 (`scratch_bytes`), `streams` of `panel_item`, `following` and `stride` of
    `PanelItem.coming`.
    """
    name = f"{format_key(layout)}_{steps}_{output}"

    def body(emit: Emitter, item: Int, thread: Int, rows: Int, x: Int, weight: Int, y: Int, *rest: Int) -> None:
        y_stride, columns, bias, blocks, block_steps, row_blocks, scratch, streams, following, stride = rest
        shapes = tiles_of(code.isa)
        work = panel_item(item, rows, columns, streams)
        x_stride = blocks * block_steps * steps.step_bytes
        panel_bytes = blocks * (block_steps * layout.step_bytes + layout.head_bytes)
        weights = weight + work.panel * panel_bytes
        coming = work.coming(weights, panel_bytes, following, stride)
        into = y + work.first * y_stride + work.panel * (PANEL * ITEM_BYTES[output.out])
        biases = bias + work.panel * (PANEL * ITEM_BYTES[output.dtype])

        start, tiled, many = x + work.first * x_stride, emit.integer(0), None
        own, count = scratch + thread * scratch_bytes(code, layout, steps), blocks * block_steps
        if steps.tiled:
            tiled, product = rows_through_tiles(work.here, layout, steps), TileProduct(code, layout, steps)
            many = partial(product.run, emit, work, tiled, start, row_blocks, weights, coming, count, own)
        elif goes_by_chunks(code.isa, layout, steps):
            by_chunks = ChunkProduct(code, layout, steps)
            tiled = by_chunks.rows(work.here)
            many = partial(by_chunks.run, emit, tiled, start, weights, coming, count, own)

        def first_rows(multiply: Callable[[], None]) -> None:
            multiply()
            finish(code, output)(emit, own, tiled, into, y_stride, biases, work.left)

        if many is not None:
            emit.when(emit.integer(0).less(tiled), partial(first_rows, many))

        def run(whole: bool) -> None:
            at = tiled
            for shape in shapes if whole else shapes[-1:]:
                tile = _tile(code, name, layout, steps, output, shape, whole)
                count = (work.here - at) // shape.rows

                def call(index: Int, _: object, at: Int = at, tile: Any = tile, height: int = shape.rows) -> None:
                    row = at + index * height
                    x_part, y_part = start + row * x_stride, into + row * y_stride
                    sizes = (blocks, block_steps)
                    tile(emit, x_part, x_stride, weights, coming, *sizes, y_part, y_stride, biases, work.left)

                emit.loop(0, count, 1, call)
                at = at + count * shape.rows

        emit.when(work.left.equals(PANEL), lambda: run(True))
        emit.when(work.left.less(PANEL), lambda: run(False))

    return code.kernel(f"int8_product_{name}", 14, body)


def scratch_bytes(code: Code, layout: PackedLayout, steps: RowSteps) -> int:
    """Return the bytes of scratch memory of a thread."""
    if goes_by_chunks(code.isa, layout, steps):
        return ChunkProduct(code, layout, steps).chunk.num_bytes
    return TileScratch(layout).num_bytes if steps.tiled else 0


def _tile(
    code: Code, name: str, layout: PackedLayout, steps: RowSteps, output: Output, shape: ProductTile, whole: bool
) -> Callable[..., None]:
    """Add a helper that computes `shape.rows` rows of one panel; returns a function that emits a call.

    Its arguments: x, and the bytes from a row to the next; a panel, and `PanelItem.coming`; blocks of a row, and steps
    of a block; y, and the bytes from a row to the next; the bias; the columns that a panel which is not whole writes.
    """

    def body(emit: Emitter, x: Int, x_stride: Int, *rest: Int) -> None:
        weight, coming, blocks, block_steps, y, y_stride, bias, left = rest
        vectors = Vectors(emit, register_lanes(code.isa))
        starts = [x + x_stride * row for row in range(shape.rows)]
        memory = frame.scratch(emit, 4 * PANEL * shape.rows) if shape.in_memory else None
        for first in range(0, PANEL // vectors.lanes, shape.vectors):
            which = range(first, first + shape.vectors)
            chain = _Chain(
                vectors, StepEmitter(vectors, code.isa, layout, steps, which), layout, steps, memory, shape.rows
            )
            totals = chain.run(starts, weight, coming, blocks, block_steps, shape.rows * len(which))
            for row in range(shape.rows):
                own = totals[row * len(which) : (row + 1) * len(which)]
                for half, total in _halves(emit, own, which):
                    output.write(emit, total, y + y_stride * row, bias, half, None if whole else left)

    return code.helper(f"int8_tile_{name}_{shape.rows if whole else 'edge'}", 10, body)


class _Chain:
    """Emits the loops of a tile over a panel's blocks and their steps."""

    def __init__(
        self,
        vectors: Vectors,
        step: StepEmitter,
        layout: PackedLayout,
        steps: RowSteps,
        memory: Int | None,
        rows: int,
    ) -> None:
        self._vectors = vectors
        self._emit = vectors.emit
        self._step = step
        self._layout = layout
        self._steps = steps
        self._memory = memory
        self._prefetched = prefetched(rows, layout.step_bytes)

    def run(self, rows: list[Int], weight: Int, coming: Int, blocks: Int, block_steps: Int, count: int) -> list[Any]:
        """Return the totals of a tile that has so many."""
        layout = self._layout
        block_bytes = block_steps * layout.step_bytes + layout.head_bytes

        def place(block: Int, step: Int) -> PanelStep:
            head = weight + block * block_bytes
            at = step * layout.step_bytes + layout.head_bytes
            self._emit.prefetch(coming + block * block_bytes + at, self._prefetched, level=2)
            offset = (block * block_steps + step) * self._steps.step_bytes
            return PanelStep(head, head + at, [row + offset for row in rows])

        places = None
        if self._memory is not None:
            places = [self._memory + which * 4 * self._vectors.lanes for which in range(count)]
        totals = Totals(self._vectors, [self._vectors.every_float(0.0)] * count, places)
        if self._memory is not None:
            for which in range(count):
                totals.put(which, self._vectors.every_float(0.0))

        def each_block(block: Int) -> None:
            if self._steps.whole_row:
                self._whole_block(place, block, block_steps, totals)
            elif not layout.whole_row and layout.steps_per_block == 1:
                self._one_step(place(block, self._emit.integer(0)), totals)
            else:
                self._loop(block_steps, totals, lambda step: self._one_step(place(block, step), totals))

        self._loop(blocks, totals, each_block)
        return [totals.get(which) for which in range(count)]

    def _loop(self, count: Int, totals: Totals, body: Callable[[Int], None]) -> None:
        """Emit a loop that carries the totals that are in registers."""
        carried = [] if self._memory is not None else _carried(self._emit, totals.values)

        def once(index: Int, values: list[Vec]) -> list[Vec]:
            totals.values = [each.value for each in values] or totals.values
            body(index)
            return _carried(self._emit, totals.values) if values else []

        last = self._emit.loop(0, count, 1, once, carried)
        totals.values = [each.value for each in last] or totals.values

    def _one_step(self, place: PanelStep, totals: Totals) -> None:
        for group in range(self._layout.groups_per_step):
            dots = self._step.products(place, group, self._step.starts(place, group))
            self._step.add_to_totals(place, group, dots.sum, totals)

    def _whole_block(
        self, place: Callable[[Int, Int], PanelStep], block: Int, block_steps: Int, totals: Totals
    ) -> None:
        """Emit a block whose integer sums become floats once."""
        first = place(block, self._emit.integer(0))

        def step(index: Int, values: list[Vec]) -> list[Vec]:
            dots = self._step.products(place(block, index), 0, [partial(getattr, each, "value") for each in values])
            return _carried(self._emit, [dots.sum(which) for which in range(len(values))])

        starts = [start() for start in self._step.starts(first, 0)]
        sums = self._emit.loop(0, block_steps, 1, step, _carried(self._emit, starts))
        self._step.add_to_totals(first, 0, lambda which: sums[which].value, totals)


def _carried(emit: Emitter, values: list[Any]) -> list[Vec]:
    return [Vec(emit, value) for value in values]


def _halves(emit: Emitter, totals: list[Any], which: range) -> Iterator[tuple[int, Vec]]:
    """Return the totals of a row as vectors of 16 columns, and which half of the panel each is."""
    per_half = LANES // int(totals[0].type.count)
    for start in range(0, len(totals), per_half):
        parts = totals[start : start + per_half]
        if per_half == 2:
            both = ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(LANES)))
            parts = [emit.builder.shuffle_vector(parts[0], parts[1], both)]
        yield (which.start + start) // per_half, Vec(emit, parts[0])
