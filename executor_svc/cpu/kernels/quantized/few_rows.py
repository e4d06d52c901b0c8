"""Products of few rows with weights in few bits: codes become numbers in registers, for the rows of a tile at once.

An element's sum: for each group of columns, ascending, a chain of products P over its columns, ascending, from 0 (fused
operations, or the level's dot product of pairs of bfloat16); then total = fma(scale, P, total), and with minimums
total = fma(minimum, sum of x over the group, total). `many_rows` computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.matmul_tiles import Shape, dot, has_pairs, load_pair
from executor_svc.cpu.kernels.panel_layout import PANEL, prefetched
from executor_svc.cpu.kernels.quantized.code_values import CodeValues
from executor_svc.cpu.kernels.quantized.layout import STEP, PackedLayout

TOTALS_BYTES = PANEL * 4
"""Of a row's totals of a panel, in memory."""


@dataclass(frozen=True, slots=True)
class TileArguments:
    """What a panel's products of some rows need."""

    x: Int
    x_stride: Int
    """Bytes from a row of x to the next."""
    panel: Int
    coming: Int
    """The panel that this thread will probably need next."""
    steps: Int
    """Of a row."""
    sums: Int
    """Sums of x by group."""
    sums_stride: Int
    totals: Int

    def of_row(self, row: Int) -> tuple[Int, ...]:
        """Return all of them, for rows from this one on."""
        x, sums = self.x + row * self.x_stride, self.sums + row * self.sums_stride
        totals = self.totals + row * TOTALS_BYTES
        return x, self.x_stride, self.panel, self.coming, self.steps, sums, self.sums_stride, totals


def few_row_shapes(isa: Isa) -> tuple[Shape, ...]:
    """Return the tiles of a level, most rows first."""
    if isa.has("avx512f"):
        return tuple(Shape(rows, 2) for rows in (8, 4, 2, 1))
    return Shape(4, 1), Shape(2, 1), Shape(1, 2)


def _most_in_registers(isa: Isa) -> int:
    """Return the most totals that are kept in registers, beside as many products."""
    return 8 if isa.has("avx512f") else 2


def format_key(layout: PackedLayout) -> str:
    """Return the name of a format's code. Formats with the same code have the same name; columns do not matter."""
    kind = layout.kind
    group = "row" if layout.whole_row else kind.group
    values = f"{kind.values}{crc32(repr(kind.table).encode()):08x}" if kind.table else kind.values
    return f"{kind.bits}_{values}_{kind.zero}_{kind.scale}_{kind.super_group}_{kind.offsets}_{group}"


