"""Matrix products in which every element is one chain of fused operations over the inner dimension, ascending.

An element's bits therefore depend only on its row of x and its row of the weight, not on the number of rows, the tiles
or the thread. bfloat16 uses the processor's dot product of pairs if it has one (AVX512-BF16), else two fused operations
on floats.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code, has_feature
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, BfloatType, Dtype, Emitter, Int, Vec

PANEL = 2 * LANES
"""Columns of the result that are computed together; rows of a panel of the weight."""

ROWS_AT_ONCE = 96
"""Rows of an item: their part of x stays in the L2 cache while panels are read."""

_UNROLL = 2
CHAINS = 1
"""Partial sums of each element. Exactness only needs the same number for all numbers of rows; one is as fast as two
(`benchmarks exactness_cost` compares them for few rows)."""
_FEW_ROWS = 4
_I32, _I16 = ir.IntType(32), ir.IntType(16)
_VI32, _VF32 = ir.VectorType(_I32, LANES), ir.VectorType(ir.FloatType(), LANES)
_PAIRS = ir.VectorType(BfloatType(), 2 * LANES)


def inner_step(dtype: Dtype) -> int:
    """Return the numbers of a row of x that one operation multiplies."""
    return 2 if dtype == "bfloat16" else 1


def tile_sizes() -> tuple[int, ...]:
    """Return the possible numbers of rows of x per pass over a panel, descending: their sums fill the registers."""
    return (12, 8, 4, 2, 1) if has_feature("avx512f") else (3, 2, 1)


def matmul(code: Code, dtype: Dtype, out: Dtype, with_bias: bool) -> str:
    """Add the kernel y = x @ weight.T (+ bias), rounded to dtype and written as `out`; returns its name.

    Items: one per ROWS_AT_ONCE rows of x and panel. Arguments: rows, x [rows, K], weight in panels (`panels`), y [rows,
    N], K, N, bias [N] or 0, and the distance in panels to the panel that this thread will probably need next, which it
    prefetches while it multiplies. x, weight and bias are of dtype.
    """
    size, out_size, step = ITEM_BYTES[dtype], ITEM_BYTES[out], inner_step(dtype)

    def body(
        emit: Emitter,
        item: Int,
        _: Int,
        rows: Int,
        x: Int,
        weight: Int,
        y: Int,
        inner: Int,
        columns: Int,
        bias: Int,
        ahead: Int,
    ) -> None:
        tiles = {count: _tile(code, dtype, out, with_bias, count) for count in tile_sizes()}
        edge = _tile(code, dtype, out, with_bias, 1, whole=False)
        panels = (columns + (PANEL - 1)) // PANEL
        panel, first = item % panels, item // panels * ROWS_AT_ONCE
        steps = (inner + (step - 1)) // step
        x_stride, y_stride = inner * size, columns * out_size
        start, here = x + first * x_stride, (rows - first).least(ROWS_AT_ONCE)
        panel_bytes = steps * (PANEL * step * size)
        weights = weight + panel * panel_bytes
        coming = weights + ahead * panel_bytes
        into = y + first * y_stride + panel * (PANEL * out_size)
        biases = bias + panel * (PANEL * size)
        left = (columns - panel * PANEL).least(PANEL)

        def call(tile: Any, at: Int) -> None:
            x_part, y_part = start + at * x_stride, into + at * y_stride
            tile(emit, x_part, x_stride, weights, coming, inner, y_part, y_stride, biases, left)

        def whole_panel() -> None:
            at = emit.integer(0)
            for count, tile in tiles.items():
                full = (here - at) // count

                def run(index: Int, _: list[Vec], at: Int = at, count: int = count, tile: Any = tile) -> None:
                    call(tile, at + index * count)

                emit.loop(0, full, 1, run)
                at = at + full * count

        def part_of_a_panel() -> None:
            emit.loop(0, here, 1, lambda index, _: call(edge, index))

        emit.when(left.equals(PANEL), whole_panel)
        emit.when(left.less(PANEL), part_of_a_panel)

    return code.kernel(f"matmul_{dtype}_{out}{'_bias' if with_bias else ''}", 8, body)


def _tile(code: Code, dtype: Dtype, out: Dtype, with_bias: bool, rows: int, whole: bool = True) -> Any:
    """Add a helper that computes `rows` rows of one panel.

    Panels that are not whole write only the first `left` columns.
    """
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
            weights = [_load_weights(emit, panel + LANES * step * size * half, dtype) for half in range(2)]
            result = []
            for row, start in enumerate(starts):
                factor = _load_factor(emit, start + index * (step * size), dtype, last)
                result += [_add_products(emit, sums[2 * row + half], factor, weights[half], dtype) for half in range(2)]
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
                _finish(emit, sums[2 * row + half], y + y_stride * row, bias, half, left if not whole else None)

    def _finish(emit: Emitter, total: Vec, y: Int, bias: Int, half: int, left: Int | None) -> None:
        place = half * LANES
        if left is None:
            if with_bias:
                total = total + emit.load(bias + place * size, dtype)
            emit.store(total.rounded(dtype), y + place * ITEM_BYTES[out], out)
            return
        count = left - place
        if with_bias:
            total = total + emit.load_some(bias + place * size, dtype, count)
        emit.store_some(total.rounded(dtype), y + place * ITEM_BYTES[out], out, count)

    kind = f"{dtype}_{out}{'_bias' if with_bias else ''}"
    return code.helper(f"tile_{kind}_{rows if whole else 'edge'}", 9, body)


def _load_weights(emit: Emitter, address: Int, dtype: Dtype) -> Any:
    """Load the weights of 16 columns for one step of K: floats, or pairs of bfloat16."""
    kind = _VF32 if dtype == "float32" else _VI32
    loaded = emit.builder.load(emit.pointer(address, kind))
    loaded.align = 4
    return loaded


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


def _add_products(emit: Emitter, total: Vec, factor: Any, weights: Any, dtype: Dtype) -> Vec:
    if dtype == "float32":
        return Vec(emit, factor).times_plus(Vec(emit, weights), total)
    builder = emit.builder
    if has_feature("avx512bf16"):
        dot = emit.declare("llvm.x86.avx512bf16.dpbf16ps.512", _VF32, [_VF32, _PAIRS, _PAIRS])
        pairs = [builder.bitcast(each, _PAIRS) for each in (factor, weights)]
        return Vec(emit, builder.call(dot, [total.value, *pairs]))
    for half in (_low_half, _high_half):
        total = half(emit, factor).times_plus(half(emit, weights), total)
    return total


def _low_half(emit: Emitter, pairs: Any) -> Vec:
    shifted = emit.builder.shl(pairs, ir.Constant(_VI32, [16] * LANES))
    return Vec(emit, emit.builder.bitcast(shifted, _VF32))


def _high_half(emit: Emitter, pairs: Any) -> Vec:
    masked = emit.builder.and_(pairs, ir.Constant(_VI32, [0xFFFF0000] * LANES))
    return Vec(emit, emit.builder.bitcast(masked, _VF32))
