"""Matrix products in which every element is one chain of fused operations over the inner dimension, ascending.

An element's bits therefore depend only on its row of x and its row of the weight, not on the number of rows, the tiles
or the thread. bfloat16 uses the level's dot product of pairs (AVX512-BF16), else fused
operations on floats, in ascending order: weights are widened in registers for all rows of a tile, rows of x before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, Emitter, Int, Vec
from executor_svc.cpu.kernels.matmul_tiles import Output, Shape, has_pairs, tile, tile_shapes
from executor_svc.cpu.kernels.panel_layout import PANEL, inner_step, panel_item


def matmul(code: Code, output: Output) -> str:
    """Add the kernel y = x @ weight.T (+ bias), rounded and written as `output` says; returns its name.

    Items: as `panel_item` has them. Arguments: rows; x [rows, K], as `widen_rows` writes it where the level has no dot
    product of pairs; the weight's panels (`panels`); y [rows, N]; K; N; bias [N] or 0; `streams` of `panel_item`,
    `following` and `stride` of `PanelItem.coming`. Weight and bias are of dtype.
    """
    dtype, step = output.factors, inner_step(output.factors)
    size, out_size = ITEM_BYTES[dtype], ITEM_BYTES[output.out]

    def body(
        emit: Emitter,
        item: Int,
        _: Int,
        rows: Int,
        x: Int,
        weight: Int,
        y: Int,
        inner: Int,
        columns: Int,
        bias: Int,
        streams: Int,
        following: Int,
        stride: Int,
    ) -> None:
        shapes = tile_shapes(code.isa)
        tiles = {shape.rows: tile(code, output, shape) for shape in shapes}
        edge = {1: tile(code, output, Shape(1, shapes[-1].vectors), whole=False)}
        work, even = panel_item(item, rows, columns, streams), (inner + (step - 1)) // step * step
        x_stride = inner * size if has_pairs(code.isa, dtype) else even * ITEM_BYTES["float32"]
        y_stride = columns * out_size
        start = x + work.first * x_stride
        weights = weight + work.panel * even * (PANEL * size)
        coming = work.coming(weights, even * (PANEL * size), following, stride)
        into = y + work.first * y_stride + work.panel * (PANEL * out_size)
        biases = bias + work.panel * (PANEL * ITEM_BYTES[output.dtype])

        def run(tiles: Mapping[int, Callable[..., None]]) -> None:
            for at, count, height in split_rows(work.here, tuple(tiles)):

                def call(index: Int, _: list[Vec], at: Int = at, height: int = height) -> None:
                    row = at + index * height
                    x_part, y_part = start + row * x_stride, into + row * y_stride
                    tiles[height](emit, x_part, x_stride, weights, coming, inner, y_part, y_stride, biases, work.left)

                emit.loop(0, count, 1, call)

        emit.when(work.left.equals(PANEL), lambda: run(tiles))
        emit.when(work.left.less(PANEL), lambda: run(edge))

    return code.kernel(f"matmul_{output}", 10, body)


def split_rows(rows: Int, sizes: Sequence[int]) -> Iterator[tuple[Int, Int, int]]:
    """Split rows into tiles of these sizes, descending: first row, number of tiles, their size.

    Evenly where there are tiles of all sizes, else into as large tiles as fit.
    """
    return _even_split(rows, sizes) if len(sizes) == sizes[0] else _largest_first(rows, sizes)


def _largest_first(rows: Int, sizes: Sequence[int]) -> Iterator[tuple[Int, Int, int]]:
    at = rows.emit.integer(0)
    for size in sizes:
        count = (rows - at) // size
        yield at, count, size
        at = at + count * size


def _even_split(rows: Int, sizes: Sequence[int]) -> Iterator[tuple[Int, Int, int]]:
    """Split rows into the fewest tiles; their sizes differ by at most one."""
    most = sizes[0]
    num_tiles = (rows + (most - 1)) // most
    smaller, num_larger = rows // num_tiles, rows % num_tiles
    at = rows.emit.integer(0)
    for size in sizes:
        num_smaller = (num_tiles - num_larger).where(smaller.equals(size), 0)
        count = num_larger.where(smaller.equals(size - 1), num_smaller)
        yield at, count, size
        at = at + count * size
