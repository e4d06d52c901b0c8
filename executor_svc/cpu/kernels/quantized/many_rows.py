"""Products of many rows with weights in few bits: a chunk of a panel becomes numbers in the cache, once for all rows.

Each element has the sum that `few_rows` describes. Totals are in memory; the tiles are those of all formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.matmul_tiles import Shape, dot, has_pairs, load_pair
from executor_svc.cpu.kernels.panel_layout import PANEL
from executor_svc.cpu.kernels.quantized.code_values import CodeValues
from executor_svc.cpu.kernels.quantized.few_rows import TOTALS_BYTES, format_key
from executor_svc.cpu.kernels.quantized.layout import STEP, PackedLayout

MOST_STEPS = 16
"""Of a chunk: groups of up to 512 columns are whole."""
_USUAL_STEPS = 8
_VECTOR_BYTES = LANES * 4
_UNROLL = 8
_FACTOR_BYTES = 4
"""Of what a product takes from x: a float, or a pair of bfloat16."""
_VI32 = ir.VectorType(ir.IntType(32), LANES)


@dataclass(frozen=True, slots=True)
class ChunkScratch:
    """Places of a chunk's numbers in a thread's scratch memory, one after the other."""

    layout: PackedLayout
    pairs: bool

    @property
    def steps(self) -> int:
        """Of a chunk: whole blocks, as many as fit; of rows with one scale, some of them."""
        if self.layout.whole_row:
            return _USUAL_STEPS
        per_block = self.layout.steps_per_block
        return max(1, _USUAL_STEPS // per_block) * per_block

    @property
    def half_step_bytes(self) -> int:
        """Of the numbers of 16 rows of the panel in a step."""
        return STEP // (2 if self.pairs else 1) * _VECTOR_BYTES

    @property
    def groups(self) -> int:
        return 1 if self.layout.whole_row else self.steps * STEP // self.layout.kind.group

    @property
    def scales(self) -> int:
        """Offset of scales, [groups][32]; minimums follow."""
        return self.steps * 2 * self.half_step_bytes

    @property
    def minimums(self) -> int:
        return self.scales + self.groups * TOTALS_BYTES

    @property
    def num_bytes(self) -> int:
        return self.minimums + self.groups * TOTALS_BYTES


def many_row_shapes(isa: Isa) -> tuple[Shape, ...]:
    """Return the tiles of a level, most rows first."""
    if isa.has("avx512f"):
        return tuple(Shape(rows, 2) for rows in (12, 8, 4, 2, 1))
    return tuple(Shape(rows, 1) for rows in (5, 4, 3, 2, 1))


def widen(code: Code, layout: PackedLayout, dtype: Dtype) -> Callable[..., None]:
    """Add the function that writes a chunk's numbers to scratch memory; returns a function that emits a call.

    Numbers lie by half of the panel, step and column, or pair of columns. Arguments: the packed panel, the one that
    this thread will probably need next, the chunk's first step, its number of steps, the scratch memory.
    """
    pairs = has_pairs(code.isa, dtype)
    chunk = ChunkScratch(layout, pairs)
    half_bytes = chunk.steps * chunk.half_step_bytes

    def body(emit: Emitter, panel: Int, coming: Int, first: Int, count: Int, scratch: Int) -> None:
        values = CodeValues(emit, layout, code.isa)
        per_block = layout.steps_per_block
        in_head = layout.planes["scales"].in_head

        def write_numbers(head: Int, step: Int, group: int, index: Int) -> None:
            for half in (0, 1):
                into = scratch + (chunk.scales + half * _VECTOR_BYTES) + index * TOTALS_BYTES
                emit.store(values.group_numbers("scales", head, step, group, half), into, "float32")
                if "minimums" in layout.planes:
                    number = values.group_numbers("minimums", head, step, group, half)
                    emit.store(number, into + (chunk.minimums - chunk.scales), "float32")

        def write_step(head: Int, step: Int, index: Int) -> None:
            count_of_groups = layout.groups_per_step
            if not in_head:
                for group in range(count_of_groups):
                    write_numbers(head, step, group, index * count_of_groups + group)
            into = scratch + index * chunk.half_step_bytes
            emit.loop(0, 2, 1, lambda half, _: write_half(head, step, half, into + half * half_bytes))

        def write_half(head: Int, step: Int, half: Int, into: Int) -> None:
            rows = CodeValues(emit, layout, code.isa, half * LANES)
            zeros = [rows.zero_points(head, step, group, 0) for group in range(layout.groups_per_step)]
            count = STEP // 2 if pairs else STEP
            for place in range(count):
                at, zero = into + place * _VECTOR_BYTES, zeros[place * len(zeros) // count]
                if pairs:
                    emit.builder.store(rows.pair(step, 0, place, zero), emit.pointer(at, _VI32)).align = 4
                else:
                    emit.store(rows.floats(step, 0, place, zero), at, "float32")

        def one_step(index: Int, _: object) -> None:
            step = first + index
            block, within = (emit.integer(0), step) if layout.whole_row else (step // per_block, step % per_block)
            head = panel if layout.whole_row else panel + block * layout.block_bytes
            place = head + (within * layout.step_bytes + layout.head_bytes)
            emit.prefetch(coming + (place - panel), layout.step_bytes, level=2)
            if in_head and not layout.whole_row:
                emit.when(within.equals(0), lambda: write_numbers(head, place, 0, index // per_block))
            write_step(head, place, index)

        emit.loop(0, count, 1, one_step)

    return code.helper(f"widen_{format_key(layout)}_{dtype}", 5, body)


def tile(code: Code, dtype: Dtype, shape: Shape, whole_row: bool) -> Callable[..., None]:
    """Add the tile of one shape; returns a function that emits a call.

    With whole_row, products go on from chunk to chunk, without a scale. Its arguments: x and the distance of its rows
    in bytes; the chunk's numbers of one half of the panel (or of both, the second so many bytes further); its groups;
    products of a group in units of `_UNROLL` operations; scales; minimums or 0; sums of x by group, and the distance of
    their rows; totals.
    """
    pairs = has_pairs(code.isa, dtype)
    name = f"many_rows_{'pairs' if pairs else 'floats'}_{shape.rows}{'_row' if whole_row else ''}"
    return code.helper(name, 11, _ShapedTile(shape, pairs, whole_row).body)


class _ShapedTile:
    """Emits the tile of one shape."""

    def __init__(self, shape: Shape, pairs: bool, whole_row: bool) -> None:
        self._rows, self._vectors = range(shape.rows), range(shape.vectors)
        self._pairs, self._whole_row = pairs, whole_row

    def body(
        self,
        emit: Emitter,
        x: Int,
        x_stride: Int,
        numbers: Int,
        half_bytes: Int,
        groups: Int,
        units: Int,
        scales: Int,
        minimums: Int,
        sums: Int,
        sums_stride: Int,
        totals: Int,
    ) -> None:
        starts = [x + x_stride * row for row in self._rows]
        places = [
            totals + (row * TOTALS_BYTES + which * _VECTOR_BYTES) for row in self._rows for which in self._vectors
        ]

        def one_group(group: Int, _: object) -> None:
            def unit(index: Int, products: list[Vec]) -> list[Vec]:
                return self._unit(emit, products, starts, numbers, half_bytes, (group * units + index) * _UNROLL)

            zero = emit.vec(0.0)
            begin = [emit.load(place, "float32") if self._whole_row else zero for place in places]
            products = emit.loop(0, units, 1, unit, begin)
            if self._whole_row:
                for place, product in zip(places, products, strict=True):
                    emit.store(product, place, "float32")
                return
            numbers_of_group = group * TOTALS_BYTES
            self._scale(emit, scales + numbers_of_group, products, places)

            def add_minimums() -> None:
                of_x = [sums + sums_stride * row + group * 4 for row in self._rows]
                self._add_minimums(emit, minimums + numbers_of_group, of_x, places)

            emit.when(emit.builder.not_(minimums.equals(0)), add_minimums)

        emit.loop(0, groups, 1, one_group)

    def _unit(
        self, emit: Emitter, products: list[Vec], starts: Sequence[Int], numbers: Int, half_bytes: Int, first: Int
    ) -> list[Vec]:
        """Return products with `_UNROLL` columns, or pairs of columns, more."""
        for offset in range(_UNROLL):
            at = numbers + first * _VECTOR_BYTES + offset * _VECTOR_BYTES
            loaded = [emit.builder.load(emit.pointer(at + half_bytes * which, _VI32)) for which in self._vectors]
            for each in loaded:
                each.align = 4
            added = []
            for row, start in enumerate(starts):
                place = start + first * _FACTOR_BYTES + offset * _FACTOR_BYTES
                factor = load_pair(emit, place, last=False) if self._pairs else emit.load_all(place, "float32")
                for which, words in enumerate(loaded):
                    total = products[row * len(loaded) + which]
                    if self._pairs:
                        added.append(dot(emit, total, factor, words))
                    else:
                        weight = Vec(emit, emit.builder.bitcast(words, total.value.type))
                        added.append(factor.times_plus(weight, total))
            products = added
        return products

    def _scale(self, emit: Emitter, scales: Int, products: Sequence[Vec], places: Sequence[Int]) -> None:
        """Add products times their scales to the totals."""
        loaded = self._load(emit, scales)
        for at, (place, product) in enumerate(zip(places, products, strict=True)):
            emit.store(loaded[at % len(loaded)].times_plus(product, emit.load(place, "float32")), place, "float32")

    def _add_minimums(self, emit: Emitter, minimums: Int, sums: Sequence[Int], places: Sequence[Int]) -> None:
        """Add minimums times sums of x, which are one for each row, to the totals."""
        loaded = self._load(emit, minimums)
        for row, place_of_sum in enumerate(sums):
            total_of_x = emit.load_all(place_of_sum, "float32")
            for which, minimum in enumerate(loaded):
                place = places[row * len(loaded) + which]
                emit.store(minimum.times_plus(total_of_x, emit.load(place, "float32")), place, "float32")

    def _load(self, emit: Emitter, place: Int) -> list[Vec]:
        return [emit.load(place + which * _VECTOR_BYTES, "float32") for which in self._vectors]


def clear(emit: Emitter, totals: Int, rows: Int) -> None:
    """Emit: set the totals of rows to zero."""

    def row(index: Int, _: object) -> None:
        for half in (0, 1):
            emit.store(emit.vec(0.0), totals + index * TOTALS_BYTES + half * _VECTOR_BYTES, "float32")

    emit.loop(0, rows, 1, row)


assert PANEL == 2 * LANES
assert ITEM_BYTES["float32"] == 2 * ITEM_BYTES["bfloat16"]
