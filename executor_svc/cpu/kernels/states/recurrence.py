"""The recurrence of heads on the CPU: the kernel and its items, whose columns are computed by `columns`."""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.tiles import scratch
from executor_svc.cpu.kernels.states.columns import ColumnPasses, HeadPart, PartSizes
from executor_svc.cpu.kernels.states.plan import SequenceStep, UnitPlaces
from executor_svc.cpu.kernels.states.terms import TermLayout
from executor_svc.plan.state_sizes import Recurrence

_FLOAT = 4
_VECTOR = LANES * _FLOAT


@dataclass(frozen=True, slots=True)
class HeadKernel:
    """What a kernel is made for."""

    shape: Recurrence
    tail: int
    first_value: int
    """Column of x at which the values of all heads begin."""

    @property
    def items(self) -> int:
        """Items of a sequence."""
        return self.shape.num_heads * self.shape.unit.num_parts


def recurrence(code: Code, dtype: Dtype, kernel: HeadKernel) -> str:
    """Add the kernel; returns its name.

    Items: one for each part of each head of each sequence of the plan. Arguments: items, x, bytes from one of its rows
    to the next, y [rows, H * columns], vectors and scalars of `TermLayout` and the rows of each head there, d [H] or 0,
    the pool, bytes of a page, places of units, table of the plan.
    """
    terms = TermLayout.of(kernel.shape)
    vectors = terms.unit.part_columns // LANES
    at_once = vectors if code.isa.has("avx512f") else 1
    sizes = PartSizes(terms, kernel.tail, dtype, at_once)
    unit, size = terms.unit, ITEM_BYTES[dtype]

    def body(
        emit: Emitter, item: Int, _: Int, __: Int, x: Int, stride: Int, y: Int, vectors_at: Int, scalars: Int,
        height: Int, d: Int, pool: Int, page_bytes: Int, places: Int, table: Int,
    ) -> None:  # fmt: skip
        copy, ones = scratch(emit, sizes.matrix_bytes), scratch(emit, unit.padded_rows * _FLOAT)
        step = SequenceStep.read(emit, table, item // kernel.items)
        which = item % kernel.items
        head, part = which // unit.num_parts, which % unit.num_parts
        units, column = UnitPlaces(pool, page_bytes, places), part * unit.part_columns
        value = head * unit.columns + column
        offset = part * (unit.part_floats(kernel.tail) * _FLOAT)
        here = HeadPart(
            sizes, step, head, column, x + step.row * stride + (value + kernel.first_value) * size, stride,
            y + (step.row * (kernel.shape.num_heads * unit.columns) + value) * size,
            vectors_at + (terms.key_head(head) * height + step.row) * terms.vector_bytes,
            scalars + (head * height + step.row) * terms.scalar_bytes, d,
            units.address(emit, step.pages, head + 1) + offset, offset, units, copy, ones,
        )  # fmt: skip
        _fill_ones(emit, here)
        scale = here.scale(emit)
        for first in range(0, vectors, at_once):
            ColumnPasses(emit, here, first).run(scale)
        _write_keys(emit, here)

    return code.kernel(f"recurrence_{dtype}_{terms}_{kernel.tail}_{kernel.first_value}", 12, body)


def _fill_ones(emit: Emitter, here: HeadPart) -> None:
    """Write the decays of a row that changes nothing, where each key index has its own."""
    if here.sizes.terms.by_key:
        for at in range(0, here.sizes.unit.padded_rows, LANES):
            emit.store(emit.vec(1.0), here.ones + at * _FLOAT, "float32")


def _write_keys(emit: Emitter, here: HeadPart) -> None:
    """Write keys and decays of the rows that lie in the tail, after all columns of the part have read it."""
    unit, terms, step = here.sizes.unit, here.sizes.terms, here.step

    def row(index: Int, _: list[Vec]) -> None:
        into, own = here.tail_row(step.context + index), here.vectors + index * terms.vector_bytes
        for at in range(0, unit.padded_rows, LANES):
            emit.store(emit.load(own + at * _FLOAT, "float32"), into + at * _FLOAT, "float32")
        into = into + unit.padded_rows * _FLOAT
        if not terms.by_key:
            decay = emit.load_all(here.scalars + index * terms.scalar_bytes, "float32")
            emit.store(decay, into, "float32", 1)
            return
        for at in range(0, unit.decay_columns, LANES):
            decay = emit.load(own + terms.decay_offset + at * _FLOAT, "float32")
            emit.store(decay, into + at * _FLOAT, "float32")

    emit.loop(step.folding, step.rows, 1, row)
