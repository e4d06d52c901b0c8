"""Many rows and some panels through tiles: weights are read once for all rows, from the L1 cache for most of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from executor_svc.cpu.kernels.amx.row_tiles import GROUP, GROUP_BYTES, chunk_place, chunk_steps
from executor_svc.cpu.kernels.amx.steps import (
    PAIR_BYTES,
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
    """The arguments of a product, and memory of this thread."""

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
    """`scratch_bytes` of memory."""
    config: Int
    """64 bytes, for the tiles' sizes."""
    rest: Int
    """STEP_BYTES, for an incomplete last step of a panel."""


@dataclass(frozen=True, slots=True)
class _AmxBlock:
    """The rows and panels of an item."""

    first_row: Int
    num_rows: Int
    first_panel: Int
    num_panels: Int

    @property
    def groups(self) -> Int:
        return _ceil(self.num_rows, GROUP)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of the inner dimension."""

    start: Int
    """Its first step."""
    steps: Int
    whole: Int
    """Steps that a panel has whole: all, or all but the last."""
    last: Any
    """The condition that no chunk follows."""
    alone: Any
    """The condition that there is no other chunk."""


def many_rows(code: Code, output: Output, emit: Emitter, item: Int, given: Problem) -> None:
    """Emit an item: a block of rows and panels. There are at most as many blocks as ROWS_AT_ONCE rows and a panel make;
    further items are empty. Blocks are smaller where there would be too few for the threads."""
    panels, units = _ceil(given.columns, PANEL), _ceil(given.rows, ROWS_AT_ONCE)
    high, wide = emit.integer(1), emit.integer(1)
    for rows, columns in _BLOCKS[1:]:
        blocks = _ceil(units, rows) * _ceil(panels, columns)
        enough = (given.num_threads * _ITEMS_OF_THREAD - 1).less(blocks)
        high, wide = emit.integer(rows).where(enough, high), emit.integer(columns).where(enough, wide)
    across = _ceil(panels, wide)
    first_row, first_panel = item // across * high * ROWS_AT_ONCE, item % across * wide
    num_rows = (given.rows - first_row).least(high * ROWS_AT_ONCE)
    block = _AmxBlock(first_row, num_rows, first_panel, (panels - first_panel).least(wide))
    emit.when(emit.integer(0).less(num_rows), lambda: _multiply(code, output, emit, given, block))


def _ceil(count: Int, size: Int | int) -> Int:
    """Return count / size, rounded up."""
    size = count.emit.integer(size)
    return (count + (size - 1)) // size


def _multiply(code: Code, output: Output, emit: Emitter, given: Problem, block: _AmxBlock) -> None:
    """Emit a block: chunk by chunk, in a chunk panel by panel."""
    whole_steps, all_steps = given.inner // STEP, _ceil(given.inner, STEP)
    most = chunk_steps(all_steps)
    configure(emit, given.config, emit.integer(GROUP))

    def one(number: Int, _: Any) -> None:
        start = number * most
        steps, whole = (all_steps - start).least(most), (whole_steps - start).least(most)
        chunk = _Chunk(start, steps, whole, all_steps.equals(start + steps), most.equals(all_steps))
        emit.loop(0, block.num_panels, 1, lambda index, _: _panel(code, output, emit, given, block, chunk, index))

    emit.loop(0, _ceil(all_steps, most), 1, one)
    tiles.release(emit)


def _panel(
    code: Code, output: Output, emit: Emitter, given: Problem, block: _AmxBlock, chunk: _Chunk, index: Int
) -> None:
    """Emit a chunk of one of the block's panels with all its groups of rows, and at the end of the last chunk y."""
    part, groups, panel = _part(code), block.groups, block.first_panel + index
    all_groups, first_group = _ceil(given.rows, GROUP), block.first_row // GROUP
    weights = given.weight + panel * ((given.inner + 1) // 2 * PAIR_BYTES) + chunk.start * STEP_BYTES
    left = (given.columns - panel * PANEL).least(PANEL)
    biases = given.bias + panel * (PANEL * ITEM_BYTES[output.dtype])
    y_stride, first_column = given.columns * ITEM_BYTES[output.out], panel * (PANEL * ITEM_BYTES[output.out])
    pairs = (given.inner % STEP + 1) // 2
    emit.when(
        chunk.whole.less(chunk.steps),
        lambda: copy_rest_of_panel(emit, weights + chunk.whole * STEP_BYTES, pairs, given.rest),
    )

    def place(number: Int) -> Int:
        """Two places in turns are enough where sums do not wait for another chunk."""
        return given.sums + (number % 2).where(chunk.alone, index * groups + number) * _GROUP_SUMS

    def write(number: Int) -> None:
        row = number * GROUP
        into = given.y + (block.first_row + row) * y_stride + first_column
        count = (block.num_rows - row).least(GROUP)
        whole_count = count.where(left.equals(PANEL), 0)
        write_rows(emit, output, place(number), whole_count, into, y_stride, biases, None)
        write_rows(emit, output, place(number), count - whole_count, into, y_stride, biases, left)

    def group(number: Int, _: Any) -> None:
        source = given.x + chunk_place(chunk.start, chunk.steps, all_groups, first_group + number)
        part(emit, source, weights, chunk.steps, chunk.whole, given.rest, place(number), chunk.start)
        # The sums of the group before: what was just stored is not yet in memory.
        emit.when(emit.integer(0).less(number.where(chunk.last, 0)), lambda: write(number - 1))

    emit.loop(0, groups, 1, group)
    emit.when(chunk.last, lambda: write(groups - 1))


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
