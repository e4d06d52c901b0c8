"""Paged attention on the CPU for prefill chunks and decodes in one batch, directly from the cache's blocks.

A row (one token, one head) passes over its keys three times: for scores, for exact maximum and exponentials, for
weighted values. Every number is one chain of operations in the order of absolute positions, so a row's bits depend only
on its own query and its sequence's cache, not on batch, chunk, block size or thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from executor_svc.cpu.kernels.attention_plan import TILE_FIELDS, tile_tokens
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.cpu.kernels.codegen.functions import exp, tanh, where
from executor_svc.device.kernels import AttentionShape

_FLOAT = 4
_ALIGNED = 64
"""Stored scores begin at a multiple of this position: a multiple of every block size, and of LANES."""


def scratch_bytes(shape: AttentionShape, max_model_len: int) -> int:
    """Return the bytes of scratch memory of one thread: for the queries of a tile and their scores."""
    rows = tile_tokens(shape) * shape.group
    return rows * _FLOAT * (shape.padded_head_size + _score_stride(max_model_len))


def _score_stride(max_model_len: int) -> int:
    return -(-max_model_len // _ALIGNED) * _ALIGNED + _ALIGNED


def attention(code: Code, dtype: Dtype, shape: AttentionShape, block_size: int, max_model_len: int) -> str:
    """Add the kernel; returns its name.

    Items: one per query tile and KV head. Arguments: tiles, q [T, H, DP], the stride of its tokens in bytes, kv_layer,
    out [T, H * DP], and the table of `CpuAttentionPlan`.
    """
    return _AttentionKernel(code, dtype, shape, block_size, max_model_len).add()


@dataclass(frozen=True, slots=True)
class _Tile:
    """The query tile and KV head of an item."""

    row: Int
    tokens: Int
    position: Int
    head: Int
    first_seen: Int
    """The first position that its first token attends to."""
    low: Int
    high: Int
    """Its tokens attend to keys of the sequence's blocks low to high - 1."""
    blocks: Int
    """Address of the sequence's block table."""
    keys: Int
    """Address of this KV head's keys in block 0."""
    values: Int


@dataclass(frozen=True, slots=True)
class _Work:
    """A tile, the tile that this thread will probably process next, and memory."""

    tile: _Tile
    coming: _Tile
    queries: Int
    scores: Int
    first: Int
    """Position of the first stored score."""
    out: Int


