"""Rotary position embedding, and the write of keys and values to the cache.

A block of the cache holds, for each KV head, keys as [DP, B] and values as [B, DP]: attention multiplies a query by 16
keys at once, and sums 16 columns of values at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.cpu.kernels.norm import each_piece, normalize
from executor_svc.device.kernels import AttentionShape, HeadNorms

ROWS_AT_ONCE = 8
"""Rows of an item. Consecutive tokens have keys in the same cache lines; two threads would contend for them."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How heads are rotated, and what is done to them then."""

    size: int
    """Columns of a head that are rotated."""
    angle_dtype: Dtype
    """Of cos and sin; wider than that of heads: the sum of the products is rounded, not the products."""
    scale_dtype: Dtype | None = None
    """Of what queries are multiplied with; None: they are not."""
    norm_dtype: Dtype | None = None
    """Of the weights of norms of heads in the same pass; None: there are none."""
    norm_eps: float = 0.0
    norms_after: bool = False
    """Whether these follow the rotation."""
    values_normed: bool = False
    kv_parts: int = 2
    """What rows hold beside queries: keys and values; 1: keys, which are the values too; 0: nothing."""
    kv_dtype: Dtype | None = None
    """Of the cache; None: that of heads."""
    heads_between: int = 0
    """Heads between the end of a row and the next row's beginning, which are not touched."""

    def name(self, shape: AttentionShape) -> str:
        """Return the part of a kernel's name that is of this rotation."""
        norms = "" if self.norm_dtype is None else f"_{self.norm_dtype}_{self.norm_eps}_{shape.head_size}"
        marks = {
            f"scaled_{self.scale_dtype}": self.scale_dtype is not None,
            "after": self.norms_after,
            "values": self.values_normed,
            f"between_{self.heads_between}": self.heads_between > 0,
            f"kv_{self.kv_dtype}": self.kv_dtype is not None,
        }
        named = "".join(f"_{mark}" for mark, there in marks.items() if there)
        return f"{self.size}_{self.angle_dtype}{named}{norms}_{self.kv_parts}"


def rope_write_kv(code: Code, dtype: Dtype, shape: AttentionShape, rotation: Rotation, block_size: int) -> str:
    """Add the kernel that rotates q and k of qkv in place and writes k and v to the cache; returns its name.

    Items: one per ROWS_AT_ONCE rows. Arguments: rows, qkv [rows, (H + 2 KVH) * DP], cos and sin [any, rotated] with
    the first half of sin negated, angle_rows [rows] int64 (of cos and sin), slots [rows] int64, kv_layer, its strides
    as those of `attention`, and where the rotation says so: query_scales [any], q_weight and k_weight [D], v_weight
    [DP]. Rounds where transformers does.
    """
    size, width = ITEM_BYTES[dtype], shape.padded_head_size
    num_q, num_kv = shape.num_heads, shape.num_kv_heads if rotation.kv_parts else 0
    head_bytes = width * size
    kept = rotation.kv_dtype or dtype
    kept_size = ITEM_BYTES[kept]
    kept_bytes = width * kept_size

    def body(
        emit: Emitter, item: Int, _: Int, rows: Int, qkv: Int, cos: Int, sin: Int, angle_rows: Int, slots: Int,
        kv_layer: Int, stride: Int, to_values: Int, query_scales: Int, q_weight: Int, k_weight: Int, v_weight: Int,
    ) -> None:  # fmt: skip
        def norms(start: Int) -> None:
            for first, count, weight in ((0, num_q, q_weight), (num_q, num_kv, k_weight)):
                _normalize(emit, start + first * head_bytes, count, weight, shape, rotation, dtype)

        def row(index: Int, _: list[Vec]) -> None:
            start = qkv + index * ((num_q + rotation.kv_parts * num_kv + rotation.heads_between) * head_bytes)
            angle_row = emit.load_int(angle_rows + index * 8)
            angles = angle_row * (rotation.size * ITEM_BYTES[rotation.angle_dtype])
            slot = emit.load_int(slots + index * 8)
            block, offset = slot // block_size, slot % block_size
            keys = kv_layer + block * stride + offset * kept_size
            values = kv_layer + block * stride + to_values + offset * kept_bytes
            key_start = start + num_q * head_bytes

            def rotate(head: Int, _: list[Vec]) -> None:
                rotate_columns(emit, start + head * head_bytes, cos + angles, sin + angles, rotation, dtype)

            # First: they may be what keys are made of.
            value_start = key_start + (rotation.kv_parts - 1) * num_kv * head_bytes
            _write_values(emit, value_start, values, num_kv, v_weight, shape, rotation, dtype, block_size)
            if rotation.norm_dtype is not None and not rotation.norms_after:
                norms(start)
            if rotation.size:
                emit.loop(0, num_q + num_kv, 1, rotate)
            if rotation.norm_dtype is not None and rotation.norms_after:
                norms(start)
            if rotation.scale_dtype is not None:
                at = query_scales + angle_row * ITEM_BYTES[rotation.scale_dtype]
                multiply(emit, start, num_q * width, emit.load_all(at, rotation.scale_dtype), dtype)
            _write_keys(emit, key_start, keys, num_kv, shape, (dtype, kept), block_size)

        first = item * ROWS_AT_ONCE
        emit.loop(first, rows.least(first + ROWS_AT_ONCE), 1, row)

    return code.kernel(f"rope_write_kv_{dtype}_{num_q}_{num_kv}_{width}_{rotation.name(shape)}_{block_size}", 13, body)


