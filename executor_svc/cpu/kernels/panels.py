"""Weights in panels, the order in which `matmul` reads them: their memory, and the code that puts rows there.

Rows are gathered by index too: the embeddings of a model whose head has the same weight.

Number [n, k] of a weight lies at [n // 32, k // step, n % 32, k % step]; step: `panel_layout.inner_step`. A panel's
unit, the step numbers of one row, has 4 bytes in every dtype, so that rows become columns of 32-bit integers.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor
from torch.nn import functional

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.norm import each_piece
from executor_svc.cpu.kernels.panel_layout import PANEL, UNIT_BYTES, inner_step
from executor_svc.device.host_memory import new_weight_memory

_PANEL_UNIT_BYTES = PANEL * UNIT_BYTES
_I32 = ir.IntType(32)
_VI32 = ir.VectorType(_I32, LANES)


def new_panels(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return panels [rows / 32, columns / step, 32, step] for a weight [rows, columns], all zeros."""
    step = inner_step("bfloat16" if dtype == torch.bfloat16 else "float32")
    shape = (-(-rows // PANEL), -(-columns // step), PANEL, step)
    return new_weight_memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class PanelWriter:
    """Puts rows of weights into panels; any thread may do so."""

    def __init__(self, code: Code) -> None:
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)
        self._write = kind(code.address(code.function("write_panels", 5, write_panels)))

    def write(self, panels: Tensor, first: int, rows: Tensor) -> None:
        """Write rows [R, K], in the dtype of the panels, as rows first to first + R of the weight."""
        missing = panels.shape[1] * panels.shape[3] - rows.shape[1]
        rows = functional.pad(rows, (0, missing)) if missing else rows.contiguous()
        assert rows.dtype == panels.dtype
        assert first + len(rows) <= panels.shape[0] * PANEL
        self._write(rows.data_ptr(), panels.data_ptr(), first, len(rows), panels.shape[1])


def write_panels(emit: Emitter, source: Int, panels: Int, first: Int, rows: Int, units: Int) -> None:
    """Emit: write rows of so many units each to the panels, from row `first` of the weight on.

    Squares of 16 rows and 16 units are transposed in registers; what is left over goes one by one.
    """
    row_bytes, panel_bytes = units * UNIT_BYTES, units * _PANEL_UNIT_BYTES

    def target(row: Int) -> Int:
        place = first + row
        return panels + place // PANEL * panel_bytes + place % PANEL * UNIT_BYTES

    def one_by_one(start: Int, stop: Int, first_unit: Int | int) -> None:
        def copy_row(row: Int, _: object) -> None:
            place, into = source + row * row_bytes, target(row)

            def copy(unit: Int, _: object) -> None:
                number = emit.builder.load(emit.pointer(place + unit * UNIT_BYTES, _I32))
                emit.builder.store(number, emit.pointer(into + unit * _PANEL_UNIT_BYTES, _I32))

            emit.loop(first_unit, units, 1, copy)

        emit.loop(start, stop, 1, copy_row)

    lead = ((emit.integer(0) - first) % LANES).least(rows)
    end = lead + (rows - lead) // LANES * LANES
    whole_units = units // LANES * LANES

    def squares(row: Int, _: object) -> None:
        place, into = source + row * row_bytes, target(row)
        emit.loop(
            0,
            whole_units,
            LANES,
            lambda unit, _: _transpose(emit, place + unit * UNIT_BYTES, row_bytes, into + unit * _PANEL_UNIT_BYTES),
        )

    one_by_one(emit.integer(0), lead, 0)
    emit.loop(lead, end, LANES, squares)
    one_by_one(lead, end, whole_units)
    one_by_one(end, rows, 0)


def _transpose(emit: Emitter, source: Int, row_bytes: Int, target: Int) -> None:
    """Emit: write 16 units of 16 rows to a panel, by exchanging halves, quarters and so on between pairs of rows."""
    builder = emit.builder
    rows = []
    for row in range(LANES):
        loaded = builder.load(emit.pointer(source + row_bytes * row, _VI32))
        loaded.align = UNIT_BYTES
        rows.append(loaded)
    distance = LANES // 2
    while distance:
        low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        for row in (row for row in range(LANES) if not row & distance):
            pair = rows[row], rows[row + distance]
            rows[row], rows[row + distance] = (
                builder.shuffle_vector(*pair, ir.Constant(_VI32, lanes)) for lanes in (low, high)
            )
        distance //= 2
    for unit, column in enumerate(rows):
        builder.store(column, emit.pointer(target + unit * _PANEL_UNIT_BYTES, _VI32)).align = UNIT_BYTES


def take_panel_rows(code: Code, dtypes: tuple[Dtype, Dtype], width: int, scale: float) -> str:
    """Add the kernel y[i] = weight[ids[i]] * scale, with the bits of `rows.take_rows`; returns its name.

    Items: one for each row of y. Arguments: rows, panels of a weight [any, width], ids [rows] int64, y [rows, width].
    """
    dtype, out = dtypes
    step, size = inner_step(dtype), ITEM_BYTES[out]
    units = -(-width // step)

    def body(emit: Emitter, item: Int, _: Int, rows: Int, panels: Int, ids: Int, y: Int) -> None:
        index, into = emit.load_int(ids + item * 8), y + item * (width * size)
        panel = panels + index // PANEL * (units * PANEL * UNIT_BYTES)
        source = panel + index % PANEL * UNIT_BYTES

        def piece(offset: Int, count: int) -> None:
            value = _load_units(emit, source + offset // step * (PANEL * UNIT_BYTES), dtype, -(-count // step))
            emit.store(value if scale == 1.0 else value * scale, into + offset * size, out, count)

        each_piece(emit, width, piece)

    return code.kernel(f"take_panel_rows_{dtype}_{out}_{width}_{scale}", 4, body)


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
