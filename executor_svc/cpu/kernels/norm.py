"""RMS norms of rows, optionally after a residual sum, and of heads. Rounded where transformers rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.cpu.kernels.codegen.functions import where

ROWS_AT_ONCE = 4
_SUMS = 4


def rms_norm(code: Code, dtype: Dtype, weight_dtype: Dtype, hidden: int, eps: float) -> str:
    """Add the kernel y = norm(x) * weight; returns its name.

    Items: one for each ROWS_AT_ONCE rows. Arguments: rows, x [rows, hidden], y [rows, hidden], weight [hidden].
    """

    def row(emit: Emitter, index: Int, x: Int, y: Int, weight: Int) -> None:
        stride = hidden * ITEM_BYTES[dtype]
        normalize(emit, x + index * stride, y + index * stride, weight, dtype, weight_dtype, hidden, eps)

    name = f"rms_norm_{dtype}_{weight_dtype}_{hidden}_{eps}"
    return code.kernel(name, 4, lambda emit, item, _, rows, *rest: _rows(emit, item, rows, row, rest))


def add_rms_norm(code: Code, dtype: Dtype, weight_dtype: Dtype, hidden: int, eps: float, scale: float) -> str:
    """Add the kernel residual = x * scale + residual; y = norm(residual) * weight; returns its name.

    Items: one for each ROWS_AT_ONCE rows. Arguments: rows, x, residual and y [rows, hidden], weight [hidden].
    """

    def row(emit: Emitter, index: Int, x: Int, residual: Int, y: Int, weight: Int) -> None:
        at = index * (hidden * ITEM_BYTES[dtype])
        _add(emit, x + at, residual + at, dtype, hidden, scale)
        normalize(emit, residual + at, y + at, weight, dtype, weight_dtype, hidden, eps)

    name = f"add_rms_norm_{dtype}_{weight_dtype}_{hidden}_{eps}_{scale}"
    return code.kernel(name, 5, lambda emit, item, _, rows, *rest: _rows(emit, item, rows, row, rest))


def layer_norm(code: Code, dtype: Dtype, hidden: int, eps: float) -> str:
    """Add the kernel y = layer_norm(x) * weight + bias; returns its name.

    Items: one for each ROWS_AT_ONCE rows. Arguments: rows, x and y [rows, hidden], weight and bias [hidden] float32.
    """

    def row(emit: Emitter, index: Int, x: Int, y: Int, weight: Int, bias: Int) -> None:
        at = index * (hidden * ITEM_BYTES[dtype])
        _centre_and_normalize(emit, x + at, y + at, weight, bias, dtype, hidden, eps)

    name = f"layer_norm_{dtype}_{hidden}_{eps}"
    return code.kernel(name, 5, lambda emit, item, _, rows, *rest: _rows(emit, item, rows, row, rest))


def add_layer_norm(code: Code, dtype: Dtype, hidden: int, eps: float, scale: float) -> str:
    """Add the kernel residual = x * scale + residual; y = layer_norm(residual) * weight + bias; returns its name.

    Items: one for each ROWS_AT_ONCE rows. Arguments: rows, x, residual and y [rows, hidden], weight and bias [hidden]
    float32.
    """

    def row(emit: Emitter, index: Int, x: Int, residual: Int, y: Int, weight: Int, bias: Int) -> None:
        at = index * (hidden * ITEM_BYTES[dtype])
        _add(emit, x + at, residual + at, dtype, hidden, scale)
        _centre_and_normalize(emit, residual + at, y + at, weight, bias, dtype, hidden, eps)

    name = f"add_layer_norm_{dtype}_{hidden}_{eps}_{scale}"
    return code.kernel(name, 6, lambda emit, item, _, rows, *rest: _rows(emit, item, rows, row, rest))


def add(code: Code, dtype: Dtype, hidden: int, scale: float, multiplied: bool = False) -> str:
    """Add the kernel residual = (x * scale + residual) * factor; returns its name.

    Items: one for each ROWS_AT_ONCE rows. Arguments: rows, x and residual [rows, hidden], and if multiplied factor [1].
    """

    def row(emit: Emitter, index: Int, x: Int, residual: Int, *factor: Int) -> None:
        at = index * (hidden * ITEM_BYTES[dtype])
        number = emit.load_all(factor[0], dtype) if multiplied else None
        _add(emit, x + at, residual + at, dtype, hidden, scale, number)

    name = f"add_{dtype}_{hidden}_{scale}{'_multiplied' if multiplied else ''}"
    arguments = 4 if multiplied else 3
    return code.kernel(name, arguments, lambda emit, item, _, rows, *rest: _rows(emit, item, rows, row, rest))


def _add(
    emit: Emitter, x: Int, residual: Int, dtype: Dtype, hidden: int, scale: float, factor: Vec | None = None
) -> None:
    size = ITEM_BYTES[dtype]

    def piece(offset: Int, count: int) -> None:
        added = emit.load(x + offset * size, dtype, count)
        if scale != 1.0:
            added = (added * scale).rounded(dtype)
        total = added + emit.load(residual + offset * size, dtype, count)
        if factor is not None:
            total = total.rounded(dtype) * factor
        emit.store(total, residual + offset * size, dtype, count)

    each_piece(emit, hidden, piece)


def add_normed_groups(
    code: Code, dtype: Dtype, weight_dtype: Dtype, groups: tuple[int, int], eps: float, before: float, after: float
) -> str:
    """Add the kernel into = (norm(x * before) + into) * after; returns its name.

    groups: their number, and the columns of each, which are normalized together. Items: one for each ROWS_AT_ONCE rows.
    Arguments: rows, x and into [rows, columns of all groups], weight [columns of a group]; x is overwritten.
    """
    size, (count, width) = ITEM_BYTES[dtype], groups

    def row(emit: Emitter, index: Int, x: Int, into: Int, weight: Int) -> None:
        def group(which: Int, _: list[Vec]) -> None:
            at = (index * count + which) * (width * size)
            source, target = x + at, into + at

            def scale(offset: Int, length: int) -> None:
                place = source + offset * size
                emit.store(emit.load(place, dtype, length) * before, place, dtype, length)

            def add_up(offset: Int, length: int) -> None:
                place = target + offset * size
                total = emit.load(source + offset * size, dtype, length) + emit.load(place, dtype, length)
                emit.store(total.rounded(dtype) * after, place, dtype, length)

            each_piece(emit, width, scale)
            normalize(emit, source, source, weight, dtype, weight_dtype, width, eps)
            each_piece(emit, width, add_up)

        emit.loop(0, count, 1, group)

    name = f"add_normed_groups_{dtype}_{weight_dtype}_{count}_{width}_{eps}_{before}_{after}"
    return code.kernel(name, 4, lambda emit, item, _, rows, *rest: _rows(emit, item, rows, row, rest))


def norm_heads(
    code: Code, dtype: Dtype, weight_dtype: Dtype, heads: tuple[int, int, int], head_size: int, padded: int, eps: float
) -> str:
    """Add the kernel that normalizes query and key heads in place; returns its name. heads: query, key, others.

    Items: one for each ROWS_AT_ONCE rows. Arguments: rows, qkv [rows, heads * padded], q_weight and k_weight
    [head_size].
    """
    size = ITEM_BYTES[dtype]
    num_q, num_k, num_v = heads

    def row(emit: Emitter, index: Int, qkv: Int, q_weight: Int, k_weight: Int) -> None:
        start = qkv + index * ((num_q + num_k + num_v) * padded * size)
        for first, count, weight in ((0, num_q, q_weight), (num_q, num_k, k_weight)):

            def head(which: Int, _: list[Vec], first: int = first, weight: Int = weight) -> None:
                at = start + (which + first) * (padded * size)
                normalize(emit, at, at, weight, dtype, weight_dtype, head_size, eps)

            emit.loop(0, count, 1, head)

    name = f"norm_heads_{dtype}_{weight_dtype}_{num_q}_{num_k}_{num_v}_{head_size}_{padded}_{eps}"
    return code.kernel(name, 4, lambda emit, item, _, rows, *rest: _rows(emit, item, rows, row, rest))


def norm_all_heads(
    code: Code, dtype: Dtype, weight_dtype: Dtype, heads: tuple[int, int, int], head_size: int, padded: int, eps: float
) -> str:
    """Add the kernel that normalizes all query heads together, and all key heads, in place; returns its name.

    Items and arguments as those of `norm_heads`, but q_weight [queries * padded] and k_weight [keys * padded].
    """
    size = ITEM_BYTES[dtype]
    num_q, num_k, num_v = heads

    def row(emit: Emitter, index: Int, qkv: Int, q_weight: Int, k_weight: Int) -> None:
        start = qkv + index * ((num_q + num_k + num_v) * padded * size)
        for at, count, weight in ((start, num_q, q_weight), (start + num_q * padded * size, num_k, k_weight)):
            normalize(emit, at, at, weight, dtype, weight_dtype, count * padded, eps, count * head_size)

    name = f"norm_all_heads_{dtype}_{weight_dtype}_{num_q}_{num_k}_{num_v}_{head_size}_{padded}_{eps}"
    return code.kernel(name, 4, lambda emit, item, _, rows, *rest: _rows(emit, item, rows, row, rest))


def normalize(
    emit: Emitter,
    x: Int,
    y: Int,
    weight: Int,
    dtype: Dtype,
    weight_dtype: Dtype,
    hidden: int,
    eps: float,
    count: int | None = None,
    mean: Vec | None = None,
    out: Dtype | None = None,
) -> None:
    """Write x [hidden] / its root mean square * weight to y, which may be x; squares are summed in fp32.

    count: of the numbers that the mean is of, where others are zeros; None: of all. mean: of the squares, where it is
    of more numbers than these. out: what y is of, where it is of another dtype than x.

    A weight of dtype multiplies after the rounding (Llama); a weight in fp32, with a narrower dtype, multiplies before
    the rounding (Gemma).
    """
    size, out = ITEM_BYTES[dtype], out or dtype
    if mean is None:
        mean = sum_of_squares(emit, x, dtype, hidden) / float(count or hidden)
    inverse = emit.vec(1.0) / (mean + eps).sqrt()

    def scale(offset: Int, count: int) -> None:
        normed = emit.load(x + offset * size, dtype, count) * inverse
        if weight_dtype == dtype:
            normed = normed.rounded(dtype)
        factor = emit.load(weight + offset * ITEM_BYTES[weight_dtype], weight_dtype, count)
        emit.store(normed * factor, y + offset * ITEM_BYTES[out], out, count)

    each_piece(emit, hidden, scale)


def _centre_and_normalize(
    emit: Emitter, x: Int, y: Int, weight: Int, bias: Int, dtype: Dtype, hidden: int, eps: float
) -> None:
    """Write (x [hidden] - mean) / standard deviation * weight + bias to y, which may be x; rounded once."""
    size = ITEM_BYTES[dtype]
    mean = _sum(emit, x, dtype, hidden, lambda part, total, _: total + part) / float(hidden)

    def add_square(part: Vec, total: Vec, count: int) -> Vec:
        centred = part - mean
        if count < LANES:  # lanes that were not loaded are 0, their difference from the mean is not
            centred = where(emit, emit.first(emit.integer(count)), centred, emit.vec(0.0))
        return centred.times_plus(centred, total)

    variance = _sum(emit, x, dtype, hidden, add_square) / float(hidden)
    inverse = emit.vec(1.0) / (variance + eps).sqrt()

    def scale(offset: Int, count: int) -> None:
        normed = (emit.load(x + offset * size, dtype, count) - mean) * inverse
        factor, addend = (emit.load(each + offset * 4, "float32", count) for each in (weight, bias))
        emit.store(normed * factor + addend, y + offset * size, dtype, count)

    each_piece(emit, hidden, scale)


def sum_of_squares(emit: Emitter, x: Int, dtype: Dtype, length: int) -> Vec:
    """Return the sum of squares in every lane; the order depends on the length only."""
    return _sum(emit, x, dtype, length, lambda part, total, _: part.times_plus(part, total))


def _sum(emit: Emitter, x: Int, dtype: Dtype, length: int, plus: Callable[[Vec, Vec, int], Vec]) -> Vec:
    """Return a sum over x [length] in every lane, of four interleaved sums; the order depends on the length only.

    plus: returns (numbers, the sum before them, how many numbers there are) added up; further lanes are 0.
    """
    size = ITEM_BYTES[dtype]
    step = _SUMS * LANES
    even = length // step * step

    def add(index: Int, sums: list[Vec]) -> list[Vec]:
        parts = [emit.load(x + (index + LANES * which) * size, dtype) for which in range(_SUMS)]
        return [plus(part, total, LANES) for part, total in zip(parts, sums, strict=True)]

    sums = emit.loop(0, even, step, add, [emit.vec(0.0)] * _SUMS)
    for which, (offset, count) in enumerate(pieces(length - even)):
        sums[which] = plus(emit.load(x + (even + offset) * size, dtype, count), sums[which], count)
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])).total()


def each_piece(emit: Emitter, length: int, body: Callable[[Int, int], None]) -> None:
    """Call body(offset, count) for the vectors that cover `length` numbers.

    count is LANES, perhaps less for the last vector.
    """
    whole = length // LANES * LANES
    emit.loop(0, whole, LANES, lambda offset, _: body(offset, LANES))
    if length % LANES:
        body(emit.integer(whole), length % LANES)


def _rows(emit: Emitter, item: Int, rows: Int, body: Callable[..., None], arguments: Sequence[Int]) -> None:
    first = item * ROWS_AT_ONCE
    emit.loop(first, (first + ROWS_AT_ONCE).least(rows), 1, lambda index, _: body(emit, index, *arguments))
