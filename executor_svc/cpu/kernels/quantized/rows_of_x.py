"""Sums of rows of x by group, and columns of results that parts of a weight compute."""

from __future__ import annotations

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec

_KINDS = {"float32": ir.IntType(32), "bfloat16": ir.IntType(16)}


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
