"""Adapters of a table of embeddings: their sums are rows of a, one for each token of the vocabulary."""

from __future__ import annotations

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.lora.shrink import HALVES, Tile
from executor_svc.cpu.kernels.norm import each_piece


def take_sums(code: Code, dtype: Dtype) -> str:
    """Add the kernel sums[position, 0] = a[token of the row], sums[position, 1] = 0; returns its name.

    Items and arguments: as those of `shrink.shrink`, but token_ids [rows] int64 in place of x and K.
    """
    size = ITEM_BYTES[dtype]

    def body(
        emit: Emitter,
        item: Int,
        _: Int,
        __: Int,
        tiles: Int,
        order: Int,
        token_ids: Int,
        places: Int,
        place_bytes: Int,
        sums: Int,
        half_bytes: Int,
    ) -> None:
        tile = Tile.load(emit, tiles, item, places, place_bytes)
        strips, a = emit.load_int(tile.place), emit.load_int(tile.place + 8)
        is_first = tile.half.equals(0)

        def row(index: Int, _: list[Vec]) -> None:
            position = tile.first + index
            token = emit.load_int(token_ids + emit.load_int(order + position * 8) * 8)
            source, into = a + token * strips * (LANES * size), sums + (position * HALVES + tile.half) * half_bytes

            def strip(which: Int, _: list[Vec]) -> None:
                number = emit.load(source + which * (LANES * size), dtype)
                chosen = emit.builder.select(is_first, number.value, emit.vec(0.0).value)
                emit.store(Vec(emit, chosen), into + which * (LANES * 4), "float32")

            emit.loop(0, strips, 1, strip)

        emit.loop(0, tile.rows, 1, row)

    return code.kernel(f"lora_take_{dtype}", 8, body)


def scale_rows(code: Code, dtype: Dtype, width: int, scale: float) -> str:
    """Add the kernel x = x * scale, in place; returns its name.

    Items: one for each row. Arguments: rows, x [rows, width].
    """
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, __: Int, x: Int) -> None:
        start = x + item * (width * size)

        def piece(offset: Int, count: int) -> None:
            at = start + offset * size
            emit.store(emit.load(at, dtype, count) * scale, at, dtype, count)

        each_piece(emit, width, piece)

    return code.kernel(f"scale_rows_{dtype}_{width}_{scale}", 2, body)
