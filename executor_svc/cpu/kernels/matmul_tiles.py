"""Tiles of the matrix product: few rows and a whole panel, with sums and widened weights in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, BfloatType, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.panels import PANEL, inner_step, load_weights, widened_weights

CHAINS = 1
"""Partial sums of each element. Exactness only needs the same number for all numbers of rows; one is as fast as two
(`benchmarks exactness_cost` compares them for few rows)."""
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

    def __str__(self) -> str:
        return f"{self.dtype}_{self.out}{'_bias' if self.with_bias else ''}"

    def write(self, emit: Emitter, total: Vec, y: Int, bias: Int, half: int, left: Int | None) -> None:
        """Write 16 sums of a row, the first or second half of a panel; left: columns of a panel that is not whole."""
        place, size = half * LANES, ITEM_BYTES[self.dtype]
        if left is None:
            if self.with_bias:
                total = total + emit.load(bias + place * size, self.dtype)
            emit.store(total.rounded(self.dtype), y + place * ITEM_BYTES[self.out], self.out)
            return
        count = left - place
        if self.with_bias:
            total = total + emit.load_some(bias + place * size, self.dtype, count)
        emit.store_some(total.rounded(self.dtype), y + place * ITEM_BYTES[self.out], self.out, count)


def tile(code: Code, output: Output, rows: int, whole: bool = True) -> Any:
    """Add a helper that computes `rows` rows of one panel.

    Panels that are not whole write only the first `left` columns.
    """
    dtype = output.dtype
    size, step = ITEM_BYTES[dtype], inner_step(dtype)

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
        starts = [x + x_stride * row for row in range(rows)]

        def advance(index: Int, sums: list[Vec], last: bool = False) -> list[Vec]:
            offset = index * (PANEL * step * size)
            emit.prefetch(coming + offset, PANEL * step * size, level=2)
            panel = weight + offset
            weights = [load_weights(emit, panel + LANES * step * size * half, dtype) for half in range(2)]
            result = []
            for row, start in enumerate(starts):
                factor = _load_factor(emit, start + index * (step * size), dtype, last)
                for half in range(2):
                    result.append(_add_products(emit, sums[2 * row + half], factor, weights[half], dtype, code.isa))
            return result

        def advance_many(index: Int, sums: list[Vec]) -> list[Vec]:
            chained = [sums[start : start + 2 * rows] for start in range(0, len(sums), 2 * rows)]
            for offset in range(_UNROLL):
                chained[offset % chains] = advance(index + offset, chained[offset % chains])
            return [each for chain in chained for each in chain]

        steps = inner // step
        even = steps // _UNROLL * _UNROLL
        chains = CHAINS if rows <= _FEW_ROWS else 1
        sums = emit.loop(0, even, _UNROLL, advance_many, [emit.vec(0.0)] * (2 * rows * chains))
        for start in range(2 * rows, len(sums), 2 * rows):
            sums[: 2 * rows] = [first + other for first, other in zip(sums, sums[start:], strict=False)]
        sums = sums[: 2 * rows]
        sums = emit.loop(even, steps, 1, advance, sums)
        if step == 2:  # odd K: the last number has no partner
            sums = emit.loop(steps, (inner + 1) // 2, 1, lambda index, each: advance(index, each, last=True), sums)
        for row in range(rows):
            for half in range(2):
                output.write(emit, sums[2 * row + half], y + y_stride * row, bias, half, left if not whole else None)

    return code.helper(f"tile_{output}_{rows if whole else 'edge'}", 9, body)


def _load_factor(emit: Emitter, address: Int, dtype: Dtype, last: bool) -> Any:
    """Load one step of a row of x into every lane; last: half a pair, the other half is 0."""
    builder = emit.builder
    if dtype == "float32":
        return emit.load_all(address, "float32").value
    number = builder.load(emit.pointer(address, _I16 if last else _I32))
    number.align = 2
    number = builder.zext(number, _I32) if last else number
    nothing = ir.Constant(_VI32, ir.Undefined)
    one = builder.insert_element(nothing, number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(_VI32, [0] * LANES))


def _add_products(emit: Emitter, total: Vec, factor: Any, weights: Any, dtype: Dtype, isa: Isa) -> Vec:
    if dtype == "float32":
        return Vec(emit, factor).times_plus(Vec(emit, weights), total)
    builder = emit.builder
    if isa.has("avx512bf16"):
        dot = emit.declare("llvm.x86.avx512bf16.dpbf16ps.512", _VF32, [_VF32, _PAIRS, _PAIRS])
        pairs = [builder.bitcast(each, _PAIRS) for each in (factor, weights)]
        return Vec(emit, builder.call(dot, [total.value, *pairs]))
    for number, floats in zip(*(widened_weights(emit, pairs, dtype) for pairs in (factor, weights)), strict=True):
        total = number.times_plus(floats, total)
    return total
