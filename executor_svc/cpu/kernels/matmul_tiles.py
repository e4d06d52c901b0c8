"""Tiles of the matrix product: few rows and a whole panel, with sums and widened weights in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, BfloatType, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.panel_layout import PANEL, inner_step, load_weights, prefetched, widened_weights

CHAINS = 1
"""Partial sums of each element. Exactness only needs the same number for all numbers of rows; one is as fast as two
for few rows (benchmarks/results/exactness_cost.jsonl)."""
_UNROLL = 2
_FEW_ROWS = 4
_I32, _I16 = ir.IntType(32), ir.IntType(16)
_VI32, _VF32 = ir.VectorType(_I32, LANES), ir.VectorType(ir.FloatType(), LANES)
_PAIRS = ir.VectorType(BfloatType(), 2 * LANES)


@dataclass(frozen=True, slots=True)
class Output:
    """How sums become elements of the result."""

    dtype: Dtype
    """What they are rounded to, and the bias has."""
    out: Dtype
    """What they are written as."""
    with_bias: bool
    factor_dtype: Dtype | None = None
    """Of the weight, and of rows of x; None: `dtype`."""

    def __str__(self) -> str:
        factors = "" if self.factor_dtype is None else f"{self.factor_dtype}_"
        return f"{factors}{self.dtype}_{self.out}{'_bias' if self.with_bias else ''}"

    @property
    def factors(self) -> Dtype:
        return self.factor_dtype or self.dtype

    def write(self, emit: Emitter, total: Vec, y: Int, bias: Int, half: int, left: Int | None) -> None:
        """Write 16 sums of a row, the first or second half of a panel; left: columns of a panel that is not whole."""
        place, size = half * LANES, ITEM_BYTES[self.dtype]
        address, count = y + place * ITEM_BYTES[self.out], None if left is None else left - place
        if self.with_bias:
            at = bias + place * size
            total = total + (emit.load(at, self.dtype) if count is None else emit.load_some(at, self.dtype, count))
        number = total if self.out == self.dtype else total.rounded(self.dtype)  # stores round
        if count is None:
            emit.store(number, address, self.out)
        else:
            emit.store_some(number, address, self.out, count)


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows and columns that are computed together: as many sums as fit into registers beside weights and a factor."""

    rows: int
    vectors: int
    """Vectors of LANES columns; a panel has two."""


def tile_shapes(isa: Isa) -> tuple[Shape, ...]:
    """Return the tiles of a level, most rows first. It has 32 registers of 16 floats, or 16 of 8.

    Each more has to be compiled at start: large ones take longest, and gain least.

    One or two rows read all columns of a panel at once, as memory then sets the pace.
    """
    if isa.has("avx512f"):
        return tuple(Shape(rows, 2) for rows in (12, 8, 4, 2, 1))
    return Shape(5, 1), Shape(4, 1), Shape(3, 1), Shape(2, 2), Shape(1, 2)


def has_pairs(isa: Isa, dtype: Dtype) -> bool:
    """Return whether the level has a dot product of pairs of dtype; else `widen_rows` makes rows of x floats."""
    return dtype == "bfloat16" and isa.has("avx512bf16")


def has_tiles(isa: Isa, dtype: Dtype) -> bool:
    """Return whether products of dtype go through AMX's tiles (`amx`)."""
    return dtype == "bfloat16" and isa.has("amx-bf16")