def _write_values(
    emit: Emitter, first: Int, into: Int, count: int, weight: Int, shape: AttentionShape, rotation: Rotation,
    dtype: Dtype, block_size: int,
) -> None:  # fmt: skip
    """Emit the write of `count` heads of values, from the one at `first` on, to a block of the cache."""
    width, size, kept = shape.padded_head_size, ITEM_BYTES[dtype], rotation.kv_dtype or dtype
    kept_size = ITEM_BYTES[kept]

    def head(index: Int, _: list[Vec]) -> None:
        value, to = first + index * (width * size), into + index * (block_size * width * kept_size)
        if rotation.values_normed:
            assert rotation.norm_dtype is not None
            kinds = dtype, rotation.norm_dtype
            normalize(emit, value, to, weight, *kinds, width, rotation.norm_eps, shape.head_size, out=kept)
            return
        for place in range(0, width, LANES):
            emit.store(emit.load(value + place * size, dtype), to + place * kept_size, kept)

    emit.loop(0, count, 1, head)


def _write_keys(
    emit: Emitter,
    first: Int,
    into: Int,
    count: int,
    shape: AttentionShape,
    dtypes: tuple[Dtype, Dtype],
    block_size: int,
) -> None:
    """Emit the write of `count` heads of keys, from the one at `first` on, each as a column of a block of the cache.

    dtypes: of heads, and of the cache.
    """
    (dtype, kept), width = dtypes, shape.padded_head_size
    size, kept_size = ITEM_BYTES[dtype], ITEM_BYTES[kept]

    def head(index: Int, _: list[Vec]) -> None:
        key, to = first + index * (width * size), into + index * (block_size * width * kept_size)
        for place in range(0, width, LANES):
            at = to + place * block_size * kept_size
            emit.scatter(emit.load(key + place * size, dtype), at, block_size * kept_size, kept)

    emit.loop(0, count, 1, head)


def multiply(emit: Emitter, x: Int, length: int, number: Vec, dtype: Dtype) -> None:
    """Emit the product of x [length] with a number, in place."""
    size = ITEM_BYTES[dtype]

    def piece(place: Int, count: int) -> None:
        emit.store(emit.load(x + place * size, dtype, count) * number, x + place * size, dtype, count)

    each_piece(emit, length, piece)


def _normalize(
    emit: Emitter, first: Int, count: int, weight: Int, shape: AttentionShape, rotation: Rotation, dtype: Dtype
) -> None:
    """Emit the norms of `count` heads, from the one at `first` on."""
    head_bytes, weight_dtype = shape.padded_head_size * ITEM_BYTES[dtype], rotation.norm_dtype
    assert weight_dtype is not None

    def head(index: Int, _: list[Vec]) -> None:
        at = first + index * head_bytes
        normalize(emit, at, at, weight, dtype, weight_dtype, shape.head_size, rotation.norm_eps)

    emit.loop(0, count, 1, head)


def rotate_columns(emit: Emitter, head: Int, cos: Int, sin: Int, rotation: Rotation, dtype: Dtype) -> None:
    """Emit x * cos + (halves of x swapped) * sin for the first columns of a head."""
    size, half, angle_dtype = ITEM_BYTES[dtype], rotation.size // 2, rotation.angle_dtype
    angle_size = ITEM_BYTES[angle_dtype]
    for place, count in pieces(half):
        low, high = place * size, (half + place) * size
        x_low, x_high = emit.load(head + low, dtype, count), emit.load(head + high, dtype, count)
        for column, at, x, other in ((place, low, x_low, x_high), (half + place, high, x_high, x_low)):
            straight = x * emit.load(cos + column * angle_size, angle_dtype, count)
            crossed = other * emit.load(sin + column * angle_size, angle_dtype, count)
            if angle_dtype == dtype:
                straight, crossed = straight.rounded(dtype), crossed.rounded(dtype)
            emit.store(straight + crossed, head + at, dtype, count)


def in_one_pass(norms: HeadNorms, kv_parts: int) -> bool:
    """Return whether norms of heads are computed with the rotation: after it, of values, or where keys alone are."""
    return norms.kind == "heads after rope" or norms.v is not None or kv_parts < 2
