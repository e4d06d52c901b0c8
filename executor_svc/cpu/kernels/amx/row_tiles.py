"""Rows of x as tiles: what a product of many rows reads one after the other.

Rows as they are would be a whole row apart, and rows of 2,048 numbers share one set of a cache.
"""

from __future__ import annotations

from typing import Any

from executor_svc.cpu.kernels.amx.few_rows import FEW_ROWS
from executor_svc.cpu.kernels.amx.steps import NUMBERS, SIZE, STEP, load_numbers
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Emitter, Int
from executor_svc.cpu.kernels.codegen.tiles import TILE_BYTES

GROUP = FEW_ROWS
"""Rows that are multiplied together, in two tiles."""
GROUP_BYTES = GROUP * TILE_BYTES
"""Bytes of a step of a group."""
LEAST_ROWS = FEW_ROWS + 1
"""Fewer rows are read as they are."""
_MOST_STEPS = 8
"""Steps of a chunk of the inner dimension: a panel's part stays in the L1 cache (16 KiB), while the rows pass by."""


def padded(rows: int, inner: int) -> tuple[int, int]:
    """Return the rows and numbers of a row, rounded up to whole groups and steps, that the tiles have."""
    return -(-rows // GROUP) * GROUP, -(-inner // STEP) * STEP


def chunk_steps(steps: Int) -> Int:
    """Return the steps of a chunk: as few chunks as possible, as even as possible."""
    chunks = (steps + (_MOST_STEPS - 1)) // _MOST_STEPS
    return (steps + (chunks - 1)) // chunks


def chunk_place(first_step: Int, steps: Int, groups: Int, group: Int) -> Int:
    """Return the offset of a group in the chunk that begins at first_step and has so many steps: chunks one after the
    other, in a chunk groups one after the other, in a group steps."""
    return (first_step * groups + group * steps) * GROUP_BYTES


def row_tiles(code: Code) -> str:
    """Add the kernel that arranges rows of bfloat16 as tiles; returns its name.

    Items: one for each group of GROUP rows. Arguments: rows, x [rows, K], K, tiles of `padded` rows and numbers, which
    are 0 beyond x.
    """

    def body(emit: Emitter, item: Int, _: Int, rows: Int, x: Int, inner: Int, into: Int) -> None:
        first, all_steps, groups = item * GROUP, (inner + (STEP - 1)) // STEP, (rows + (GROUP - 1)) // GROUP
        here, most = (rows - first).least(GROUP), chunk_steps(all_steps)

        def chunk(number: Int, _: Any) -> None:
            start = number * most
            steps = (all_steps - start).least(most)
            target = into + chunk_place(start, steps, groups, item)

            def row(index: Int, _: Any) -> None:
                source = x + ((first + index) * inner + start * STEP) * SIZE
                count = (inner - start * STEP).where(index.less(here), 0)

                def step(at: Int, _: Any) -> None:
                    numbers = load_numbers(emit, source + at * (STEP * SIZE), count - at * STEP)
                    place = emit.pointer(target + at * GROUP_BYTES + index * TILE_BYTES, NUMBERS)
                    emit.builder.store(numbers, place).align = TILE_BYTES

                emit.loop(0, steps, 1, step)

            emit.loop(0, GROUP, 1, row)

        emit.loop(0, (all_steps + (most - 1)) // most, 1, chunk)

    return code.kernel("row_tiles", 4, body)