def tile(code: Code, output: Output, shape: Shape, whole: bool = True) -> Callable[..., None]:
    """Add a helper that computes `shape.rows` rows of one panel; returns a function that emits a call.

    Its arguments: x, of floats if not `has_pairs`, and the distance of its rows in bytes; a panel, and the one that
    this thread will probably need next; the inner dimension; y, and the distance of its rows; the bias; the
    columns that a panel which is not whole writes.
    """
    dtype, pairs = output.factors, has_pairs(code.isa, output.factors)
    step = inner_step(dtype)
    step_bytes = PANEL * step * ITEM_BYTES[dtype]
    factor_bytes = step * ITEM_BYTES[dtype if pairs else "float32"]

    def body(
        emit: Emitter,
        x: Int,
        x_stride: Int,
        weight: Int,
        coming: Int,
        inner: Int,
        y: Int,
        y_stride: Int,
        bias: Int,
        left: Int,
    ) -> None:
        starts = [x + x_stride * row for row in range(shape.rows)]

        def advance(index: Int, sums: list[Vec], halves: range, last: bool = False) -> list[Vec]:
            offset = index * step_bytes
            emit.prefetch(coming + offset, prefetched(shape.rows, step_bytes), level=2)
            places = [weight + offset + step_bytes // 2 * half for half in halves]
            weights = [load_weights(emit, place, dtype) for place in places]
            return _add_step(
                emit, dtype, pairs, sums, [start + index * factor_bytes for start in starts], weights, last
            )

        def columns(halves: range) -> None:
            def unrolled(index: Int, sums: list[Vec]) -> list[Vec]:
                size = len(sums) // chains
                chained = [sums[start : start + size] for start in range(0, len(sums), size)]
                for offset in range(_UNROLL):
                    chained[offset % chains] = advance(index + offset, chained[offset % chains], halves)
                return [each for chain in chained for each in chain]

            even, count = steps // _UNROLL * _UNROLL, shape.rows * len(halves)
            sums = emit.loop(0, even, _UNROLL, unrolled, [emit.vec(0.0)] * (count * chains))
            for start in range(count, len(sums), count):
                sums[:count] = [first + other for first, other in zip(sums, sums[start:], strict=False)]
            sums = emit.loop(even, steps, 1, lambda index, each: advance(index, each, halves), sums[:count])
            if pairs:  # odd K: the last number has no partner
                sums = emit.loop(steps, (inner + 1) // 2, 1, lambda at, each: advance(at, each, halves, True), sums)
            for place, total in enumerate(sums):
                row, half = divmod(place, len(halves))
                output.write(emit, total, y + y_stride * row, bias, halves[half], None if whole else left)

        steps = inner // step if pairs else (inner + (step - 1)) // step
        chains = CHAINS if shape.rows <= _FEW_ROWS else 1
        for first in range(0, PANEL // LANES, shape.vectors):
            columns(range(first, first + shape.vectors))

    return code.helper(f"tile_{output}_{shape.rows if whole else 'edge'}", 9, body)


def _add_step(
    emit: Emitter, dtype: Dtype, pairs: bool, sums: list[Vec], places: Sequence[Int], weights: Sequence[Any], last: bool
) -> list[Vec]:
    """Add the products of one step of K: the factors at these places, one for each row, with loaded weights."""
    if pairs:
        loaded = (load_pair(emit, place, last) for place in places)
        return _add_products(sums, loaded, weights, lambda total, *each: dot(emit, total, *each))
    for which, floats in enumerate(zip(*(widened_weights(emit, each, dtype) for each in weights), strict=True)):
        numbers = (emit.load_all(place + which * ITEM_BYTES["float32"], "float32") for place in places)
        sums = _add_products(sums, numbers, floats, lambda total, number, each: number.times_plus(each, total))
    return sums


def widen_rows(code: Code) -> str:
    """Add the kernel that widens rows of bfloat16; returns its name.

    Items: one for each row. Arguments: rows, x [rows, K], y [rows, K rounded up to even] floats, K; beyond K y is 0.
    """
    size = ITEM_BYTES["bfloat16"]

    def body(emit: Emitter, item: Int, _: Int, __: Int, x: Int, y: Int, inner: Int) -> None:
        even = (inner + 1) // 2 * 2
        source, target = x + item * inner * size, y + item * even * ITEM_BYTES["float32"]

        def widen(at: Int, _: list[Vec]) -> None:
            numbers = emit.load(source + at * size, "bfloat16")
            emit.store(numbers, target + at * ITEM_BYTES["float32"], "float32")

        def widen_rest(at: Int, _: list[Vec]) -> None:
            numbers = emit.load_some(source + at * size, "bfloat16", inner - at)
            emit.store_some(numbers, target + at * ITEM_BYTES["float32"], "float32", even - at)

        whole = inner // LANES * LANES  # AVX2 has no load of some bfloat16: LLVM writes a branch for each
        emit.loop(0, whole, LANES, widen)
        emit.loop(whole, even, LANES, widen_rest)

    return code.kernel("widen_rows", 4, body)


def _add_products(
    sums: list[Vec], factors: Iterable[Any], weights: Sequence[Any], add: Callable[..., Vec]
) -> list[Vec]:
    """Add the product of each factor and each vector of weights to its sum.

    A factor is loaded just before its products: LLVM keeps the order, and all factors at once would not fit registers.
    """
    totals, result = iter(sums), []
    for factor in factors:
        result += [add(next(totals), factor, floats) for floats in weights]
    return result


def load_pair(emit: Emitter, address: Int, last: bool) -> Any:
    """Load a pair of bfloat16 of a row of x into every lane; last: half a pair, the other half is 0."""
    number = emit.builder.load(emit.pointer(address, _I16 if last else _I32))
    number.align = 2
    number = emit.builder.zext(number, _I32) if last else number
    nothing = ir.Constant(_VI32, ir.Undefined)
    one = emit.builder.insert_element(nothing, number, ir.Constant(_I32, 0))
    return emit.builder.shuffle_vector(one, nothing, ir.Constant(_VI32, [0] * LANES))


def dot(emit: Emitter, total: Vec, factor: Any, weights: Any) -> Vec:
    """Return total plus the products of pairs of bfloat16: factor's, in every lane, and weights'."""
    function = emit.declare("llvm.x86.avx512bf16.dpbf16ps.512", _VF32, [_VF32, _PAIRS, _PAIRS])
    pairs = [emit.builder.bitcast(each, _PAIRS) for each in (factor, weights)]
    return Vec(emit, emit.builder.call(function, [total.value, *pairs]))
