"""Matrix products of bfloat16 through tiles (AMX), for one row as for many; the order of sums is in `steps`."""

from __future__ import annotations

from collections.abc import Callable

from executor_svc.cpu.kernels.amx.few_rows import FEW_ROWS, few_rows
from executor_svc.cpu.kernels.amx.many_rows import Problem, many_rows, scratch_bytes
from executor_svc.cpu.kernels.amx.steps import PAIR_BYTES, SIZE, STEP_BYTES, configure
from executor_svc.cpu.kernels.codegen import tiles
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, Emitter, Int
from executor_svc.cpu.kernels.codegen.tiles import TILE_ROWS
from executor_svc.cpu.kernels.matmul_tiles import Output
from executor_svc.cpu.kernels.panel_layout import PANEL


def matmul(code: Code, output: Output) -> str:
    """Add the kernel y = x @ weight.T (+ bias) for factors of bfloat16; returns its name.

    Items: one per ROWS_AT_ONCE rows of x and panel. Arguments: rows, x [rows, K], weight in panels (`panels`),
    y [rows, N], K, N, bias [N] or 0, the number of threads, tiles of x (`row_tiles`), which are read if there are over
    FEW_ROWS rows, scratch memory of `scratch_bytes` for each thread, `following` and `stride` of `PanelItem.coming`.
    """
    assert output.factors == "bfloat16"
    out = output.out

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
        num_threads: Int,
        row_tiles: Int,
        scratch: Int,
        following: Int,
        stride: Int,
    ) -> None:
        upper, both = (few_rows(code, output, halves) for halves in (1, 2))
        config, rest = tiles.scratch(emit, 64), tiles.scratch(emit, STEP_BYTES)
        panels, panel_bytes = (columns + (PANEL - 1)) // PANEL, (inner + 1) // 2 * PAIR_BYTES

        def few() -> None:
            own, place = weight + item * panel_bytes, item + num_threads
            behind = following + item % num_threads * stride
            coming = (weight + place * panel_bytes).where(place.less(panels), behind)
            into, biases = y + item * (PANEL * ITEM_BYTES[out]), bias + item * (PANEL * ITEM_BYTES[output.dtype])
            left = (columns - item * PANEL).least(PANEL)

            def call(tile: Callable[..., None]) -> None:
                strides = (columns * ITEM_BYTES[out], biases, left, rows)
                tile(emit, x, inner * SIZE, own, coming, inner, into, *strides)

            configure(emit, config, rows)
            emit.when(rows.less(TILE_ROWS + 1), lambda: call(upper))
            emit.when(emit.integer(TILE_ROWS).less(rows), lambda: call(both))
            tiles.release(emit)

        def many() -> None:
            sums = scratch + thread * scratch_bytes()
            given = Problem(rows, row_tiles, weight, y, inner, columns, bias, num_threads, sums, config, rest)
            many_rows(code, output, emit, item, given)

        emit.when(rows.less(FEW_ROWS + 1), few)
        emit.when(emit.integer(FEW_ROWS).less(rows), many)

    return code.kernel(f"matmul_amx_{output}", 12, body)