class FewRows:
    """Emits the tile of one shape, format and dtype of x."""

    def __init__(self, code: Code, layout: PackedLayout, dtype: Dtype, shape: Shape) -> None:
        self._code, self._layout, self._dtype, self._shape = code, layout, dtype, shape
        self._pairs = has_pairs(code.isa, dtype)
        self._x_bytes = ITEM_BYTES[dtype] if self._pairs else ITEM_BYTES["float32"]
        self._minimums = layout.kind.offsets == "minimum"

    def helper(self) -> Callable[..., None]:
        """Add the tile's function; returns a function that emits a call with the arguments of `TileArguments`."""
        name = f"few_rows_{format_key(self._layout)}_{self._dtype}_{self._shape.rows}"
        return self._code.helper(name, 8, self._body)

    def _body(self, emit: Emitter, *given: Int) -> None:
        arguments = TileArguments(*given)
        layout, shape = self._layout, self._shape
        rows = range(shape.rows)
        self._x = [arguments.x + arguments.x_stride * row for row in rows]
        self._sums = [arguments.sums + arguments.sums_stride * row for row in rows] if self._minimums else []
        halves = range(shape.vectors)

        def columns(first: Int, _: object) -> None:
            self._values = CodeValues(emit, layout, self._code.isa, first)
            start = arguments.totals + first * 4
            nothing = [emit.vec(0.0)] * (shape.rows * shape.vectors)
            self._places = [start + (row * TOTALS_BYTES + half * LANES * 4) for row in rows for half in halves]
            self._in_memory = not layout.whole_row and len(nothing) > _most_in_registers(self._code.isa)
            if layout.whole_row:
                ends = self._whole_row(emit, arguments.panel, arguments.coming, arguments.steps, halves, nothing)
            else:
                blocks = arguments.steps // layout.steps_per_block

                def block(index: Int, carried: list[Vec]) -> list[Vec]:
                    offset = index * layout.block_bytes
                    return self._block(
                        emit, arguments.panel + offset, arguments.coming + offset, index, halves, carried
                    )

                if self._in_memory:
                    self._store(emit, nothing)
                    emit.loop(0, blocks, 1, block)
                    return
                ends = emit.loop(0, blocks, 1, block, nothing)
            self._store(emit, ends)

        emit.loop(0, PANEL, shape.vectors * LANES, columns)

    def _store(self, emit: Emitter, totals: list[Vec]) -> None:
        for place, total in zip(self._places, totals, strict=True):
            emit.store(total, place, "float32")

    def _whole_row(
        self, emit: Emitter, panel: Int, coming: Int, steps: Int, halves: range, nothing: list[Vec]
    ) -> list[Vec]:
        zeros = self._zeros(panel, panel, 0, halves)

        def step(index: Int, products: list[Vec]) -> list[Vec]:
            offset = index * self._layout.step_bytes + self._layout.head_bytes
            return self._step(emit, panel + offset, coming + offset, index, halves, products, zeros)

        products = emit.loop(0, steps, 1, step, nothing)
        return self._scaled(emit, nothing, products, panel, panel, 0, emit.integer(0), halves)

    def _block(self, emit: Emitter, head: Int, coming: Int, index: Int, halves: range, totals: list[Vec]) -> list[Vec]:
        layout = self._layout
        count, head_bytes = layout.steps_per_block, layout.head_bytes
        first = index * count
        nothing = [emit.vec(0.0)] * len(self._places)
        if not layout.planes["scales"].in_head:

            def step_of_groups(step: Int, carried: list[Vec]) -> list[Vec]:
                offset = step * layout.step_bytes + head_bytes
                return self._groups_of_step(emit, head, head + offset, coming + offset, first + step, halves, carried)

            return emit.loop(0, count, 1, step_of_groups, totals)
        zeros = self._zeros(head, head, 0, halves)

        def step(which: Int, products: list[Vec]) -> list[Vec]:
            offset = which * layout.step_bytes + head_bytes
            return self._step(emit, head + offset, coming + offset, first + which, halves, products, zeros)

        products = step(emit.integer(0), nothing) if count == 1 else emit.loop(0, count, 1, step, nothing)
        return self._scaled(emit, totals, products, head, head, 0, index, halves)

    def _groups_of_step(
        self, emit: Emitter, head: Int, step: Int, coming: Int, index: Int, halves: range, totals: list[Vec]
    ) -> list[Vec]:
        """Add the groups of a step with numbers of its own."""
        count = self._layout.groups_per_step
        for group in range(count):
            columns = range(group * STEP // count, (group + 1) * STEP // count)
            zeros = self._zeros(head, step, group, halves)
            nothing = [emit.vec(0.0)] * len(self._places)
            ahead = coming if not group else None
            products = self._step(emit, step, ahead, index, halves, nothing, zeros, columns)
            totals = self._scaled(emit, totals, products, head, step, group, index * count + group, halves)
        return totals

    def _step(
        self,
        emit: Emitter,
        step: Int,
        coming: Int | None,
        index: Int,
        halves: range,
        products: list[Vec],
        zeros: Sequence[Any],
        columns: range = range(STEP),
    ) -> list[Vec]:
        """Add the products of columns of a step."""
        if coming is not None:
            emit.prefetch(coming, prefetched(self._shape.rows, self._layout.step_bytes), level=2)
        self._values.start_step()
        offset = index * (STEP * self._x_bytes)
        places = [start + offset for start in self._x]
        values = self._values
        for column in range(columns.start, columns.stop, 2 if self._pairs else 1):
            if self._pairs:
                weights = [values.pair(step, half, column // 2, zero) for half, zero in zip(halves, zeros, strict=True)]
            else:
                weights = [values.floats(step, half, column, zero) for half, zero in zip(halves, zeros, strict=True)]
            added = []
            for row, place in enumerate(places):
                factor = self._factor(emit, place + column * self._x_bytes)
                for which, weight in enumerate(weights):
                    total = products[row * len(weights) + which]
                    added.append(dot(emit, total, factor, weight) if self._pairs else factor.times_plus(weight, total))
            products = added
        return products

    def _factor(self, emit: Emitter, place: Int) -> Any:
        return load_pair(emit, place, last=False) if self._pairs else emit.load_all(place, "float32")

    def _zeros(self, head: Int, step: Int, group: int, halves: range) -> list[Any]:
        return [self._values.zero_points(head, step, group, half) for half in halves]

    def _scaled(
        self,
        emit: Emitter,
        totals: list[Vec],
        products: list[Vec],
        head: Int,
        step: Int,
        group: int,
        index: Int,
        halves: range,
    ) -> list[Vec]:
        """Return totals, or set those in memory, with the products of a group; index: of the group in the row."""
        if self._in_memory:
            totals = [emit.load(place, "float32") for place in self._places]
        count = len(halves)
        scales = [self._values.group_numbers("scales", head, step, group, half) for half in halves]
        totals = [scales[at % count].times_plus(products[at], total) for at, total in enumerate(totals)]
        if self._minimums:
            minimums = [self._values.group_numbers("minimums", head, step, group, half) for half in halves]
            sums = [emit.load_all(start + index * 4, "float32") for start in self._sums]
            totals = [minimums[at % count].times_plus(sums[at // count], total) for at, total in enumerate(totals)]
        if not self._in_memory:
            return totals
        self._store(emit, totals)
        return []
