"""Instructions of AMX: tile registers of up to 16 rows of 64 bytes, and the product of two of them.

Tiles belong to a thread. `configure` sets their sizes and clears them, `release` gives them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.emit import Emitter, Int

TILES = 8
"""Tile registers."""

TILE_ROWS = 16
TILE_BYTES = 64
"""Bytes of a row: 32 bfloat16 numbers or 16 floats."""

_I8, _I64, _VOID = ir.IntType(8), ir.IntType(64), ir.VoidType()
_PALETTE = 1


def scratch(emit: Emitter, num_bytes: int) -> Int:
    """Reserve memory of the function's frame at a multiple of 64 bytes; for the start of a function."""
    place = emit.builder.alloca(ir.ArrayType(_I8, num_bytes))
    place.align = TILE_BYTES
    return Int(emit, emit.builder.ptrtoint(place, _I64))


def configure(
    emit: Emitter, memory: Int, rows: Sequence[Int | int], row_bytes: Sequence[int] = (TILE_BYTES,) * TILES
) -> None:
    """Set the number of rows of each tile, 1 to 16, and the bytes of its rows; tiles are zero then.

    memory: 64 bytes for the configuration. Its layout is in Intel's manual at LDTILECFG: the palette in byte 0, the
    bytes per row of each tile as 16-bit integers from byte 16 on, the rows of each tile as bytes from byte 48 on.
    """
    assert len(rows) == len(row_bytes) == TILES
    half = TILES // 2
    sizes = [sum(row_bytes[start + tile] << 16 * tile for tile in range(half)) for start in (0, half)]
    counts = emit.integer(0)
    for tile, count in enumerate(rows):
        counts = counts + emit.integer(count) * (1 << 8 * tile)
    words: tuple[Int | int, ...] = (_PALETTE, 0, *sizes, 0, 0, counts, 0)
    for index, word in enumerate(words):
        emit.builder.store(emit.integer(word).value, emit.pointer(memory + 8 * index, _I64))
    _call(emit, "ldtilecfg", emit.pointer(memory, _I8))


def release(emit: Emitter) -> None:
    """Give the thread's tiles back: the system does not save them at a switch of threads then."""
    _call(emit, "tilerelease")


def clear(emit: Emitter, tile: int) -> None:
    """Set a tile to zero."""
    _call(emit, "tilezero", _I8(tile))


def load(emit: Emitter, tile: int, address: Int, stride: Int | int) -> None:
    """Read a tile's rows from memory; stride: the distance of rows in bytes."""
    _call(emit, "tileloadd64", _I8(tile), emit.pointer(address, _I8), emit.integer(stride).value)


def store(emit: Emitter, tile: int, address: Int, stride: Int | int) -> None:
    """Write a tile's rows to memory; stride: the distance of rows in bytes."""
    _call(emit, "tilestored64", _I8(tile), emit.pointer(address, _I8), emit.integer(stride).value)


def add_product(emit: Emitter, total: int, left: int, right: int) -> None:
    """Add the product of bfloat16 tiles to a tile of floats (TDPBF16PS).

    left: [rows, 32]. right: [16, 16, 2], two consecutive rows of the factor side by side. An element gets its 16
    products of even places, one after the other, plus its 16 of odd places, in one addition.
    """
    _call(emit, "tdpbf16ps", _I8(total), _I8(left), _I8(right))


def add_int8_product(emit: Emitter, total: int, left: int, right: int, unsigned: bool) -> None:
    """Add the product of tiles of bytes to a tile of 32-bit integers, exactly (TDPBSSD, or TDPBSUD).

    left: [rows, K] signed. right: [K / 4, columns, 4], signed or unsigned: four consecutive rows of the factor side by
    side.
    """
    _call(emit, "tdpbsud" if unsigned else "tdpbssd", _I8(total), _I8(left), _I8(right))


def _call(emit: Emitter, name: str, *arguments: Any) -> None:
    function = emit.declare(f"llvm.x86.{name}", _VOID, [argument.type for argument in arguments])
    emit.builder.call(function, arguments)
