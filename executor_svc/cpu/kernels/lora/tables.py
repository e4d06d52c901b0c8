"""Adapters of tables by token: pairs of embeddings, and rows that replace those of embeddings or of the head."""

from __future__ import annotations

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.lora.rows import TILE_ROWS
from executor_svc.cpu.kernels.lora.shrink import HALVES, STRIP_UNIT_BYTES, ShrinkTile, heights, row_sums
from executor_svc.cpu.kernels.matmul import split_rows
from executor_svc.cpu.kernels.matmul_tiles import Output
from executor_svc.cpu.kernels.norm import each_piece
from executor_svc.cpu.kernels.panel_layout import inner_step

_MOST_REPLACED = 1 << 20


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
        tile = ShrinkTile.load(emit, tiles, item, places, place_bytes)
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


def replace_rows(code: Code, dtype: Dtype, width: int) -> str:
    """Add the kernel y[row] = the replaced row of its token, where there is one; returns its name.

    Items: HALVES for each tile, each with every other row. Arguments: tiles; the table of tiles, the order of rows;
    token_ids [rows] int64; y [rows, width]; the table of places and the bytes of its rows.
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
        y: Int,
        places: Int,
        place_bytes: Int,
    ) -> None:
        tile = ShrinkTile.load(emit, tiles, item, places, place_bytes)
        count, ids, replaced = (emit.load_int(tile.place + 8 * field) for field in (3, 4, 5))

        def row(index: Int, _: list[Vec]) -> None:
            which = emit.load_int(order + (tile.first + index) * 8)
            token = emit.load_int(token_ids + which * 8)
            place = _count_below(emit, ids, count, token).least(count - 1)
            source, into = replaced + place * (width * size), y + which * (width * size)

            def copy() -> None:
                each_piece(
                    emit,
                    width,
                    lambda offset, some: emit.store(
                        emit.load(source + offset * size, dtype, some), into + offset * size, dtype, some
                    ),
                )

            emit.when(emit.load_int(ids + place * 8).equals(token), copy)

        def rows() -> None:
            emit.loop(tile.half, tile.rows, HALVES, row)

        emit.when(emit.integer(0).less(count), rows)

    return code.kernel(f"lora_replace_{dtype}_{width}", 7, body)


def _count_below(emit: Emitter, ids: Int, count: Int, number: Int) -> Int:
    """Emit: return how many of `count` ascending integers, 1 to 2^20 of them, are below a number."""
    builder = emit.builder

    def halve(turn: Int, carried: list[Vec]) -> list[Vec]:
        below = Int(emit, carried[0].value)
        more = below + Int(emit, builder.lshr(emit.integer(_MOST_REPLACED).value, turn.value))
        is_below = emit.load_int(ids + (more.least(count) - 1) * 8).less(number)
        taken = builder.and_(builder.not_(count.less(more)), is_below)
        return [Vec(emit, more.where(taken, below).value)]

    turns = _MOST_REPLACED.bit_length()
    return Int(emit, emit.loop(0, turns, 1, halve, [Vec(emit, emit.integer(0).value)])[0].value)


def replaced_columns(code: Code, output: Output) -> str:
    """Add the kernel y[row, id] = x[row] @ replaced row, for all replaced rows of a place; returns its name.

    Sums are one chain over K, ascending. Items: HALVES for each tile, each with a half of the strips. Arguments: tiles;
    the table of tiles, the order of rows; x [rows, K]; K; y; the bytes of a row of y; the table of places and the bytes
    of its rows; TILE_ROWS * 64 bytes of scratch memory for each thread.
    """
    dtype, out = output.dtype, output.out
    step = inner_step(dtype)

    def body(
        emit: Emitter,
        item: Int,
        thread: Int,
        _: Int,
        tiles: Int,
        order: Int,
        x: Int,
        inner: Int,
        y: Int,
        y_bytes: Int,
        places: Int,
        place_bytes: Int,
        scratch: Int,
    ) -> None:
        computed = {height: row_sums(code, dtype, height) for height in heights(code)}
        tile = ShrinkTile.load(emit, tiles, item, places, place_bytes)
        count, ids, replaced = (emit.load_int(tile.place + 8 * field) for field in (3, 4, 5))
        strips, units = (count + (LANES - 1)) // LANES, (inner + (step - 1)) // step
        sums, stride = scratch + thread * (TILE_ROWS * LANES * 4), LANES * 4
        rows = order + tile.first * 8

        def strip(which: Int, _: list[Vec]) -> None:
            weights = replaced + which * units * STRIP_UNIT_BYTES
            for at, number, height in split_rows(tile.rows, tuple(computed)):

                def call(index: Int, _: list[Vec], at: Int = at, height: int = height) -> None:
                    row = at + index * height
                    places = (weights, emit.integer(0), units, sums + row * stride, emit.integer(stride))
                    computed[height](emit, rows + row * 8, x, inner, *places)

                emit.loop(0, number, 1, call)

            def write(index: Int, _: list[Vec]) -> None:
                into = y + emit.load_int(rows + index * 8) * y_bytes

                def column(lane: Int, _: list[Vec]) -> None:
                    total = emit.load_all(sums + index * stride + lane * 4, "float32")
                    place = into + emit.load_int(ids + (which * LANES + lane) * 8) * ITEM_BYTES[out]
                    emit.store(total if out == dtype else total.rounded(dtype), place, out, 1)

                emit.loop(0, (count - which * LANES).least(LANES), 1, column)

            emit.loop(0, tile.rows, 1, write)

        emit.loop(strips * tile.half // HALVES, strips * (tile.half + 1) // HALVES, 1, strip)

    return code.kernel(f"lora_columns_{output}", 10, body)
