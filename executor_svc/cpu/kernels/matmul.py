"""Matrix products in which every element is one chain of fused operations over the inner dimension, ascending.

An element's bits therefore depend only on its row of x and its row of the weight, not on the number of rows, the tiles
or the thread. bfloat16 uses the processor's dot product of pairs if it has one (AVX512-BF16), else two fused operations
on floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.matmul_blocked import blocked_panel, blocking, is_blocked, sum_of
from executor_svc.cpu.kernels.matmul_tiles import Output, tile
from executor_svc.cpu.kernels.panels import PANEL, ROWS_AT_ONCE, inner_step


def pack(weight: Tensor) -> Tensor:
    """Reorder weight [N, K] into panels [N / 32, K / step, 32, step], zeros beyond N and K; step: `inner_step`."""
    step = 2 if weight.dtype == torch.bfloat16 else 1
    rows, columns = weight.shape
    if rows % PANEL or columns % step:
        weight = torch.nn.functional.pad(weight, (0, -columns % step, 0, -rows % PANEL))
    panels = weight.view(-1, PANEL, weight.shape[1] // step, step)
    return panels.transpose(1, 2).contiguous()


def tile_sizes(isa: Isa, dtype: Dtype) -> tuple[int, ...]:
    """Return the possible numbers of rows of x per pass over a panel, descending: their sums fill the registers.

    More rows than these are computed by `matmul_blocked` where the level or the dtype wants it.
    """
    if not is_blocked(isa, dtype):
        return (12, 8, 4, 2, 1)
    return tuple(range(blocking(isa).few_rows, 0, -1))


def matmul(code: Code, dtype: Dtype, out: Dtype, with_bias: bool) -> str:
    """Add the kernel y = x @ weight.T (+ bias), rounded to dtype and written as `out`; returns its name.

    Items: one per ROWS_AT_ONCE rows of x and panel. Arguments: rows, x [rows, K], weight as `pack` returns it, y [rows,
    N], K, N, bias [N] or 0, the distance in panels to the panel that this thread will probably need next, which it
    prefetches while it multiplies, and for `is_blocked` the rows of `widen_rows` (of float32: x) and scratch memory of
    `Blocking.scratch_bytes` for each thread. x, weight and bias are of dtype.
    """
    size, out_size, step = ITEM_BYTES[dtype], ITEM_BYTES[out], inner_step(dtype)
    blocked, output = is_blocked(code.isa, dtype), Output(dtype, out, with_bias)

    def body(
        emit: Emitter,
        item: Int,
        thread: Int,
        rows: Int,
        x: Int,
        weight: Int,
        y: Int,
        inner: Int,
        columns: Int,
        bias: Int,
        ahead: Int,
        wide: Int,
        scratch: Int,
    ) -> None:
        panels = (columns + (PANEL - 1)) // PANEL
        panel, first = item % panels, item // panels * ROWS_AT_ONCE
        x_stride, y_stride = inner * size, columns * out_size
        start, here = x + first * x_stride, (rows - first).least(ROWS_AT_ONCE)
        panel_bytes = (inner + (step - 1)) // step * (PANEL * step * size)
        weights = weight + panel * panel_bytes
        coming = weights + ahead * panel_bytes
        into = y + first * y_stride + panel * (PANEL * out_size)
        biases = bias + panel * (PANEL * size)
        left = (columns - panel * PANEL).least(PANEL)

        def one_after_the_other(tiles: Mapping[int, Any]) -> None:
            at = emit.integer(0)
            for count, each in tiles.items():
                full = (here - at) // count

                def run(index: Int, _: list[Vec], at: Int = at, count: int = count, one: Any = each) -> None:
                    row = at + index * count
                    x_part, y_part = start + row * x_stride, into + row * y_stride
                    one(emit, x_part, x_stride, weights, coming, inner, y_part, y_stride, biases, left)

                emit.loop(0, full, 1, run)
                at = at + full * count

        def in_registers() -> None:
            tiles = {count: tile(code, output, count) for count in tile_sizes(code.isa, dtype)}
            edge = {1: tile(code, output, 1, whole=False)}
            emit.when(left.equals(PANEL), lambda: one_after_the_other(tiles))
            emit.when(left.less(PANEL), lambda: one_after_the_other(edge))

        def in_blocks() -> None:
            sizes = blocking(code.isa)
            even = (inner + (step - 1)) // step * step
            sums = blocked_panel(
                code,
                emit,
                dtype,
                rows=here,
                x=wide + first * even * ITEM_BYTES["float32"],
                inner=inner,
                panel=weights,
                coming=coming,
                scratch=scratch + thread * sizes.scratch_bytes,
            )

            def finish(columns_left: Int | None) -> None:
                def write(row: Int, _: list[Vec]) -> None:
                    for half in range(PANEL // LANES):
                        total = sum_of(emit, sums, sizes, row, half)
                        output.write(emit, total, into + row * y_stride, biases, half, columns_left)

                emit.loop(0, here, 1, write)

            emit.when(left.equals(PANEL), lambda: finish(None))
            emit.when(left.less(PANEL), lambda: finish(left))

        if not blocked:
            in_registers()
            return
        few = here.less(blocking(code.isa).few_rows + 1)
        emit.when(few, in_registers)
        emit.when(emit.builder.not_(few), in_blocks)

    return code.kernel(f"matmul_{output}", 10, body)
