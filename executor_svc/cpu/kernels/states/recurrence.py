"""The recurrence of a head on the CPU: passes over the columns of its matrix that an item has, one for each row.

A row's pass folds the row before it into the matrix, and multiplies the result with the row's key and query:

    matrix = decay' * matrix + key' x added';  known = key @ matrix;  found = query @ matrix

From these sums come what the row adds and its output, without another pass:

    added = beta * (value - decay * known);  output = decay * found + (key . query) * added

(with a decay for each key index the key and the query are multiplied with them beforehand, and `decay` is 1). So a step
reads a matrix from memory once and writes it once. What is added to a column, and its output, are chains over the key
index, and rows follow each other: bits do not depend on the step.

The sums of rows that follow each other in the tail are of a copy of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.tiles import scratch
from executor_svc.cpu.kernels.states.plan import SequenceStep, UnitPlaces
from executor_svc.cpu.kernels.states.terms import TermLayout
from executor_svc.device.states import HeadUnit, Recurrence

_FLOAT = 4
_VECTOR = LANES * _FLOAT
_UNROLLED = 4
"""Rows of a matrix that a loop's body has."""


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
    to the next, y [rows, H * columns], vectors and scalars of `TermLayout`, d [H] or 0, the pool, bytes of a page,
    places of units, table of the plan.
    """
    return _Recurrence(code, dtype, kernel).add()


@dataclass(frozen=True, slots=True)
class _Item:
    """Addresses of what an item works on."""

    step: SequenceStep
    head: Int
    column: Int
    """The first of its part, of the head's."""
    x: Int
    """The part's values in the step's first row of the sequence."""
    stride: Int
    y: Int
    vectors: Int
    scalars: Int
    d: Int
    part: Int
    """In the sequence's state."""
    offset: Int
    """Of the part in its unit."""
    units: UnitPlaces


@dataclass(frozen=True, slots=True)
class _Folded:
    """Addresses of a row that is folded."""

    key: Int
    decay: Int
    added: Int