class _AttentionKernel:
    def __init__(self, code: Code, dtype: Dtype, shape: AttentionShape, block_size: int, max_model_len: int) -> None:
        self._code, self._dtype, self._shape, self._block = code, dtype, shape, block_size
        self._size = ITEM_BYTES[dtype]
        self._width = shape.padded_head_size
        self._tokens = tile_tokens(shape)
        self._score_bytes = _score_stride(max_model_len) * _FLOAT
        self._scratch_bytes = scratch_bytes(shape, max_model_len)
        self._head_bytes = block_size * self._width * self._size
        self._block_bytes = 2 * shape.num_kv_heads * block_size * self._width * self._size
        self._group_bytes = shape.group * self._width * self._size
        self._registers = 24 if code.isa.has("avx512f") else 6
        window = "" if shape.window is None else f"_window{shape.window}"
        cap = "" if shape.softcap is None else f"_cap{shape.softcap}"
        sizes = f"{shape.num_heads}_{shape.num_kv_heads}_{shape.head_size}_{self._width}_{block_size}_{max_model_len}"
        self._name = f"attention_{dtype}_{sizes}_{shape.scale}{window}{cap}"

    def add(self) -> str:
        return self._code.kernel(self._name, 6, self._item)

    def _item(
        self,
        emit: Emitter,
        item: Int,
        thread: Int,
        tiles: Int,
        q: Int,
        q_stride: Int,
        kv_layer: Int,
        out: Int,
        table: Int,
    ) -> None:
        shape = self._shape
        last = tiles * shape.num_kv_heads - 1
        tile = self._tile(emit, item, kv_layer, table)
        scratch = emit.load_int(table + 24) + thread * self._scratch_bytes
        work = _Work(
            tile=tile,
            coming=self._tile(emit, (item + emit.load_int(table + 32)).least(last), kv_layer, table),
            queries=scratch,
            scores=scratch + self._tokens * shape.group * self._width * _FLOAT,
            first=tile.first_seen // _ALIGNED * _ALIGNED,
            out=out + tile.head * self._group_bytes,
        )
        self._widen_queries(emit, work, q + tile.row * q_stride + tile.head * self._group_bytes, q_stride)
        self._score(emit, work)
        emit.loop(0, tile.tokens, 1, lambda token, _: self._finish_token(emit, work, token))

    def _tile(self, emit: Emitter, item: Int, kv_layer: Int, table: Int) -> _Tile:
        heads = self._shape.num_kv_heads
        record = emit.load_int(table) + item // heads * (8 * TILE_FIELDS)
        row, tokens, position, sequence = (emit.load_int(record + 8 * field) for field in range(TILE_FIELDS))
        head, first_seen = item % heads, self._first_seen(emit, position)
        return _Tile(
            row=row,
            tokens=tokens,
            position=position,
            head=head,
            first_seen=first_seen,
            low=first_seen // self._block,
            high=(position + tokens - 1) // self._block + 1,
            blocks=emit.load_int(table + 8) + sequence * emit.load_int(table + 16),
            keys=kv_layer + head * self._head_bytes,
            values=kv_layer + (head + heads) * self._head_bytes,
        )

    def _first_seen(self, emit: Emitter, position: Int) -> Int:
        """Return the first position that a token at `position` attends to."""
        window = self._shape.window
        return emit.integer(0) if window is None else (position - (window - 1)).most(0)

    def _widen_queries(self, emit: Emitter, work: _Work, q: Int, q_stride: Int) -> None:
        """Write queries times the scale as floats, by token, the heads of a KV head together.

        With a softcap, also divide by it: the scores are then the arguments of tanh.
        """
        shape = self._shape
        scale = shape.scale if shape.softcap is None else shape.scale / shape.softcap
        length = shape.group * self._width

        def token(index: Int, _: list[Vec]) -> None:
            source, into = q + index * q_stride, work.queries + index * (length * _FLOAT)

            def piece(offset: Int, _: list[Vec]) -> None:
                emit.store(
                    emit.load(source + offset * self._size, self._dtype) * scale, into + offset * _FLOAT, "float32"
                )

            emit.loop(0, length, LANES, piece)

        emit.loop(0, work.tile.tokens, 1, token)

    # ------------------------------------------------------------------ scores

    def _score(self, emit: Emitter, work: _Work) -> None:
        """Compute the scores of all rows of the tile with at least all keys that any of them attends to."""
        group, most, tokens = self._shape.group, self._tokens, work.tile.tokens

        def whole_tile(_: Int, __: list[Vec]) -> None:
            self._score_rows(emit, work, work.queries, work.scores, most * group)

        def token(index: Int, _: list[Vec]) -> None:
            queries = work.queries + index * (group * self._width * _FLOAT)
            self._score_rows(emit, work, queries, work.scores + index * (group * self._score_bytes), group)

        whole = tokens // most if most > 1 else emit.integer(0)  # 1 or 0
        if most > 1:
            emit.loop(0, whole, 1, whole_tile)
        emit.loop(whole * most, tokens, 1, token)

    def _score_rows(self, emit: Emitter, work: _Work, queries: Int, scores: Int, rows: int) -> None:
        """Compute scores of rows in parts that fit the registers, over all blocks, several at once for few rows."""
        most, low, high = self._registers // 2, work.tile.low, work.tile.high
        for start in range(0, rows, most):
            part = min(most, rows - start)
            at_once = max(1, min(4, most // part)) if self._block <= LANES else 1
            several = low + (high - low) // at_once * at_once
            part_queries, into = queries + start * self._width * _FLOAT, scores + start * self._score_bytes
            self._score_blocks(emit, work, part_queries, into, (part, at_once), low, several)
            if at_once > 1:
                self._score_blocks(emit, work, part_queries, into, (part, 1), several, high)

    def _score_blocks(
        self, emit: Emitter, work: _Work, queries: Int, scores: Int, size: tuple[int, int], begin: Int, end: Int
    ) -> None:
        """Compute scores of size[0] rows with size[1] blocks at once, blocks begin to end - 1.

        Prefetch the next keys.
        """
        rows, at_once = size
        tile, coming = work.tile, work.coming
        call = self._score_helper(rows, at_once)

        def run(block: Int, _: list[Vec]) -> None:
            ahead = [(block - tile.low + coming.low + which).least(coming.high - 1) for which in range(at_once)]
            next_keys = [self._of_block(emit, coming.blocks, coming.keys, each) for each in ahead]
            keys = [self._of_block(emit, tile.blocks, tile.keys, block + which) for which in range(at_once)]
            call(emit, queries, scores + (block * self._block - work.first) * _FLOAT, *keys, *next_keys)

        emit.loop(begin, end, at_once, run)

    def _of_block(self, emit: Emitter, blocks: Int, base: Int, block: Int) -> Int:
        return base + emit.load_int32(blocks + block * 4) * self._block_bytes

    def _score_helper(self, rows: int, blocks: int) -> Callable[..., None]:
        """Add a helper: scores of `rows` queries with all keys of some consecutive blocks of the sequence."""
        width, stride = self._width, self._block * self._size
        places = [(which, offset, count) for which in range(blocks) for offset, count in pieces(self._block)]

        def body(emit: Emitter, queries: Int, scores: Int, *addresses: Int) -> None:
            keys, next_keys = addresses[:blocks], addresses[blocks:]
            for chosen in _parts(places, max(1, self._registers // rows)):

                def column(index: Int, sums: list[Vec], chosen: Sequence[tuple[int, int, int]] = chosen) -> list[Vec]:
                    for which, offset, _ in chosen:
                        emit.prefetch(next_keys[which] + index * stride + offset * self._size, 1, level=2)
                    key = [
                        emit.load(keys[which] + index * stride + offset * self._size, self._dtype, count)
                        for which, offset, count in chosen
                    ]
                    query = [
                        emit.load_all(queries + index * _FLOAT + row * width * _FLOAT, "float32") for row in range(rows)
                    ]
                    products = [(query[row], each) for row in range(rows) for each in key]
                    return [q.times_plus(k, total) for (q, k), total in zip(products, sums, strict=True)]

                zeros = [emit.vec(0.0)] * (rows * len(chosen))
                sums = emit.loop(0, self._shape.head_size, 1, column, zeros)
                for row in range(rows):
                    for number, (which, offset, count) in enumerate(chosen):
                        place = scores + row * self._score_bytes + (which * self._block + offset) * _FLOAT
                        emit.store(sums[row * len(chosen) + number], place, "float32", count)

        return self._code.helper(f"{self._name}_scores_{rows}_{blocks}", 2 + 2 * blocks, body)

    # ------------------------------------------------------------------ weights and values

    def _finish_token(self, emit: Emitter, work: _Work, token: Int) -> None:
        """Turn a token's scores into weights and sum its values; prefetch the next values."""
        shape, group, tile, coming = self._shape, self._shape.group, work.tile, work.coming
        position = tile.position + token
        lowest = self._first_seen(emit, position)
        scores = work.scores + token * (group * self._score_bytes)
        out = work.out + (tile.row + token) * (shape.num_heads * self._width * self._size)
        heads = max(1, self._registers // (self._width // LANES))
        weigh = self._weigh_helper()
        inverses = work.queries + token * (group * self._width * _FLOAT)  # the queries are no longer needed

        def head(index: Int, _: list[Vec]) -> None:
            row = scores + index * self._score_bytes
            weigh(emit, row, lowest, position, work.first, inverses + index * (LANES * _FLOAT))

        emit.loop(0, group, 1, head)
        for start in range(0, group, heads):
            self._values_helper(min(heads, group - start))(
                emit,
                scores + start * self._score_bytes,
                tile.blocks,
                tile.values,
                lowest,
                position,
                work.first,
                inverses + start * LANES * _FLOAT,
                out + start * self._width * self._size,
                coming.blocks,
                coming.values,
                coming.low,
                coming.high,
            )

    def _weigh_helper(self) -> Callable[..., None]:
        """Add a helper: scores of a row to exp(score - maximum), 0 for masked keys, and 1 over their sum."""
        cap = self._shape.softcap

        def body(emit: Emitter, scores: Int, lowest: Int, position: Int, first: Int, inverse: Int) -> None:
            begin, end = lowest // LANES * LANES, position + 1

            def seen(at: Int) -> Any:
                place = emit.builder.add(emit.every(at), emit.lanes())
                above = emit.builder.icmp_signed(">=", place, emit.every(lowest))
                return emit.builder.and_(above, emit.builder.icmp_signed("<=", place, emit.every(position)))

            def find_highest(at: Int, highest: list[Vec]) -> list[Vec]:
                place = scores + (at - first) * _FLOAT
                score = emit.load(place, "float32")
                if cap is not None:
                    score = tanh(score) * cap
                    emit.store(score, place, "float32")
                # The maximum ignores NaN; its weight, and therefore the sum, is then NaN.
                return [where(emit, seen(at), score, emit.vec(float("-inf"))).larger(highest[0])]

            peak = emit.loop(begin, end, LANES, find_highest, [emit.vec(float("-inf"))])[0].highest()

            def weigh(at: Int, sums: list[Vec]) -> list[Vec]:
                place = scores + (at - first) * _FLOAT
                weight = where(emit, seen(at), exp(emit.load(place, "float32") - peak), emit.vec(0.0))
                emit.store(weight, place, "float32")
                return [sums[0] + weight]

            sums = emit.loop(begin, end, LANES, weigh, [emit.vec(0.0)])
            emit.store(emit.vec(1.0) / sums[0].total(), inverse, "float32")

        return self._code.helper(f"{self._name}_weigh", 5, body)

    def _values_helper(self, rows: int) -> Callable[..., None]:
        """Add a helper: the weighted sum of values, for `rows` heads of one token."""
        columns, width, size = self._width // LANES, self._width, self._size
        at_once = min(columns, max(1, self._registers // rows))

        def body(
            emit: Emitter,
            weights: Int,
            blocks: Int,
            values: Int,
            lowest: Int,
            position: Int,
            first: Int,
            inverses: Int,
            out: Int,
            coming_blocks: Int,
            coming_values: Int,
            coming_low: Int,
            coming_high: Int,
        ) -> None:
            for start in range(0, columns, at_once):
                part = range(start, min(columns, start + at_once))

                def block(index: Int, sums: list[Vec], part: range = part) -> list[Vec]:
                    rows_of = self._of_block(emit, blocks, values, index)
                    begin = index * self._block
                    ahead = (index - lowest // self._block + coming_low).least(coming_high - 1)
                    next_rows = self._of_block(emit, coming_blocks, coming_values, ahead)

                    def key(at: Int, sums: list[Vec]) -> list[Vec]:
                        row_bytes = width * size
                        emit.prefetch(next_rows + (at - begin) * row_bytes, row_bytes, level=2)
                        value = [
                            emit.load(rows_of + (at - begin) * (width * size) + column * LANES * size, self._dtype)
                            for column in part
                        ]
                        place = weights + (at - first) * _FLOAT
                        weight = [emit.load_all(place + row * self._score_bytes, "float32") for row in range(rows)]
                        products = [(weight[row], each) for row in range(rows) for each in value]
                        return [w.times_plus(v, total) for (w, v), total in zip(products, sums, strict=True)]

                    return emit.loop(begin.most(lowest), (begin + self._block).least(position + 1), 1, key, sums)

                zeros = [emit.vec(0.0)] * (rows * len(part))
                sums = emit.loop(lowest // self._block, position // self._block + 1, 1, block, zeros)
                for row in range(rows):
                    inverse = emit.load(inverses + row * LANES * _FLOAT, "float32")
                    for number, column in enumerate(part):
                        place = out + row * width * size + column * LANES * size
                        emit.store(sums[row * len(part) + number] * inverse, place, self._dtype)

        return self._code.helper(f"{self._name}_values_{rows}", 12, body)


def _parts(places: Sequence[tuple[int, int, int]], most: int) -> list[Sequence[tuple[int, int, int]]]:
    return [places[start : start + most] for start in range(0, len(places), most)]
