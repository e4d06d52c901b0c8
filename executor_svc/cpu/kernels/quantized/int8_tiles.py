"""Products of int8 rows with a weight in few bits through tiles (AMX-INT8), for many rows.

A chunk of a panel's codes becomes signed bytes in scratch memory once, in the order in which a tile product reads them,
and 16 rows of x at a time are multiplied with them. Integer sums are exact and their floats are added in the order of
`device.int8_reference`, so the bits are those of `int8_product`'s other tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen import tiles
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.tiles import TILE_BYTES, TILE_ROWS
from executor_svc.cpu.kernels.panel_layout import PANEL, ROWS_AT_ONCE, PanelItem
from executor_svc.cpu.kernels.quantized.few_rows import TOTALS_BYTES, format_key
from executor_svc.cpu.kernels.quantized.int8_codes import PanelCodes, PanelStep, byte_kind, zero_of
from executor_svc.cpu.kernels.quantized.layout import STEP, WORD_BYTES, PackedLayout
from executor_svc.cpu.kernels.quantized.many_rows import clear
from executor_svc.cpu.kernels.quantized.row_steps import FACTOR_BYTES, RowSteps
from executor_svc.cpu.kernels.quantized.vectors import Vectors, register_lanes

_LEAST_ROWS, _LEAST_ROWS_OF_SUMS, _LEAST_REST = 16, 9, 8
"""For fewer rows of an item, where both factors have a scale for a row, and fewer rows after whole tiles, codes are
multiplied as they become bytes in registers (measured: docs/decisions/0036-amx-int8.md)."""
_USUAL_STEPS = 16
_UNROLL = 2
_SUMS, _SUMS_BYTES = 4, TILE_ROWS * TILE_BYTES
_STEP_BYTES = STEP * PANEL
"""Of a step's codes as bytes."""
_ROWS, _WEIGHTS = (4, 5), (6, 7)
"""Tiles: 0 to 3 are sums."""
_VI32, _VF32 = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)