class _Recurrence:
    def __init__(self, code: Code, dtype: Dtype, kernel: HeadKernel) -> None:
        self._code, self._kernel = code, kernel
        self.dtype: Dtype = dtype
        self.unit: HeadUnit = kernel.shape.unit
        self.num_heads = kernel.shape.num_heads
        self.terms = TermLayout.of(kernel.shape)
        vectors = self.unit.part_columns // LANES
        self.vectors = vectors if code.isa.has("avx512f") else 1
        """Of the part that a pass has."""
        self.num_sums = self.vectors * len(self.terms.sum_offsets)
        self._passes = vectors // self.vectors
        self.row_bytes = self.unit.part_columns * _FLOAT
        self._matrix_bytes = self.unit.rows * self.row_bytes
        self._name = f"recurrence_{dtype}_{self.terms}_{kernel.tail}_{kernel.first_value}"

    def add(self) -> str:
        return self._code.kernel(self._name, 11, self._item)

    def _item(
        self, emit: Emitter, item: Int, _: Int, __: Int, x: Int, stride: Int, y: Int, vectors: Int, scalars: Int,
        d: Int, pool: Int, page_bytes: Int, places: Int, table: Int,
    ) -> None:  # fmt: skip
        unit, shape, size = self.unit, self._kernel.shape, ITEM_BYTES[self.dtype]
        sizes = self._matrix_bytes, self.num_sums * _VECTOR, self.vectors * _VECTOR
        copy, sums, added = (scratch(emit, each) for each in sizes)
        step = SequenceStep.read(emit, table, item // self._kernel.items)
        which = item % self._kernel.items
        head, part = which // unit.num_parts, which % unit.num_parts
        units, column = UnitPlaces(pool, page_bytes, places), part * unit.part_columns
        value = head * unit.columns + column
        offset = part * (unit.part_floats(self._kernel.tail) * _FLOAT)
        here = _Item(
            step, head, column, x + step.row * stride + (value + self._kernel.first_value) * size, stride,
            y + (step.row * (shape.num_heads * unit.columns) + value) * size,
            vectors + step.row * self.terms.vector_bytes + self.terms.key_offset(emit, head),
            scalars + step.row * self.terms.scalar_bytes + head * _FLOAT, d,
            units.address(emit, step.pages, head + 1) + offset, offset, units,
        )  # fmt: skip
        for index in range(self._passes):
            _Columns(
                self, emit, here, index * self.vectors, (copy + index * (self.vectors * _VECTOR), sums, added)
            ).run()
        self._write_keys(emit, here)

    def _write_keys(self, emit: Emitter, here: _Item) -> None:
        """Write keys and decays of the rows that lie in the tail, after all columns of the part have read it."""
        unit, step = self.unit, here.step

        def row(index: Int, _: list[Vec]) -> None:
            into, terms = self.tail_row(here, step.context + index), here.vectors + index * self.terms.vector_bytes
            for at in range(0, unit.padded_rows, LANES):
                emit.store(emit.load(terms + at * _FLOAT, "float32"), into + at * _FLOAT, "float32")
            into = into + unit.padded_rows * _FLOAT
            if unit.decays == 1:
                decay = emit.load_all(here.scalars + index * self.terms.scalar_bytes, "float32")
                emit.store(decay, into, "float32")
                return
            for at in range(0, unit.decay_columns, LANES):
                decay = emit.load(terms + self.terms.decay_offset + at * _FLOAT, "float32")
                emit.store(decay, into + at * _FLOAT, "float32")

        emit.loop(step.folding, step.rows, 1, row)

    def tail_row(self, here: _Item, position: Int) -> Int:
        """Return the address of a position's row of the tail."""
        return here.part + position % self._kernel.tail * (self.unit.tail_columns * _FLOAT) + self._matrix_bytes

    # ------------------------------------------------------------------ passes

    def fold(self) -> Callable[..., None]:
        """Add a helper that folds a row: (matrix, into, key, decay, added)."""
        return self._pass("fold", folds=True, sums=False)

    def sums(self) -> Callable[..., None]:
        """Add a helper that computes sums: (matrix, key and query, sums)."""
        return self._pass("sums", folds=False, sums=True)

    def fold_and_sum(self) -> Callable[..., None]:
        """Add a helper that does both: (matrix, into, key, decay, added, key and query, sums)."""
        return self._pass("fold_and_sum", folds=True, sums=True)

    def copy(self) -> Callable[..., None]:
        """Add a helper that copies columns: (matrix, into)."""

        def body(emit: Emitter, matrix: Int, into: Int) -> None:
            def row(index: Int, _: list[Vec]) -> None:
                for v in range(self.vectors):
                    at = index * self.row_bytes + v * _VECTOR
                    emit.store(emit.load(matrix + at, "float32"), into + at, "float32")

            emit.loop(0, self.unit.rows, 1, row)

        return self._code.helper(f"{self._name}_copy", 2, body)

    def _pass(self, what: str, folds: bool, sums: bool) -> Callable[..., None]:
        rows, vectors, terms = self.unit.rows, range(self.vectors), self.terms

        def body(emit: Emitter, matrix: Int, *rest: Int) -> None:
            into, key, decay, added = rest[:4] if folds else (matrix,) * 4
            own, totals = rest[-2:] if sums else (matrix,) * 2
            amounts = [emit.load(added + v * _VECTOR, "float32") for v in vectors] if folds else []
            shared = emit.load_all(decay, "float32") if folds and self.unit.decays == 1 else None

            def row(index: Int, found: list[Vec]) -> list[Vec]:
                place, at = index * self.row_bytes, index * _FLOAT
                numbers = [emit.load(matrix + place + v * _VECTOR, "float32") for v in vectors]
                if folds:
                    factor = shared or emit.load_all(decay + at, "float32")
                    weight = emit.load_all(key + at, "float32")
                    numbers = [weight.times_plus(amounts[v], numbers[v] * factor) for v in vectors]
                    for v in vectors:
                        emit.store(numbers[v], into + place + v * _VECTOR, "float32")
                factors = [emit.load_all(own + offset + at, "float32") for offset in terms.sum_offsets] if sums else []
                pairs = [(factor, number) for factor in factors for number in numbers]
                return [factor.times_plus(number, total) for (factor, number), total in zip(pairs, found, strict=True)]

            found = _unrolled(emit, rows, row, [emit.vec(0.0)] * (len(terms.sum_offsets) * len(vectors) if sums else 0))
            for index, total in enumerate(found):
                emit.store(total, totals + index * _VECTOR, "float32")

        count = 1 + 4 * folds + 2 * sums
        return self._code.helper(f"{self._name}_{what}", count, body)


def _unrolled(emit: Emitter, rows: int, row: Callable[[Int, list[Vec]], list[Vec]], carried: list[Vec]) -> list[Vec]:
    """Emit row(index, carried) for all rows in order, some in a loop's body."""

    def several(index: Int, found: list[Vec]) -> list[Vec]:
        for which in range(_UNROLLED):
            found = row(index + which, found)
        return found

    whole = rows // _UNROLLED * _UNROLLED
    return emit.loop(whole, rows, 1, row, emit.loop(0, whole, _UNROLLED, several, carried))


class _Columns:
    """Some vectors of a part's columns: all rows of a sequence."""

    def __init__(
        self, owner: _Recurrence, emit: Emitter, here: _Item, first: int, memory: tuple[Int, Int, Int]
    ) -> None:
        """first: of the vectors, in the part. memory: of a copy of the matrix, of sums, of what a row adds."""
        self._owner, self._emit, self._here, self._first = owner, emit, here, first
        copy, self._sums, self._added = memory
        self._copy, self._matrix = copy, here.part + first * _VECTOR

    def run(self) -> None:
        emit, step = self._emit, self._here.step
        emit.when(step.folded.equals(0), self._clear)
        step.save_at(emit, step.folded, self._save)

        def earlier(position: Int, _: list[Vec]) -> None:
            row = self._tail(position)
            self._owner.fold()(emit, self._matrix, self._matrix, row.key, row.decay, row.added)
            step.save_at(emit, position + 1, self._save)

        emit.loop(step.folded, step.context - 1, 1, earlier)
        emit.loop(0, step.rows, 1, lambda index, _: self._row(index))

    def _row(self, index: Int) -> None:
        """Emit a row's pass, its output, and what it adds."""
        emit, owner, here, step = self._emit, self._owner, self._here, self._here.step
        terms = here.vectors + index * owner.terms.vector_bytes
        is_first = index.equals(0)
        alone = emit.builder.and_(is_first, step.context.equals(step.folded))

        def fold_and_sum() -> None:
            before = self._before(index, is_first)
            source = self._matrix.where(index.less(step.folding + 2), self._copy)
            into = self._matrix.where(index.less(step.folding + 1), self._copy)
            owner.fold_and_sum()(emit, source, into, before.key, before.decay, before.added, terms, self._sums)
            step.save_at(emit, step.context + index, self._save)

        emit.when(alone, lambda: owner.sums()(emit, self._matrix, terms, self._sums))
        emit.when(emit.builder.not_(alone), fold_and_sum)
        self._finish(index)

    def _before(self, index: Int, is_first: Any) -> _Folded:
        """Return the row before a row: the last of the tail, or one of this step."""
        tail, here, terms = self._tail(self._here.step.context - 1), self._here, self._owner.terms
        key = here.vectors + (index - 1) * terms.vector_bytes
        decay = key + terms.decay_offset if terms.by_key else here.scalars + (index - 1) * terms.scalar_bytes
        return _Folded(
            tail.key.where(is_first, key),
            tail.decay.where(is_first, decay),
            tail.added.where(is_first, self._added),
        )

    def _finish(self, index: Int) -> None:
        emit, owner, here = self._emit, self._owner, self._here
        terms, scalars = owner.terms, here.scalars + index * owner.terms.scalar_bytes
        decay, beta, product = (emit.load_all(scalars + which * terms.heads * _FLOAT, "float32") for which in range(3))
        skip = None if terms.is_delta else emit.load_all(here.d + here.head * _FLOAT, "float32")
        tail, in_tail = self._tail(here.step.context + index).added, here.step.folding.less(index + 1)
        for v in range(owner.vectors):
            value = self._value(index, v)
            sums = [
                emit.load(self._sums + place * _VECTOR, "float32") for place in range(v, owner.num_sums, owner.vectors)
            ]
            sums = sums if terms.by_key else [each * decay for each in sums]
            added = (value - sums[0]) * beta if terms.is_delta else value * beta
            found = added.times_plus(product, sums[-1])
            self._store(found if skip is None else value.times_plus(skip, found), index, v)
            emit.store(added, self._added + v * _VECTOR, "float32")

            def keep(added: Vec = added, v: int = v) -> None:
                emit.store(added, tail + v * _VECTOR, "float32")

            emit.when(in_tail, keep)

    # ------------------------------------------------------------------ memory

    def _tail(self, position: Int) -> _Folded:
        unit, row = self._owner.unit, self._owner.tail_row(self._here, position)
        decay = row + unit.padded_rows * _FLOAT
        return _Folded(row, decay, decay + unit.decay_columns * _FLOAT + self._first * _VECTOR)

    def _clear(self) -> None:
        def row(index: Int, _: list[Vec]) -> None:
            for v in range(self._owner.vectors):
                place = self._matrix + index * self._owner.row_bytes + v * _VECTOR
                self._emit.store(self._emit.vec(0.0), place, "float32")

        self._emit.loop(0, self._owner.unit.rows, 1, row)

    def _save(self, pages: Int) -> None:
        """Emit a copy of the columns to another state."""
        here = self._here
        target = here.units.address(self._emit, pages, here.head + 1) + here.offset + self._first * _VECTOR
        self._owner.copy()(self._emit, self._matrix, target)

    def _value(self, index: Int, v: int) -> Vec:
        at = self._here.x + index * self._here.stride + self._number(v) * ITEM_BYTES[self._owner.dtype]
        count = self._count(v)
        if count is None:
            return self._emit.load(at, self._owner.dtype)
        return self._emit.load_some(at, self._owner.dtype, count)

    def _store(self, output: Vec, index: Int, v: int) -> None:
        dtype, unit = self._owner.dtype, self._owner.unit
        row = index * (self._owner.num_heads * unit.columns) + self._number(v)
        at, count = self._here.y + row * ITEM_BYTES[dtype], self._count(v)
        if count is None:
            self._emit.store(output, at, dtype)
        else:
            self._emit.store_some(output, at, dtype, count)

    def _number(self, v: int) -> int:
        """Return the first column of a vector, of the part's."""
        return (self._first + v) * LANES

    def _count(self, v: int) -> Int | None:
        """Return how many columns of a vector there are; None: all, in every part."""
        unit = self._owner.unit
        if unit.columns % unit.part_columns == 0:
            return None
        return self._emit.integer(unit.columns - self._number(v)) - self._here.column
