"""Kernels of `skinny.product`: a tile of a product of few rows, its parts, and sums of squares of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from executor_svc.gpu.kernels.activation import gelu_tanh, silu
from executor_svc.gpu.kernels.dependent import SECTOR, begin_dependent, launch_dependents, prefetch
from executor_svc.gpu.kernels.norm import scaled_sum, weighted


@triton.jit
def _normed(x, root, weight_at, there):
    """Return rows x [ROWS, INNER] / root [ROWS] * weight, rounded as a norm of whole rows is."""
    return weighted(x.to(tl.float32), root, tl.load(weight_at, mask=there, other=0.0), x.dtype)


@triton.jit
def _root_of(squares, num_squares, row, eps, in_features, ROWS: tl.constexpr, SQUARES: tl.constexpr):
    """Return the root mean square [ROWS] of rows, from their sums of squares by tile; tiles in a fixed order."""
    tile = tl.arange(0, SQUARES)
    some = tl.load(squares + tile[:, None] * ROWS + row[None, :], mask=(tile < num_squares)[:, None], other=0.0)
    return tl.sqrt_rn(tl.div_rn(tl.sum(some, 0), in_features.to(tl.float32)) + eps)


@triton.jit
def _store_squares(squares, tile, row, x, inside, ROWS: tl.constexpr):
    """Write the sum of the squares of each row of x [ROWS, FEATURES]."""
    wide = tl.where(inside, x.to(tl.float32), 0.0)
    tl.store(squares + tile * ROWS + row, tl.sum(wide * wide, 1))


@triton.jit
def _finish(
    total, up, bias, out, squares_out, scale, tile, row, feature, rows, out_features,
    SCALED: tl.constexpr, ENDING: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a tile [ROWS, FEATURES] of the result; up: of a gated one, else anything."""
    dtype = out.dtype.element_ty
    inside = (row < rows)[:, None] & (feature < out_features)[None, :]
    at = out + row[:, None] * out_features + feature[None, :]
    if bias is not None:
        total += tl.load(bias + feature, mask=feature < out_features, other=0.0).to(tl.float32)[None, :]
        if ENDING >= 2:
            up += tl.load(bias + out_features + feature, mask=feature < out_features, other=0.0).to(tl.float32)[None, :]
    result = total.to(dtype)
    if ENDING == 1:
        result = scaled_sum(result, tl.load(at, mask=inside, other=0.0), scale, SCALED)
        _store_squares(squares_out, tile, row, result, inside, ROWS)
    elif ENDING >= 2:
        wide = result.to(tl.float32)
        activated = silu(wide) if ENDING == 2 else gelu_tanh(wide)
        result = (activated.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)).to(dtype)
    tl.store(at, result, mask=inside)


@triton.jit
def _added(at, there, PARTS: tl.constexpr, STRIDE: tl.constexpr):
    """Return the sum of the parts of a tile, in their order; past the L1 cache, as other programs wrote them."""
    total = tl.load(at, mask=there, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * STRIDE, mask=there, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _begin_early(
    weight, feature, out_features, in_features, begin, end, ENDING: tl.constexpr, INNER: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Ask for the columns of a tile that the first AHEAD steps multiply with, then wait for the kernel before.

    Of fewer columns the last ones are asked for again.
    """
    numbers: tl.constexpr = SECTOR // 2
    inner = tl.arange(0, INNER // numbers) * numbers
    rows = weight + feature[:, None] * in_features
    second = out_features.to(tl.int64) * in_features
    for step in tl.static_range(AHEAD):
        places = rows + tl.minimum(begin + step * INNER + inner, end - numbers)[None, :]
        prefetch(places)
        if ENDING >= 2:
            prefetch(places + second)
    begin_dependent()


@triton.jit(do_not_specialize=["rows", "num_squares"])
def skinny_kernel(
    x, weight, norm, squares, bias, out, squares_out, sums, counters, rows, out_features, in_features, part,
    num_squares, eps, scale, SCALED: tl.constexpr, ENDING: tl.constexpr, PARTS: tl.constexpr, SQUARES: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, INNER: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute a tile of features of all rows; with PARTS, a part of its columns. ENDING: index of `Ending`.

    The gate of feature f is row f of the weight, and what it is multiplied with row out_features + f. AHEAD: steps
    whose part of the weight is asked for before the kernel before has ended; 0: this one does not begin before that.
    """
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.arange(0, ROWS)
    feature = tile * FEATURES + tl.arange(0, FEATURES)
    inner = tl.arange(0, INNER)
    known = tl.minimum(feature, out_features - 1).to(tl.int64)
    begin = piece * part
    end = tl.minimum(begin + part, in_features)
    if AHEAD > 0:
        _begin_early(weight, known, out_features, in_features, begin, end, ENDING, INNER, AHEAD)
    x_at = x + row[:, None] * in_features + inner[None, :]
    weight_at = weight + known[:, None] * in_features + inner[None, :]
    up_at = weight_at + out_features.to(tl.int64) * in_features
    if norm is not None:
        root = _root_of(squares, num_squares, row, eps, in_features, ROWS, SQUARES)
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    up = tl.zeros((ROWS, FEATURES), tl.float32)
    for first in range(begin, end, INNER):
        there = first + inner < end
        narrow = tl.load(weight_at + first, mask=there[None, :], other=0.0)
        some = tl.load(x_at + first, mask=(row < rows)[:, None] & there[None, :], other=0.0)
        if norm is not None:
            some = _normed(some, root, norm + first + inner, there)
        total = tl.dot(some, tl.trans(narrow), total, input_precision="ieee")
        if ENDING >= 2:
            second = tl.load(up_at + first, mask=there[None, :], other=0.0)
            up = tl.dot(some, tl.trans(second), up, input_precision="ieee")
    if PARTS == 1:
        _finish(
            total, up, bias, out, squares_out, scale, tile, row, feature, rows, out_features, SCALED, ENDING, ROWS
        )  # fmt: skip
    else:
        size: tl.constexpr = ROWS * FEATURES
        both: tl.constexpr = 2 * size if ENDING >= 2 else size
        at = row[:, None] * FEATURES + tl.arange(0, FEATURES)[None, :]
        first_at = sums + tile * (PARTS * both) + at
        row_there = (row < rows)[:, None]
        tl.store(first_at + piece * both, total, mask=row_there)
        if ENDING >= 2:
            tl.store(first_at + (piece * both + size), up, mask=row_there)
        # Sums of all threads are written before one thread counts, and read after.
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == PARTS - 1:
            tl.store(counters + tile, 0)
            total = _added(first_at, row_there, PARTS, both)
            if ENDING >= 2:
                up = _added(first_at + size, row_there, PARTS, both)
            _finish(
                total, up, bias, out, squares_out, scale, tile, row, feature, rows, out_features, SCALED, ENDING, ROWS
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def square_rows_kernel(
    x, squares, rows, columns, ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPENDENTS: tl.constexpr
):  # fmt: skip
    """Write the sums of squares of a tile of columns. DEPENDENTS: whether the next kernel may begin meanwhile."""
    if DEPENDENTS:
        launch_dependents()
    tile = tl.program_id(0)
    row = tl.arange(0, ROWS)
    column = tile * FEATURES + tl.arange(0, FEATURES)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    _store_squares(squares, tile, row, value, inside, ROWS)