@dataclass(frozen=True, slots=True)
class TileScratch:
    """Places of a thread's numbers in its scratch memory: totals [rows][32], and those of a chunk."""

    layout: PackedLayout

    @property
    def steps(self) -> int:
        """Of a chunk: whole blocks, as many as fit; of rows with one scale, some of them."""
        if self.layout.whole_row:
            return _USUAL_STEPS
        return max(1, _USUAL_STEPS // self.layout.steps_per_block) * self.layout.steps_per_block

    @property
    def packed_bytes(self) -> int:
        """Of a chunk of a packed panel."""
        if self.layout.whole_row:
            return self.steps * self.layout.step_bytes
        return self.steps // self.layout.steps_per_block * self.layout.block_bytes

    @property
    def factors(self) -> int:
        """Offset of scales of rows of x [rows / 16][16], where a row has one."""
        return ROWS_AT_ONCE * TOTALS_BYTES

    @property
    def weights(self) -> int:
        """Offset of the codes, [2 halves of the panel][steps of this chunk][32 / 4][16 columns][4] bytes."""
        return self.factors + ROWS_AT_ONCE * 4

    @property
    def scales(self) -> int:
        """Offset of scales [2 halves of the panel][steps of this chunk][groups][16]; minimums follow."""
        return self.weights + self.steps * _STEP_BYTES

    @property
    def minimums(self) -> int:
        return self.scales + self.steps * self.layout.groups_per_step * TOTALS_BYTES

    @property
    def num_bytes(self) -> int:
        return 2 * self.minimums - self.scales


class TileProduct:
    """Emits the product of an item's rows."""

    def __init__(self, code: Code, layout: PackedLayout, steps: RowSteps) -> None:
        self._layout, self._steps = layout, steps
        self._scratch = TileScratch(layout)
        self._in_integers = layout.whole_row and steps.whole_row
        self._unpack = _unpack(code, layout, prefetches=self._in_integers)
        self._tile_steps = _tile_steps(layout, steps)
        if self._in_integers:
            self._one, self._two = (_sums(code, layout, steps, blocks) for blocks in (1, 2))
        else:
            self._one = _SumBlock(code, layout, steps).helper()

    def run(
        self,
        emit: Emitter,
        work: PanelItem,
        rows: Int,
        x: Int,
        row_blocks: Int,
        panel: Int,
        coming: Int,
        count: Int,
        scratch: Int,
    ) -> None:
        """Emit: write totals of the item's first rows to the start of scratch memory.

        x: the item's first row; row_blocks: all rows by blocks (`row_steps`); count: steps of a row.
        """
        layout, steps, places = self._layout, self._steps, self._scratch
        inner = STEP * self._tile_steps // layout.groups_per_step
        sizes = (TILE_BYTES,) * _SUMS + (inner,) * 2 + (TILE_BYTES,) * 2
        heights = (TILE_ROWS,) * (_SUMS + 2) + (inner // WORD_BYTES,) * 2
        tiles.configure(emit, tiles.scratch(emit, TILE_BYTES), heights, sizes)
        x_stride = count * steps.step_bytes
        num_blocks = (rows + (TILE_ROWS - 1)) // TILE_ROWS
        clear(emit, scratch, num_blocks * TILE_ROWS)
        own_factors = steps.whole_row and not layout.whole_row
        if own_factors:
            self._copy_factors(emit, x, x_stride, rows, scratch + places.factors)
        block_bytes = (count + (steps.tile_steps - 1)) // steps.tile_steps * steps.block_step_bytes
        pairs = num_blocks // 2 * 2
        blocks = row_blocks + work.first // TILE_ROWS * block_bytes

        def chunk(number: Int, _: object) -> None:
            first = number * places.steps
            here = (count - first).least(places.steps)
            ahead = coming + number * places.packed_bytes
            self._unpack(emit, panel, ahead, first, here, scratch)

            def block(index: Int, _: object, how: Callable[..., None] = self._one) -> None:
                numbers = blocks + index * block_bytes + first // steps.tile_steps * steps.block_step_bytes
                totals = scratch + index * (TILE_ROWS * TOTALS_BYTES)
                own = scratch + places.factors + index * (TILE_ROWS * 4)
                given = scratch + places.weights, here, totals
                if self._in_integers:
                    how(emit, numbers, block_bytes, *given)
                else:
                    factors = own if own_factors else numbers + steps.factors_at
                    how(emit, numbers, factors, *given, ahead.where(index.equals(0), 0))

            if self._in_integers:
                emit.loop(0, pairs, 2, lambda index, _: block(index, None, self._two))
                emit.loop(pairs, num_blocks, 1, block)
            else:
                emit.loop(0, num_blocks, 1, block)

        emit.loop(0, (count + (places.steps - 1)) // places.steps, 1, chunk)
        tiles.release(emit)
        if self._in_integers:
            self._scale(emit, x, x_stride, rows, (count - 1) % places.steps + 1, scratch)

    def _copy_factors(self, emit: Emitter, x: Int, x_stride: Int, rows: Int, into: Int) -> None:
        """Write the one scale of each row; of 16 rows at a time, with zeros."""

        def zeros(index: Int, _: object) -> None:
            emit.store(emit.vec(0.0), into + index * (LANES * 4), "float32")

        def copy(row: Int, _: object) -> None:
            scale = emit.builder.load(emit.pointer(x + row * x_stride + self._steps.scale_at, ir.IntType(32)))
            emit.builder.store(scale, emit.pointer(into + row * 4, scale.type))

        emit.loop(0, ROWS_AT_ONCE // LANES, 1, zeros)
        emit.loop(0, rows, 1, copy)

    def _scale(self, emit: Emitter, x: Int, x_stride: Int, rows: Int, last: Int, totals: Int) -> None:
        """Make integer totals floats, where both factors have a scale for a row; last: steps of the last chunk."""
        steps, scratch = self._steps, self._scratch
        minimums = self._layout.kind.offsets == "minimum"

        def half(which: Int, _: object) -> None:
            numbers, scales_at = totals + which * TILE_BYTES, totals + which * last * TILE_BYTES
            scale = emit.load(scales_at + scratch.scales, "float32")
            least = emit.load(scales_at + scratch.minimums, "float32") if minimums else None

            def row(index: Int, _: object) -> None:
                place, scales = numbers + index * TOTALS_BYTES, x + index * x_stride + steps.scale_at
                total = (scale * emit.load_all(scales, "float32")).times_plus(_integers(emit, place), 0.0)
                if least is not None:
                    total = least.times_plus(emit.load_all(scales + 4, "float32"), total)
                emit.store(total, place, "float32")

            emit.loop(0, rows, 1, row)

        emit.loop(0, 2, 1, half)


def rows_through_tiles(rows: Int, layout: PackedLayout, steps: RowSteps) -> Int:
    """Return how many of an item's rows, the first ones, go through tiles."""
    rest = rows % TILE_ROWS
    least = _LEAST_ROWS_OF_SUMS if layout.whole_row and steps.whole_row else _LEAST_ROWS
    some = rows - rest.where(rest.less(_LEAST_REST), 0)
    return rows.emit.integer(0).where(rows.less(least), rows.where(rows.less(TILE_ROWS), some))


def _tile_steps(layout: PackedLayout, steps: RowSteps) -> int:
    """Return the steps of a tile product: two where they have one sum and lie side by side."""
    return 2 if steps.whole_row and (layout.whole_row or layout.steps_per_block % 2 == 0) else 1


def _integers(emit: Emitter, place: Int) -> Vec:
    loaded = emit.builder.load(emit.pointer(place, _VI32))
    loaded.align = 4
    return Vec(emit, emit.builder.sitofp(loaded, _VF32))


def _unpack(code: Code, layout: PackedLayout, prefetches: bool) -> Callable[..., None]:
    """Add the function that writes a chunk's codes, scales and minimums to scratch memory.

    Returns a function that emits a call. Arguments: the packed panel, the packed chunk that this thread will probably
    need next, which is prefetched here or by `_SumBlock`, the chunk's first step, its number of steps, scratch memory.
    """
    scratch, per_block, groups = TileScratch(layout), layout.steps_per_block, layout.groups_per_step
    words = layout.low_words // groups
    parts = STEP // layout.low_words // WORD_BYTES

    def body(emit: Emitter, panel: Int, coming: Int, first: Int, count: Int, into: Int) -> None:
        vectors = Vectors(emit, register_lanes(code.isa))
        codes = PanelCodes(vectors, layout, "vnni")
        halves = [divmod(at * vectors.lanes, LANES) for at in range(PANEL // vectors.lanes)]

        def zeros(place: PanelStep, group: int, at: int) -> Any:
            if layout.kind.offsets == "zero_point":
                every_byte = vectors.every(0x01010101)
                numbers = emit.builder.mul(codes.zero_points(place, group, at), every_byte)
                return emit.builder.bitcast(numbers, vectors.bytes)
            return ir.Constant(vectors.bytes, [zero_of(layout.kind)] * (4 * vectors.lanes))

        def one_vector(place: PanelStep, group: int, at: int, index: Int) -> None:
            half, lane = halves[at]
            step = count * half + index
            numbers = into + (step * groups + group) * TILE_BYTES + lane * WORD_BYTES
            vectors.store(codes.numbers(place, "scales", group, at), numbers + scratch.scales)
            if "minimums" in layout.planes:
                vectors.store(codes.numbers(place, "minimums", group, at), numbers + scratch.minimums)
            zero = zeros(place, group, at)
            start = into + scratch.weights + step * (_STEP_BYTES // 2) + lane * WORD_BYTES
            for word in range(group * words, (group + 1) * words):
                loaded = codes.words(place, word, at)
                for part in range(parts):
                    each = emit.builder.bitcast(codes.codes(loaded, word, part), vectors.bytes)
                    vectors.store(emit.builder.sub(each, zero), start + (word * parts + part) * TILE_BYTES)

        def one_step(index: Int, _: object) -> None:
            step = first + index
            block, within = (emit.integer(0), step) if layout.whole_row else (step // per_block, step % per_block)
            head = panel if layout.whole_row else panel + block * layout.block_bytes
            place = PanelStep(head, head + (within * layout.step_bytes + layout.head_bytes), [])
            if prefetches:
                emit.prefetch(coming + index * layout.step_bytes, layout.step_bytes, level=2)
            for group in range(groups):
                for at in range(len(halves)):
                    one_vector(place, group, at, index)

        emit.loop(0, count, 1, one_step)

    return code.helper(f"int8_unpack_{format_key(layout)}{'_ahead' if prefetches else ''}", 5, body)


class _SumBlock:
    """Emits the sums of 16 rows of x and a chunk as floats, added to totals that are in registers meanwhile."""

    def __init__(self, code: Code, layout: PackedLayout, steps: RowSteps) -> None:
        self._code, self._steps, self._scratch = code, steps, TileScratch(layout)
        self._groups = layout.groups_per_step
        self._span = layout.steps_per_block if steps.whole_row else 1
        self._tile_steps = _tile_steps(layout, steps)
        self._unsigned = byte_kind(layout.kind) == "unsigned"
        self._minimums = layout.kind.offsets == "minimum"
        turns = 2 * self._scratch.steps // self._span
        self._prefetched = -(-self._scratch.packed_bytes // (turns * TILE_BYTES)) * TILE_BYTES
        self._factor_step = 0 if steps.whole_row else steps.block_step_bytes

    def helper(self) -> Callable[..., None]:
        """Add the function; returns a function that emits a call.

        Arguments: numbers of a block of rows of x from the chunk's first step on, their factors, the chunk's codes, its
        steps, totals, and the packed chunk that this thread will probably need next, or 0.
        """
        kind = f"{self._groups}_{self._span}_{self._factor_step}_{self._scratch.steps}_{self._prefetched}"
        signs = f"{'unsigned' if self._unsigned else 'signed'}{'_minimums' if self._minimums else ''}"
        return self._code.helper(f"int8_tiles_{kind}_{signs}", 6, self._body)

    def _body(self, emit: Emitter, x: Int, factors: Int, weights: Int, count: Int, totals: Int, coming: Int) -> None:
        self._memory = tiles.scratch(emit, _UNROLL * self._groups * _SUMS_BYTES)
        self._x, self._factors, self._weights = x, factors, weights
        turns = count // self._span

        def half(which: Int, _: object) -> None:
            places = [totals + which * TILE_BYTES + row * TOTALS_BYTES for row in range(TILE_ROWS)]
            start = which * turns

            def turn(index: Int, carried: list[Vec], units: int) -> list[Vec]:
                ahead, num_bytes = coming + (start + index) * self._prefetched, self._prefetched * units
                emit.when(emit.builder.not_(coming.equals(0)), lambda: emit.prefetch(ahead, num_bytes, level=2))
                for unit in range(units):
                    self._multiply(emit, start + index + unit, index + unit, unit)
                for unit in range(units):
                    carried = self._added(emit, start + index + unit, index + unit, unit, carried)
                return carried

            whole = turns // _UNROLL * _UNROLL
            sums = [emit.load(place, "float32") for place in places]
            sums = emit.loop(0, whole, _UNROLL, lambda index, each: turn(index, each, _UNROLL), sums)
            sums = emit.loop(whole, turns, 1, lambda index, each: turn(index, each, 1), sums)
            for place, total in zip(places, sums, strict=True):
                emit.store(total, place, "float32")

        emit.loop(0, 2, 1, half)

    def _multiply(self, emit: Emitter, turn: Int, index: Int, unit: int) -> None:
        """Write the integer sums of a turn, `turn` in the chunk's codes and `index` in rows of x, to memory."""
        step, width = index * self._span, self._steps.tile_steps
        weights = self._weights + turn * (self._span * _STEP_BYTES // 2)
        for group in range(self._groups):
            tile, offset = unit * self._groups + group, group * STEP // self._groups

            def add(at: Int | int, _: object = None, tile: int = tile, offset: int = offset) -> None:
                left, right, place = _ROWS[tile % 2], _WEIGHTS[tile % 2], step + at
                x = self._x + place // width * self._steps.block_step_bytes + place % width * STEP + offset
                tiles.load(emit, left, x, STEP * width)
                from_weights = emit.integer(at) * (_STEP_BYTES // 2) + offset * LANES
                tiles.load(emit, right, weights + from_weights, TILE_BYTES)
                tiles.add_int8_product(emit, tile, left, right, self._unsigned)

            tiles.clear(emit, tile)
            if self._span == 1:
                add(0)
            else:
                emit.loop(0, self._span, self._tile_steps, add)
            tiles.store(emit, tile, self._memory + tile * _SUMS_BYTES, TILE_BYTES)

    def _added(self, emit: Emitter, turn: Int, index: Int, unit: int, totals: list[Vec]) -> list[Vec]:
        """Add the groups of a turn: its scale and the row's times the sums, and its minimum times the row's sum."""
        scratch = self._scratch
        scales = self._weights + (scratch.scales - scratch.weights) + turn * (self._span * self._groups * TILE_BYTES)
        factors = self._factors + index * self._factor_step
        for group in range(self._groups):
            memory = self._memory + (unit * self._groups + group) * _SUMS_BYTES
            scale = emit.load(scales + group * TILE_BYTES, "float32")
            least_at = scales + (scratch.minimums - scratch.scales + group * TILE_BYTES)
            least = emit.load(least_at, "float32") if self._minimums else None
            offsets = factors + FACTOR_BYTES * (1 + (group if self._steps.num_offsets == 2 else 0))
            added = []
            for row, total in enumerate(totals):
                factor = emit.load_all(factors + row * 4, "float32")
                total = (scale * factor).times_plus(_integers(emit, memory + row * TILE_BYTES), total)
                if least is not None:
                    total = least.times_plus(emit.load_all(offsets + row * 4, "float32"), total)
                added.append(total)
            totals = added
        return totals


def _sums(code: Code, layout: PackedLayout, steps: RowSteps, blocks: int) -> Callable[..., None]:
    """Add the function that adds products of one or two blocks of rows of x and a chunk to integer totals.

    Returns a function that emits a call. Arguments: numbers of the first block from the chunk's first step on, the
    bytes from a block to the next, the chunk's codes, its steps, totals.
    """
    unsigned = byte_kind(layout.kind) == "unsigned"

    def body(emit: Emitter, x: Int, block_bytes: Int, weights: Int, count: Int, totals: Int) -> None:
        places = [
            totals + (block * TILE_ROWS * TOTALS_BYTES + half * TILE_BYTES)
            for block in range(blocks)
            for half in (0, 1)
        ]
        for tile, place in enumerate(places):
            tiles.load(emit, tile, place, TOTALS_BYTES)

        def step(index: Int, _: object) -> None:
            for block in range(blocks):
                numbers = x + block_bytes * block + index // 2 * steps.block_step_bytes
                tiles.load(emit, _ROWS[block], numbers, TILE_BYTES)
            for half in (0, 1):
                tiles.load(emit, _WEIGHTS[half], weights + (count * half + index) * (_STEP_BYTES // 2), TILE_BYTES)
            for tile in range(len(places)):
                tiles.add_int8_product(emit, tile, _ROWS[tile // 2], _WEIGHTS[tile % 2], unsigned)

        emit.loop(0, count, 2, step)
        for tile, place in enumerate(places):
            tiles.store(emit, tile, place, TOTALS_BYTES)

    return code.helper(f"int8_tile_sums_{blocks}_{'unsigned' if unsigned else 'signed'}", 5, body)
