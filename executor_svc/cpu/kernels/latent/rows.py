"""Rows of latent attention on the CPU: what the cache gets, and rows of tokens as rows of heads and back.

Products with a weight for each head read and write rows by head: those of head 0 of all tokens, then those of head 1.
A block of the cache holds the rows of its tokens one after the other, [B, P].
"""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.cpu.kernels.norm import each_piece, normalize
from executor_svc.cpu.kernels.rope import Rotation, multiply, rotate_columns
from executor_svc.device.kernels import AttentionShape
from executor_svc.device.latent import padded_latent

ROWS_AT_ONCE = 4
"""Rows of an item of `write_latents`."""


def write_latents(
    code: Code,
    dtypes: tuple[Dtype, Dtype],
    norm_dtype: Dtype,
    shape: AttentionShape,
    angle_dtype: Dtype,
    block_size: int,
    eps: float,
) -> str:
    """Add the kernel that normalizes latents, rotates keys, and writes both to the cache; returns its name.

    dtypes: of kv, and of the cache.

    Items: one for each ROWS_AT_ONCE rows. Arguments: rows, kv, the bytes from one of its rows to the next, norm [L],
    cos and sin, angle_rows, slots as of `rope.rope_write_kv`, kv_layer, the bytes from one of its blocks to the next.
    """
    assert shape.latent is not None
    (dtype, kept), latent, width = dtypes, shape.latent, shape.padded_head_size
    size, kept_size = ITEM_BYTES[dtype], ITEM_BYTES[kept]
    rotation = Rotation(shape.head_size - latent, angle_dtype)
    keys, angle_bytes = padded_latent(latent), rotation.size * ITEM_BYTES[angle_dtype]

    def body(
        emit: Emitter, item: Int, _: Int, rows: Int, kv: Int, stride: Int, norm: Int, cos: Int, sin: Int,
        angle_rows: Int, slots: Int, kv_layer: Int, block_stride: Int,
    ) -> None:  # fmt: skip
        def row(index: Int, _: list[Vec]) -> None:
            source, slot = kv + index * stride, emit.load_int(slots + index * 8)
            into = kv_layer + slot // block_size * block_stride + slot % block_size * (width * kept_size)
            angles, key = emit.load_int(angle_rows + index * 8) * angle_bytes, source + latent * size
            rotate_columns(emit, key, cos + angles, sin + angles, rotation, dtype)
            for first in (keys - LANES, *range(keys, width, LANES)):  # what is not written below is 0
                emit.store(emit.vec(0.0), into + first * kept_size, kept)
            normalize(emit, source, into, norm, dtype, norm_dtype, latent, eps, out=kept)
            for offset, count in pieces(rotation.size):
                number = emit.load(key + offset * size, dtype, count)
                emit.store(number, into + (keys + offset) * kept_size, kept, count)

        first = item * ROWS_AT_ONCE
        emit.loop(first, rows.least(first + ROWS_AT_ONCE), 1, row)

    sizes = f"{latent}_{rotation.size}_{width}_{block_size}_{eps}"
    return code.kernel(f"write_latents_{dtype}_{kept}_{norm_dtype}_{angle_dtype}_{sizes}", 10, body)


@dataclass(frozen=True, slots=True)
class HeadColumns:
    """Columns of a head in rows of tokens, of which the first become rows by head."""

    num_heads: int
    all: int
    """Columns of a head."""
    first: int
    """Those that become rows by head."""
    padded: int
    """Columns there; the others are 0."""

    def __str__(self) -> str:
        return f"{self.num_heads}_{self.all}_{self.first}_{self.padded}"


def split_queries(code: Code, dtype: Dtype, heads: HeadColumns, rotation: Rotation) -> str:
    """Add the kernel that rotates the last columns of queries in place, and copies the first to rows by head.

    Items: one for each row. Arguments: rows, q, the bytes from one of its rows to the next, cos, sin, angle_rows and
    query_scales as of `rope.rope_write_kv`, y [H * rows, padded]. Returns its name.
    """
    size = ITEM_BYTES[dtype]

    def body(
        emit: Emitter, item: Int, _: Int, rows: Int, q: Int, stride: Int, cos: Int, sin: Int, angle_rows: Int,
        query_scales: Int, y: Int,
    ) -> None:  # fmt: skip
        angle_row = emit.load_int(angle_rows + item * 8)
        angles, start = angle_row * (rotation.size * ITEM_BYTES[rotation.angle_dtype]), q + item * stride

        def head(index: Int, _: list[Vec]) -> None:
            source, into = start + index * (heads.all * size), y + (index * rows + item) * (heads.padded * size)
            rotate_columns(emit, source + heads.first * size, cos + angles, sin + angles, rotation, dtype)
            if rotation.scale_dtype is not None:
                scale = emit.load_all(query_scales + angle_row * ITEM_BYTES[rotation.scale_dtype], rotation.scale_dtype)
                multiply(emit, source, heads.all, scale, dtype)
            _copy(emit, source, into, heads.first, heads.padded, dtype)

        emit.loop(0, heads.num_heads, 1, head)

    scale = "" if rotation.scale_dtype is None else f"_{rotation.scale_dtype}"
    name = f"split_queries_{dtype}_{heads}_{rotation.size}_{rotation.angle_dtype}{scale}"
    return code.kernel(name, 8, body)


def join_heads(code: Code, dtype: Dtype, heads: HeadColumns) -> str:
    """Add the kernel that copies rows by head to rows of tokens; returns its name.

    Items: one for each row. Arguments: rows, x [H * rows, padded], y [rows, H * all].
    """
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, rows: Int, x: Int, y: Int) -> None:
        def head(index: Int, _: list[Vec]) -> None:
            source = x + (index * rows + item) * (heads.padded * size)
            into = y + (item * heads.num_heads + index) * (heads.all * size)
            _copy(emit, source, into, heads.all, heads.all, dtype)

        emit.loop(0, heads.num_heads, 1, head)

    return code.kernel(f"join_heads_{dtype}_{heads}", 3, body)


def _copy(emit: Emitter, source: Int, into: Int, count: int, padded: int, dtype: Dtype) -> None:
    """Emit a copy of numbers, with zeros after them up to `padded`, a multiple of LANES if there are some."""
    size = ITEM_BYTES[dtype]

    def piece(offset: Int, length: int) -> None:
        number = emit.load(source + offset * size, dtype, length)
        emit.store(number, into + offset * size, dtype, LANES if padded > count else length)

    each_piece(emit, count, piece)
