"""Passes over the columns of a head's matrix that are computed together: one for each row of a sequence.

A row's pass folds the row before it into the matrix, and multiplies the result with the row's key and query:

    matrix += key' x added';  known = key @ matrix;  found = query @ matrix

From these sums come what the row adds and its output, without another pass:

    added = beta * (value - decay * known);  output = decay * found + (key . query) * added

So a step reads a matrix from memory once and writes it once. What is added to a column, and its output, are chains over
the key index, and rows follow each other: bits do not depend on the step.

With one decay for a head a matrix is kept as numbers times a *scale*, which takes the decays; what is added is divided
by it. When the scale falls below a limit the numbers are multiplied with it, and it is 1 again. That depends on the
decays since it was 1, and not on the step: the scale is kept in the tail's first row, behind its decay. With a decay
for each key index a pass multiplies the matrix, and keys and queries are multiplied beforehand.

Rows of the tail are not folded into the sequence's matrix: passes after the first of them are of a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import where
from executor_svc.cpu.kernels.states.plan import SequenceStep, UnitPlaces
from executor_svc.cpu.kernels.states.terms import TermLayout
from executor_svc.plan.state_sizes import HeadUnit

_FLOAT = 4
_VECTOR = LANES * _FLOAT
_UNROLLED = 8
"""Rows of a matrix in a loop's body."""
_ROWS_AHEAD = 2
_LEAST_SCALE = 2.0**-40


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Sizes of a part of a head's unit, and how it is computed."""

    terms: TermLayout
    tail: int
    dtype: Dtype
    vectors: int
    """Vectors of columns computed together."""

    @property
    def unit(self) -> HeadUnit:
        return self.terms.unit

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the part's matrix."""
        return self.unit.part_columns * _FLOAT

    @property
    def matrix_bytes(self) -> int:
        return self.unit.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class HeadPart:
    """What an item works on: numbers and addresses in the code that is made."""

    sizes: PartSizes
    step: SequenceStep
    head: Int
    column: Int
    """The first of the part, of the head's."""
    x: Int
    """The part's values in the sequence's first row of the step."""
    stride: Int
    y: Int
    vectors: Int
    scalars: Int
    """The head's terms in that row."""
    d: Int
    part: Int
    """In the sequence's state."""
    offset: Int
    """Of the part in its unit."""
    units: UnitPlaces
    copy: Int
    """Memory for a copy of the matrix."""
    ones: Int
    """Decays of 1, where each key index has its own."""

    def tail_row(self, position: Int) -> Int:
        """Return the address of a position's row of the tail."""
        row_bytes = self.sizes.unit.tail_columns * _FLOAT
        return self.part + position % self.sizes.tail * row_bytes + self.sizes.matrix_bytes

    def scale_offset(self) -> int:
        """Return the bytes from a part to its scale."""
        return self.sizes.matrix_bytes + (self.sizes.unit.padded_rows + 1) * _FLOAT

    def scale(self, emit: Emitter) -> Vec:
        """Return the scale of the state, in every lane; of a matrix of zeros it is 1."""
        if self.sizes.terms.by_key:
            return emit.vec(1.0)
        kept = emit.load_all(self.part + self.scale_offset(), "float32")
        return where(emit, self.step.folded.equals(0), emit.vec(1.0), kept)


@dataclass(frozen=True, slots=True)
class _Tail:
    """Addresses of a row of the tail."""

    key: Int
    decay: Int
    added: Int
    """Of the columns here."""


