"""Rows of x as the products of packed weights read them, and their sums by group."""

from __future__ import annotations

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec

_KINDS = {"float32": ir.IntType(32), "bfloat16": ir.IntType(16)}


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


def group_sums(code: Code, dtype: Dtype) -> str:
    """Add the kernel that sums x by groups of columns; returns its name.

    Vectors of 16 numbers are added in ascending order, then halves of the vector, quarters and so on. Items: one for
    each row. Arguments: rows, x [rows, groups * columns], sums [rows, groups] floats, groups, columns of a group, a
    multiple of 16.
    """
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, __: Int, x: Int, sums: Int, groups: Int, columns: Int) -> None:
        source, target = x + item * groups * columns * size, sums + item * groups * 4

        def one_group(group: Int, _: object) -> None:
            start = source + group * columns * size

            def add(at: Int, carried: list[Vec]) -> list[Vec]:
                return [carried[0] + emit.load(start + at * size, dtype)]

            total = emit.loop(LANES, columns, LANES, add, [emit.load(start, dtype)])[0].total()
            emit.store(total, target + group * 4, "float32", 1)

        emit.loop(0, groups, 1, one_group)

    return code.kernel(f"group_sums_{dtype}", 5, body)


def place_columns(code: Code, dtype: Dtype) -> str:
    """Add the kernel that copies rows into columns of wider rows; returns its name.

    Items: one for each row. Arguments: rows, x [rows, columns], y, its first of these columns, columns, the columns of
    a row of y.
    """
    size, kind = ITEM_BYTES[dtype], _KINDS[dtype]

    def body(emit: Emitter, item: Int, _: Int, __: Int, x: Int, y: Int, columns: Int, y_columns: Int) -> None:
        source, target = x + item * columns * size, y + item * y_columns * size

        def copy(at: Int, _: object) -> None:
            emit.store(emit.load(source + at * size, dtype), target + at * size, dtype)

        def copy_one(at: Int, _: object) -> None:
            number = emit.builder.load(emit.pointer(source + at * size, kind))
            emit.builder.store(number, emit.pointer(target + at * size, kind))

        whole = columns // LANES * LANES
        emit.loop(0, whole, LANES, copy)
        emit.loop(whole, columns, 1, copy_one)

    return code.kernel(f"place_columns_{dtype}", 5, body)
