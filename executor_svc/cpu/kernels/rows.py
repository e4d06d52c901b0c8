"""Gathers rows by index: embeddings, rows of logits; copies columns; scales rows; copies rows as products read them."""

from __future__ import annotations

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int
from executor_svc.cpu.kernels.norm import each_piece


def take_rows(code: Code, dtypes: tuple[Dtype, Dtype], width: int, scale: float = 1.0) -> str:
    """Add the kernel y[i] = table[ids[i]] * scale; returns its name. dtypes: of table and y.

    Items: one for each row of y. Arguments: rows, table [any, width], ids [rows] int64, y [rows, width].
    """
    dtype, out = dtypes
    size, out_size = ITEM_BYTES[dtype], ITEM_BYTES[out]

    def body(emit: Emitter, item: Int, _: Int, rows: Int, table: Int, ids: Int, y: Int) -> None:
        source, into = table + emit.load_int(ids + item * 8) * (width * size), y + item * (width * out_size)

        def piece(offset: Int, count: int) -> None:
            value = emit.load(source + offset * size, dtype, count)
            emit.store(value if scale == 1.0 else value * scale, into + offset * out_size, out, count)

        each_piece(emit, width, piece)

    return code.kernel(f"take_rows_{dtype}_{out}_{width}_{scale}", 4, body)


def copy_columns(code: Code, dtype: Dtype, columns: int, source_width: int, target_width: int) -> str:
    """Add the kernel that copies some columns of rows to columns of other rows; returns its name.

    Items: one for each row. Arguments: rows, and the addresses of the first number of source [rows, source_width] and
    of target [rows, target_width] to be copied.
    """
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, rows: Int, source: Int, target: Int) -> None:
        read, written = source + item * (source_width * size), target + item * (target_width * size)

        def piece(offset: Int, count: int) -> None:
            emit.store(emit.load(read + offset * size, dtype, count), written + offset * size, dtype, count)

        each_piece(emit, columns, piece)

    return code.kernel(f"copy_columns_{dtype}_{columns}_{source_width}_{target_width}", 3, body)


def scale_rows(code: Code, dtype: Dtype, width: int, scale: float) -> str:
    """Add the kernel x = x * scale, in place; returns its name.

    Items: one for each row. Arguments: rows, x [rows, width].
    """
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, __: Int, x: Int) -> None:
        start = x + item * (width * size)

        def piece(offset: Int, count: int) -> None:
            at = start + offset * size
            emit.store(emit.load(at, dtype, count) * scale, at, dtype, count)

        each_piece(emit, width, piece)

    return code.kernel(f"scale_rows_{dtype}_{width}_{scale}", 2, body)


def arrange(code: Code, dtype: Dtype, out: Dtype, ordered: bool) -> str:
    """Add the kernel that copies rows of x, in another order of columns if so, and 0 after them; returns its name.

    Items: one for each row. Arguments: rows, x [rows, K], y [rows, wide] of `out`, the column of x for each of y [K] or
    0, K, wide: at least K.
    """
    size, out_size = ITEM_BYTES[dtype], ITEM_BYTES[out]

    def body(emit: Emitter, item: Int, _: Int, __: Int, x: Int, y: Int, order: Int, inner: Int, wide: Int) -> None:
        source, target = x + item * inner * size, y + item * wide * out_size

        def gather(at: Int, _: object) -> None:
            number = emit.load_all(source + emit.load_int(order + at * 8) * size, dtype)
            emit.store(number, target + at * out_size, out, 1)

        def copy(at: Int, _: object) -> None:
            emit.store(emit.load(source + at * size, dtype), target + at * out_size, out)

        def copy_some(at: Int, _: object) -> None:
            numbers = emit.load_some(source + at * size, dtype, inner - at)
            emit.store_some(numbers, target + at * out_size, out, wide - at)

        def clear(at: Int, _: object) -> None:
            emit.store_some(emit.vec(0.0), target + at * out_size, out, wide - at)

        whole = inner // LANES * LANES
        if ordered:
            emit.loop(whole, wide, LANES, clear)
            emit.loop(0, inner, 1, gather)
            return
        emit.loop(0, whole, LANES, copy)
        emit.loop(whole, wide, LANES, copy_some)

    return code.kernel(f"arrange_rows_{dtype}_{out}{'_ordered' if ordered else ''}", 6, body)