class ColumnPasses:
    """Vectors of a part's columns that are computed together."""

    def __init__(self, emit: Emitter, here: HeadPart, first: int) -> None:
        """first: of the vectors, in the part."""
        self._emit, self._here, self._first = emit, here, first
        self._sizes, self._terms, self._unit = here.sizes, here.sizes.terms, here.sizes.unit
        self._vectors = range(here.sizes.vectors)
        self._matrix, self._copy = here.part + first * _VECTOR, here.copy + first * _VECTOR

    def run(self, scale: Vec) -> None:
        """Emit all rows of a step; scale: that of the matrix before it."""
        emit, step = self._emit, self._here.step
        emit.when(step.folded.equals(0), self._clear)
        step.save_at(emit, step.folded, lambda pages: self._save(pages, scale))
        scale = emit.loop(step.folded, step.context - 1, 1, self._fold_earlier, [scale])[0]

        alone = step.context.equals(step.folded)  # no row of the tail is left: what is folded changes nothing
        last = self._tail(step.context - 1)
        key = self._here.vectors.where(alone, last.key)
        decays = self._here.ones.where(alone, last.decay) if self._terms.by_key else last.decay
        decay = emit.vec(1.0) if self._terms.by_key else emit.load_all(last.decay, "float32")
        added = [emit.load(last.added + v * _VECTOR, "float32") for v in self._vectors]
        added = [where(emit, alone, emit.vec(0.0), each) for each in added]
        before = key, decays

        def row(index: Int, carried: list[Vec]) -> list[Vec]:
            return self._row(index, before, carried)

        emit.loop(0, step.rows, 1, row, [scale, where(emit, alone, emit.vec(1.0), decay), *added])

    def _fold_earlier(self, position: Int, carried: list[Vec]) -> list[Vec]:
        """Emit the fold of a row of the tail that is not the last one."""
        emit, row = self._emit, self._tail(position)
        decay = emit.vec(1.0) if self._terms.by_key else emit.load_all(row.decay, "float32")
        scale, source, factor = self._decayed(carried[0] * decay, self._matrix, self._matrix)
        added = [emit.load(row.added + v * _VECTOR, "float32") * factor for v in self._vectors]
        self._pass(source, self._matrix, row.key, row.decay, added, None)
        self._here.step.save_at(emit, position + 1, lambda pages: self._save(pages, scale))
        return [scale]

    def _row(self, index: Int, before: tuple[Int, Int], carried: list[Vec]) -> list[Vec]:
        """Emit a row's pass, its output, and what it adds; before: key and decays of the row before the first."""
        emit, here, terms, step = self._emit, self._here, self._terms, self._here.step
        is_first, own = index.equals(0), here.vectors + index * terms.vector_bytes
        self._prefetch(index + _ROWS_AHEAD)
        key = before[0].where(is_first, own - terms.vector_bytes)
        decays = key
        if terms.by_key:
            decays = before[1].where(is_first, own - terms.vector_bytes + terms.decay_offset)
        into = self._matrix.where(index.less(step.folding + 1), self._copy)
        source = self._matrix.where(index.less(step.folding + 2), self._copy)
        scale, source, factor = self._decayed(carried[0] * carried[1], source, into)
        sums = self._pass(source, into, key, decays, [each * factor for each in carried[2:]], own)
        step.save_at(emit, step.context + index, lambda pages: self._save(pages, scale))
        if not terms.by_key:
            place = here.part + here.scale_offset()
            emit.when(index.equals(step.folding), lambda: emit.store(scale, place, "float32", 1))
        decay = emit.load_all(here.scalars + index * terms.scalar_bytes, "float32")
        added = self._finish(index, decay * scale, sums)
        return [scale, decay, *added]

    def _decayed(self, scale: Vec, source: Int, into: Int) -> tuple[Vec, Int, Vec]:
        """Return the scale, the matrix that has it, and the factor of what is added; the matrix may be written."""
        emit, one = self._emit, self._emit.vec(1.0)
        if self._terms.by_key:
            return one, source, one
        lane = emit.builder.extract_element(scale.value, ir.Constant(ir.IntType(32), 0))
        is_low = emit.builder.fcmp_unordered("<", lane, ir.Constant(ir.FloatType(), _LEAST_SCALE))
        emit.when(is_low, lambda: self._multiply(source, into, scale))
        scale = where(emit, is_low, one, scale)
        return scale, into.where(is_low, source), one / scale

    def _finish(self, index: Int, decay: Vec, sums: Sequence[Vec]) -> list[Vec]:
        """Emit a row's outputs; return what it adds. decay: with the scale."""
        emit, here, terms = self._emit, self._here, self._terms
        scalars = here.scalars + index * terms.scalar_bytes
        beta, product = (emit.load_all(scalars + which * _FLOAT, "float32") for which in (1, 2))
        skip = None if terms.is_delta else emit.load_all(here.d + here.head * _FLOAT, "float32")
        total = []
        for v in self._vectors:
            value, own = self._value(index, v), sums[v :: len(self._vectors)]
            own = own if terms.by_key else [each * decay for each in own]
            added = (value - own[0]) * beta if terms.is_delta else value * beta
            found = added.times_plus(product, own[-1])
            self._store(found if skip is None else value.times_plus(skip, found), index, v)
            total.append(added)
        tail = self._tail(here.step.context + index).added

        def keep() -> None:
            for v, added in enumerate(total):
                emit.store(added, tail + v * _VECTOR, "float32")

        emit.when(here.step.folding.less(index + 1), keep)
        return total

    # ------------------------------------------------------------------ matrices

    def _pass(self, source: Int, into: Int, key: Int, decays: Int, added: Sequence[Vec], own: Int | None) -> list[Vec]:
        """Emit a fold into a matrix; return the sums for the row with these terms, those of the key first."""
        emit, sizes = self._emit, self._sizes
        offsets = self._terms.sum_offsets if own is not None else ()

        def row(index: Int, found: list[Vec]) -> list[Vec]:
            place, at = index * sizes.row_bytes, index * _FLOAT
            weight = emit.load_all(key + at, "float32")
            numbers = [emit.load(source + place + v * _VECTOR, "float32") for v in self._vectors]
            if self._terms.by_key:
                decay = emit.load_all(decays + at, "float32")
                numbers = [each * decay for each in numbers]
            numbers = [weight.times_plus(more, each) for more, each in zip(added, numbers, strict=True)]
            for v, each in enumerate(numbers):
                emit.store(each, into + place + v * _VECTOR, "float32")
            factors = [emit.load_all(own + offset + at, "float32") for offset in offsets] if own is not None else []
            pairs = [(factor, number) for factor in factors for number in numbers]
            return [factor.times_plus(number, total) for (factor, number), total in zip(pairs, found, strict=True)]

        def several(index: Int, found: list[Vec]) -> list[Vec]:
            for which in range(_UNROLLED):
                found = row(index + which, found)
            return found

        rows, nothing = self._unit.rows, [emit.vec(0.0)] * (len(offsets) * len(self._vectors))
        whole = rows // _UNROLLED * _UNROLLED
        return emit.loop(whole, rows, 1, row, emit.loop(0, whole, _UNROLLED, several, nothing))

    def _each_vector(self, body: Any) -> None:
        """Emit body(offset) for the offsets of all vectors of the columns from the first."""

        def row(index: Int, _: list[Vec]) -> None:
            for v in self._vectors:
                body(index * self._sizes.row_bytes + v * _VECTOR)

        self._emit.loop(0, self._unit.rows, 1, row)

    def _clear(self) -> None:
        self._each_vector(lambda at: self._emit.store(self._emit.vec(0.0), self._matrix + at, "float32"))

    def _multiply(self, source: Int, into: Int, factor: Vec) -> None:
        emit = self._emit
        self._each_vector(lambda at: emit.store(emit.load(source + at, "float32") * factor, into + at, "float32"))

    def _save(self, pages: Int, scale: Vec) -> None:
        """Emit a copy of the columns to another state."""
        emit, here = self._emit, self._here
        part = here.units.address(emit, pages, here.head + 1) + here.offset
        into = part + self._first * _VECTOR
        self._each_vector(lambda at: emit.store(emit.load(self._matrix + at, "float32"), into + at, "float32"))
        if not self._terms.by_key:
            emit.store(scale, part + here.scale_offset(), "float32", 1)

    # ------------------------------------------------------------------ rows

    def _tail(self, position: Int) -> _Tail:
        row = self._here.tail_row(position)
        decay = row + self._unit.padded_rows * _FLOAT
        return _Tail(row, decay, decay + self._unit.decay_columns * _FLOAT + self._first * _VECTOR)

    def _prefetch(self, index: Int) -> None:
        """Prefetch what lies far from what the row before reads and writes; a row there may not be."""
        dtype, row = self._sizes.dtype, self._terms.shape.num_heads * self._unit.columns
        size = len(self._vectors) * LANES * ITEM_BYTES[dtype]
        at = self._first * LANES * ITEM_BYTES[dtype]
        self._emit.prefetch(self._here.x + index * self._here.stride + at, size)
        self._emit.prefetch(self._here.y + index * (row * ITEM_BYTES[dtype]) + at, size)

    def _value(self, index: Int, v: int) -> Vec:
        dtype = self._sizes.dtype
        at = self._here.x + index * self._here.stride + self._number(v) * ITEM_BYTES[dtype]
        count = self._count(v)
        return self._emit.load(at, dtype) if count is None else self._emit.load_some(at, dtype, count)

    def _store(self, output: Vec, index: Int, v: int) -> None:
        dtype, row = self._sizes.dtype, self._terms.shape.num_heads * self._unit.columns
        at, count = self._here.y + (index * row + self._number(v)) * ITEM_BYTES[dtype], self._count(v)
        if count is None:
            self._emit.store(output, at, dtype)
        else:
            self._emit.store_some(output, at, dtype, count)

    def _number(self, v: int) -> int:
        """Return the first column of a vector, of the part's."""
        return (self._first + v) * LANES

    def _count(self, v: int) -> Int | None:
        """Return how many columns of a vector there are; None: all, in every part."""
        if self._unit.columns % self._unit.part_columns == 0:
            return None
        return self._emit.integer(self._unit.columns - self._number(v)) - self._here.column
