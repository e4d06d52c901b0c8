"""Gathers rows of a weight by index from its panels: the embeddings of a model whose head has the same weight."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.norm import each_piece
from executor_svc.cpu.kernels.panel_layout import PANEL, inner_step
from executor_svc.cpu.kernels.panels import UNIT_BYTES

_I32 = ir.IntType(32)


def take_rows(code: Code, dtype: Dtype, width: int, scale: float) -> str:
    """Add the kernel y[i] = weight[ids[i]] * scale, with the bits of `rows.take_rows`; returns its name.

    Items: one for each row of y. Arguments: rows, panels of a weight [any, width], ids [rows] int64, y [rows, width].
    """
    step, size = inner_step(dtype), ITEM_BYTES[dtype]
    units = -(-width // step)

    def body(emit: Emitter, item: Int, _: Int, rows: Int, panels: Int, ids: Int, y: Int) -> None:
        index, into = emit.load_int(ids + item * 8), y + item * (width * size)
        panel = panels + index // PANEL * (units * PANEL * UNIT_BYTES)
        source = panel + index % PANEL * UNIT_BYTES

        def piece(offset: Int, count: int) -> None:
            value = _load_units(emit, source + offset // step * (PANEL * UNIT_BYTES), dtype, -(-count // step))
            emit.store(value if scale == 1.0 else value * scale, into + offset * size, dtype, count)

        each_piece(emit, width, piece)

    return code.kernel(f"take_panel_rows_{dtype}_{width}_{scale}", 4, body)


def _load_units(emit: Emitter, source: Int, dtype: Dtype, count: int) -> Vec:
    """Load `count` units of a row, which are a panel's width apart, as consecutive numbers; further lanes are 0."""
    builder, num_units = emit.builder, LANES // inner_step(dtype)
    numbers: Any = ir.Constant(ir.VectorType(_I32, num_units), [0] * num_units)
    for unit in range(count):
        number = builder.load(emit.pointer(source + unit * (PANEL * UNIT_BYTES), _I32))
        numbers = builder.insert_element(numbers, number, ir.Constant(_I32, unit))
    if dtype == "float32":
        return Vec(emit, builder.bitcast(numbers, ir.VectorType(ir.FloatType(), LANES)))
    return Vec(emit, emit.widened(builder.bitcast(numbers, ir.VectorType(ir.IntType(16), LANES))))
