"""Rotary position embedding, and the write of keys and values to the cache.

A block of the cache holds, for each KV head, keys as [DP, B] and values as [B, DP]: attention multiplies a query by 16
keys at once, and sums 16 columns of values at once.
"""

from __future__ import annotations

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.device.kernels import AttentionShape

ROWS_AT_ONCE = 8
"""Rows of an item. Consecutive tokens have keys in the same cache lines; two threads would contend for them."""


def rope_write_kv(code: Code, dtype: Dtype, shape: AttentionShape, rotated: int, block_size: int) -> str:
    """Add the kernel that rotates q and k of qkv in place and writes k and v to the cache; returns its name.

    Items: one per ROWS_AT_ONCE rows. Arguments: rows, qkv [rows, (H + 2 KVH) * DP], cos and sin [any, rotated] with
    the first half of sin negated, angle_rows [rows] int64 (of cos and sin), slots [rows] int64, kv_layer. Rounds after
    each product, as transformers does.
    """
    size, width = ITEM_BYTES[dtype], shape.padded_head_size
    num_q, num_kv = shape.num_heads, shape.num_kv_heads
    head_bytes = width * size

    def body(
        emit: Emitter,
        item: Int,
        _: Int,
        rows: Int,
        qkv: Int,
        cos: Int,
        sin: Int,
        angle_rows: Int,
        slots: Int,
        kv_layer: Int,
    ) -> None:
        def row(index: Int, _: list[Vec]) -> None:
            start = qkv + index * ((num_q + 2 * num_kv) * head_bytes)
            angles = emit.load_int(angle_rows + index * 8) * (rotated * size)

            def rotate(head: Int, _: list[Vec]) -> None:
                _rotate(emit, start + head * head_bytes, cos + angles, sin + angles, rotated, dtype)

            emit.loop(0, num_q + num_kv, 1, rotate)
            slot = emit.load_int(slots + index * 8)
            block, offset = slot // block_size, slot % block_size
            keys = kv_layer + block * (2 * num_kv * block_size * head_bytes) + offset * size
            values = kv_layer + (block * (2 * num_kv) + num_kv) * (block_size * head_bytes) + offset * head_bytes

            def write(head: Int, _: list[Vec]) -> None:
                key = start + (head + num_q) * head_bytes
                value, of_head = key + num_kv * head_bytes, head * (block_size * head_bytes)
                for place in range(0, width, LANES):
                    into = keys + of_head + place * block_size * size
                    emit.scatter(emit.load(key + place * size, dtype), into, block_size * size, dtype)
                    emit.store(emit.load(value + place * size, dtype), values + of_head + place * size, dtype)

            emit.loop(0, num_kv, 1, write)

        first = item * ROWS_AT_ONCE
        emit.loop(first, rows.least(first + ROWS_AT_ONCE), 1, row)

    return code.kernel(f"rope_write_kv_{dtype}_{num_q}_{num_kv}_{width}_{rotated}_{block_size}", 7, body)


def _rotate(emit: Emitter, head: Int, cos: Int, sin: Int, rotated: int, dtype: Dtype) -> None:
    """Emit x * cos + (halves of x swapped) * sin for the first `rotated` columns of a head."""
    size, half = ITEM_BYTES[dtype], rotated // 2
    for place, count in pieces(half):
        low, high = place * size, (half + place) * size
        x_low, x_high = emit.load(head + low, dtype, count), emit.load(head + high, dtype, count)
        for at, x, other in ((low, x_low, x_high), (high, x_high, x_low)):
            straight = (x * emit.load(cos + at, dtype, count)).rounded(dtype)
            crossed = (other * emit.load(sin + at, dtype, count)).rounded(dtype)
            emit.store(straight + crossed, head + at, dtype, count)
