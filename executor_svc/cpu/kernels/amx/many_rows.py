"""Many rows and some panels through tiles: weights are read once for all rows, from the L1 cache for most of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from executor_svc.cpu.kernels.amx.row_tiles import GROUP, GROUP_BYTES, chunk_place, chunk_steps
from executor_svc.cpu.kernels.amx.steps import (
    STEP,
    STEP_BYTES,
    SUM_BYTES,
    TILES_OF_SUMS,
    add_products,
    configure,
    copy_rest_of_panel,
    place_of_sums,
    write_rows,
)
from executor_svc.cpu.kernels.codegen import tiles
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, Emitter, Int
from executor_svc.cpu.kernels.codegen.tiles import TILE_BYTES, TILE_ROWS
from executor_svc.cpu.kernels.matmul_tiles import Output
from executor_svc.cpu.kernels.panel_layout import PANEL, ROWS_AT_ONCE

_BLOCKS = ((1, 1), (2, 1), (3, 1), (3, 2), (3, 4))
"""Sizes of a block, smallest first: times ROWS_AT_ONCE rows, and panels."""
_ITEMS_OF_THREAD = 4
_GROUP_SUMS = GROUP * SUM_BYTES


def scratch_bytes() -> int:
    """Return the bytes of scratch memory of one thread: sums of a block."""
    rows, panels = _BLOCKS[-1]
    return rows * ROWS_AT_ONCE // GROUP * panels * _GROUP_SUMS


@dataclass(frozen=True, slots=True)
class Problem:
    """The arguments of a product."""

    rows: Int
    x: Int
    """Tiles of x (`row_tiles`)."""
    weight: Int
    y: Int
    inner: Int
    columns: Int
    bias: Int
    num_threads: Int
    sums: Int
    """Scratch memory of this thread."""


def many_rows(code: Code, output: Output, emit: Emitter, item: Int, given: Problem) -> None:
    """Emit an item: a block of rows and panels. There are at most as many blocks as ROWS_AT_ONCE rows and a panel make;
    further items are empty. Blocks are smaller where there would be too few for the threads."""
    panels = (given.columns + (PANEL - 1)) // PANEL
    units = (given.rows + (ROWS_AT_ONCE - 1)) // ROWS_AT_ONCE
    high, wide = emit.integer(1), emit.integer(1)
    for rows, columns in _BLOCKS[1:]:
        blocks = _blocks(units, emit.integer(rows)) * _blocks(panels, emit.integer(columns))
        enough = (given.num_threads * _ITEMS_OF_THREAD - 1).less(blocks)
        high, wide = emit.integer(rows).where(enough, high), emit.integer(columns).where(enough, wide)
    across = _blocks(panels, wide)
    first_row, first_panel = item // across * high * ROWS_AT_ONCE, item % across * wide
    num_rows = (given.rows - first_row).least(high * ROWS_AT_ONCE)
    num_panels = (panels - first_panel).least(wide)
    block = _block(code, output)
    emit.when(
        emit.integer(0).less(num_rows),
        lambda: block(
            emit,
            *(given.rows, given.x, given.weight, given.y, given.inner, given.columns, given.bias, given.sums),
            *(first_row, num_rows, first_panel, num_panels),
        ),
    )


def _blocks(count: Int, size: Int) -> Int:
    return (count + (size - 1)) // size


def _block(code: Code, output: Output) -> Callable[..., None]:
    """Add the helper that computes a block."""

    def body(
        emit: Emitter,
        rows: Int,
        x: Int,
        weight: Int,
        y: Int,
        inner: Int,
        columns: Int,
        bias: Int,
        sums: Int,
        first_row: Int,
        num_rows: Int,
        first_panel: Int,
        num_panels: Int,
    ) -> None:
        rest = tiles.scratch(emit, STEP_BYTES)
        config = tiles.scratch(emit, 64)
        part = _part(code)
        all_groups, first_group = _blocks(rows, emit.integer(GROUP)), first_row // GROUP
        groups = _blocks(num_rows, emit.integer(GROUP))
        whole_steps, all_steps = inner // STEP, (inner + (STEP - 1)) // STEP
        panel_bytes = (inner + 1) // 2 * (STEP_BYTES // (STEP // 2))
        y_stride, item_bytes = columns * ITEM_BYTES[output.out], ITEM_BYTES[output.out]
        configure(emit, config, emit.integer(GROUP))

        most = chunk_steps(all_steps)
        alone = most.equals(all_steps)

        def chunk(number: Int, _: Any) -> None:
            start = number * most
            steps, whole = (all_steps - start).least(most), (whole_steps - start).least(most)
            last = all_steps.equals(start + steps)

            def panel(index: Int, _: Any) -> None:
                here = first_panel + index
                weights = weight + here * panel_bytes + start * STEP_BYTES
                left = (columns - here * PANEL).least(PANEL)
                biases = bias + here * (PANEL * ITEM_BYTES[output.dtype])
                emit.when(
                    whole.less(steps),
                    lambda: copy_rest_of_panel(emit, weights + whole * STEP_BYTES, (inner % STEP + 1) // 2, rest),
                )

                def place(number: Int) -> Int:
                    """Two places in turns are enough where sums do not wait for another chunk."""
                    return sums + (number % 2).where(alone, index * groups + number) * _GROUP_SUMS

                def write(number: Int) -> None:
                    total, row = place(number), number * GROUP
                    into = y + (first_row + row) * y_stride + here * (PANEL * item_bytes)
                    count = (num_rows - row).least(GROUP)
                    whole_count = count.where(left.equals(PANEL), 0)
                    write_rows(emit, output, total, whole_count, into, y_stride, biases, None)
                    write_rows(emit, output, total, count - whole_count, into, y_stride, biases, left)

                def group(number: Int, _: Any) -> None:
                    total = place(number)
                    source = x + chunk_place(start, steps, all_groups, first_group + number)
                    part(emit, source, weights, steps, whole, rest, total, start)
                    # The sums of the group before: what was just stored is not yet in memory.
                    emit.when(emit.integer(0).less(number.where(last, 0)), lambda: write(number - 1))

                emit.loop(0, groups, 1, group)
                emit.when(last, lambda: write(groups - 1))

            emit.loop(0, num_panels, 1, panel)

        emit.loop(0, _blocks(all_steps, most), 1, chunk)
        tiles.release(emit)

    return code.helper(f"block_amx_{output}", 12, body)


def _part(code: Code) -> Callable[..., None]:
    """Add the helper that adds a chunk's products of a group of rows and a panel to their sums.

    Arguments: the group's tiles, the panel's part, steps, those that the panel has whole, what stands for the last one
    otherwise, the sums, and the number of the chunk's first step; sums begin at 0 where that is 0.
    """

    def body(emit: Emitter, x: Int, weight: Int, steps: Int, whole: Int, rest: Int, sums: Int, first: Int) -> None:
        def clear() -> None:
            for tile in range(TILES_OF_SUMS):
                tiles.clear(emit, tile)

        def resume() -> None:
            for tile in range(TILES_OF_SUMS):
                tiles.load(emit, tile, sums + place_of_sums(tile), SUM_BYTES)

        def step(index: Int, _: Any) -> None:
            emit.prefetch(x + (index + 1) * GROUP_BYTES, GROUP_BYTES)
            add(index, weight + index * STEP_BYTES)

        def add(index: Int, weights: Int) -> None:
            add_products(emit, 2, x + index * GROUP_BYTES, TILE_ROWS * TILE_BYTES, emit.integer(TILE_BYTES), weights)

        emit.when(first.equals(0), clear)
        emit.when(emit.integer(0).less(first), resume)
        emit.loop(0, whole, 1, step)
        emit.when(whole.less(steps), lambda: add(whole, rest))
        for tile in range(TILES_OF_SUMS):
            tiles.store(emit, tile, sums + place_of_sums(tile), SUM_BYTES)

    return code.helper("part_amx", 7, body)
