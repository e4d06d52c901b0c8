"""Paged attention on the CPU for prefill chunks and decodes in one batch, directly from the cache's blocks.

A row (one token, one head) passes over its keys three times: for scores, for exact maximum and exponentials, for
weighted values. Every number is one chain of operations in the order of absolute positions, so a row's bits depend only
on its own query and its sequence's cache, not on batch, chunk, block size or thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from executor_svc.cpu.kernels.attention_plan import TILE_FIELDS, tile_tokens
from executor_svc.cpu.kernels.attention_work import QueryTile, Work, of_block
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.cpu.kernels.codegen.softmax import softmax_row
from executor_svc.device.kernels import AttentionShape

_FLOAT = 4
_AHEAD = 64
"""Positions from a key or value to the one that is prefetched meanwhile."""
_ALIGNED = 64
"""Stored scores begin at a multiple of this position: a multiple of every block size, and of LANES."""


def scratch_bytes(shape: AttentionShape, max_model_len: int) -> int:
    """Return the bytes of scratch memory of one thread: queries, scores, sums and inverses of an item's rows."""
    return _scratch_rows(shape) * _FLOAT * (2 * shape.padded_head_size + LANES + _score_stride(max_model_len))


def _scratch_rows(shape: AttentionShape) -> int:
    """Return the most rows at once: a tile's rows for one KV head, or one token's rows for all KV heads."""
    return max(tile_tokens(shape) * shape.group, shape.num_heads)


def _score_stride(max_model_len: int) -> int:
    return -(-max_model_len // _ALIGNED) * _ALIGNED + _ALIGNED


def attention(
    code: Code,
    dtypes: tuple[Dtype, Dtype],
    shape: AttentionShape,
    block_size: int,
    max_model_len: int,
    sinks: bool = False,
) -> str:
    """Add the kernel; returns its name. dtypes: of q and out, and of the cache.

    Items: one per query tile and some KV heads. Arguments: items, q [T, H, DP], the stride of its tokens in bytes,
    kv_layer, bytes from one of its blocks to the next and from a block's keys to its values, out [T, H * DP], the
    table of `CpuAttentionPlan`, and sinks [H] float32, read only if sinks.
    """
    return _AttentionKernel(code, dtypes, shape, block_size, max_model_len, sinks).add()


class _AttentionKernel:
    def __init__(
        self,
        code: Code,
        dtypes: tuple[Dtype, Dtype],
        shape: AttentionShape,
        block_size: int,
        max_model_len: int,
        sinks: bool,
    ) -> None:
        self._code, self._shape, self._block, self._sinks = code, shape, block_size, sinks
        self._dtype, self._kv_dtype = dtypes
        self._size, self._kv_size = (ITEM_BYTES[each] for each in dtypes)
        self._width = shape.padded_head_size
        self._tokens = tile_tokens(shape)
        self._score_bytes = _score_stride(max_model_len) * _FLOAT
        self._scratch_bytes = scratch_bytes(shape, max_model_len)
        self._head_bytes = block_size * self._width * self._kv_size
        self._group_bytes = shape.group * self._width * self._size
        self._registers = 24 if code.isa.has("avx512f") else 6
        assert shape.window is None or shape.chunk is None, "a window and chunks"
        window = "" if shape.window is None else f"_window{shape.window}"
        window += "" if shape.chunk is None else f"_chunk{shape.chunk}"
        cap = "" if shape.softcap is None else f"_cap{shape.softcap}"
        sizes = f"{shape.num_heads}_{shape.num_kv_heads}_{shape.head_size}_{self._width}_{block_size}_{max_model_len}"
        named = "_".join(dict.fromkeys(dtypes))
        self._name = f"attention_{named}_{sizes}_{shape.scale}{window}{cap}{'_sinks' if sinks else ''}"

    def add(self) -> str:
        return self._code.kernel(self._name, 9, self._item)

    def _item(
        self,
        emit: Emitter,
        item: Int,
        thread: Int,
        items: Int,
        q: Int,
        q_stride: Int,
        kv_layer: Int,
        stride: Int,
        values: Int,
        out: Int,
        table: Int,
        sinks: Int,
    ) -> None:
        row_bytes, rows = self._width * _FLOAT, _scratch_rows(self._shape)
        cache = kv_layer, stride, values
        tile = self._tile(emit, item, cache, table)
        queries = emit.load_int(table + 24) + thread * self._scratch_bytes
        sums = queries + rows * row_bytes
        inverses = sums + rows * row_bytes
        work = Work(
            tile=tile,
            coming=self._tile(emit, (item + emit.load_int(table + 32)).least(items - 1), cache, table),
            first=tile.first_seen // _ALIGNED * _ALIGNED,
            queries=queries,
            scores=inverses + rows * (LANES * _FLOAT),
            sums=sums,
            inverses=inverses,
            sinks=sinks,
        )

        def head(index: Int, _: list[Vec]) -> None:
            self._attend(emit, replace(work, tile=tile.of_head(index, self._head_bytes)), q, q_stride, out)

        # One token: all heads of a block together, since they are side by side in memory, which is read faster in
        # order. More tokens: head by head, since the rows of a head share each loaded key.
        one = tile.tokens.equals(1)
        emit.when(one, lambda: self._attend(emit, work, q, q_stride, out))
        emit.loop(0, emit.integer(0).where(one, tile.heads), 1, head)

    def _attend(self, emit: Emitter, work: Work, q: Int, q_stride: Int, out: Int) -> None:
        """Compute all rows of a tile: of one token, or of one KV head."""
        tile, group = work.tile, self._group_bytes
        self._widen_queries(emit, work, q + tile.row * q_stride + tile.head * group, q_stride)
        self._score(emit, work)
        emit.loop(0, tile.tokens, 1, lambda token, _: self._finish_token(emit, work, token, out + tile.head * group))

    def _tile(self, emit: Emitter, item: Int, cache: tuple[Int, Int, Int], table: Int) -> QueryTile:
        kv_layer, stride, values = cache
        all_heads, heads = self._shape.num_kv_heads, emit.load_int(table + 40)
        items = emit.integer(all_heads) // heads  # of a query tile
        record = emit.load_int(table) + item // items * (8 * TILE_FIELDS)
        row, tokens, position, sequence = (emit.load_int(record + 8 * field) for field in range(TILE_FIELDS))
        head, first_seen = item % items * heads, self._first_seen(emit, position)
        return QueryTile(
            row=row,
            tokens=tokens,
            position=position,
            head=head,
            heads=heads,
            first_seen=first_seen,
            low=first_seen // self._block,
            high=(position + tokens - 1) // self._block + 1,
            blocks=emit.load_int(table + 8) + sequence * emit.load_int(table + 16),
            stride=stride,
            keys=kv_layer + head * self._head_bytes,
            values=kv_layer + values + head * self._head_bytes,
        )

    def _first_seen(self, emit: Emitter, position: Int) -> Int:
        """Return the first position that a token at `position` attends to."""
        window, chunk = self._shape.window, self._shape.chunk
        if chunk is not None:
            return position // chunk * chunk
        return emit.integer(0) if window is None else (position - (window - 1)).most(0)

    def _widen_queries(self, emit: Emitter, work: Work, q: Int, q_stride: Int) -> None:
        """Write queries times the scale as floats, by token, the heads of a KV head together.

        With a softcap, also divide by it: the scores are then the arguments of tanh.
        """
        shape = self._shape
        scale = shape.scale if shape.softcap is None else shape.scale / shape.softcap
        length = work.tile.heads * (shape.group * self._width)

        def token(index: Int, _: list[Vec]) -> None:
            source, into = q + index * q_stride, work.queries + index * length * _FLOAT

            def piece(offset: Int, _: list[Vec]) -> None:
                emit.store(
                    emit.load(source + offset * self._size, self._dtype) * scale, into + offset * _FLOAT, "float32"
                )

            emit.loop(0, length, LANES, piece)

        emit.loop(0, work.tile.tokens, 1, token)

    # ------------------------------------------------------------------ scores

    def _score(self, emit: Emitter, work: Work) -> None:
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

    def _score_rows(self, emit: Emitter, work: Work, queries: Int, scores: Int, rows: int) -> None:
        """Compute scores of rows of each head in parts that fit the registers; several blocks at once for few rows."""
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
        self, emit: Emitter, work: Work, queries: Int, scores: Int, size: tuple[int, int], begin: Int, end: Int
    ) -> None:
        """Compute scores of size[0] rows with size[1] blocks at once, blocks begin to end - 1.

        Prefetch the next keys, then the first values.
        """
        rows, at_once = size
        tile, head_bytes = work.tile, self._head_bytes
        call = self._score_helper(rows, at_once)
        query_bytes, score_bytes = (self._shape.group * each for each in (self._width * _FLOAT, self._score_bytes))

        def run(block: Int, _: list[Vec]) -> None:
            following = [
                self._following(emit, block + which, (tile, tile.keys), (tile, tile.values)) for which in range(at_once)
            ]
            keys = [of_block(emit, tile.stride, tile.blocks, tile.keys, block + which) for which in range(at_once)]
            into = scores + (block * self._block - work.first) * _FLOAT

            def head(index: Int, _: list[Vec]) -> None:
                addresses = [each + index * head_bytes for each in (*keys, *following)]
                call(emit, queries + index * query_bytes, into + index * score_bytes, *addresses)

            emit.loop(0, tile.heads, 1, head)

        emit.loop(begin, end, at_once, run)

    def _following(self, emit: Emitter, block: Int, now: tuple[QueryTile, Int], then: tuple[QueryTile, Int]) -> Int:
        """Return the address of what to prefetch at a block: some blocks ahead of it, or at the start of `then`.

        now, then: a tile, and the address of its keys or values in block 0.
        """
        (tile, base), (next_tile, next_base) = now, then
        ahead = block + max(1, _AHEAD // self._block)
        inside = ahead.less(tile.high)
        after = (next_tile.low + (ahead - tile.high)).least(next_tile.high - 1)
        blocks, start = tile.blocks.where(inside, next_tile.blocks), base.where(inside, next_base)
        return of_block(emit, tile.stride, blocks, start, ahead.where(inside, after))

    def _score_helper(self, rows: int, blocks: int) -> Callable[..., None]:
        """Add a helper: scores of `rows` queries with all keys of some consecutive blocks of the sequence."""
        width, stride = self._width, self._block * self._kv_size
        places = [(which, offset, count) for which in range(blocks) for offset, count in pieces(self._block)]

        def body(emit: Emitter, queries: Int, scores: Int, *addresses: Int) -> None:
            keys, next_keys = addresses[:blocks], addresses[blocks:]
            for chosen in _parts(places, max(1, self._registers // rows)):

                def column(index: Int, sums: list[Vec], chosen: Sequence[tuple[int, int, int]] = chosen) -> list[Vec]:
                    for which, offset, _ in chosen:
                        emit.prefetch(next_keys[which] + index * stride + offset * self._kv_size, 1, level=2)
                    key = [
                        emit.load(keys[which] + index * stride + offset * self._kv_size, self._kv_dtype, count)
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

    def _finish_token(self, emit: Emitter, work: Work, token: Int, out: Int) -> None:
        """Turn a token's scores into weights and sum its values; prefetch the next values, then the next tile's keys.

        out: address of the first head of the first row.
        """
        shape, group, tile, coming = self._shape, self._shape.group, work.tile, work.coming
        position = tile.position + token
        lowest, rows = self._first_seen(emit, position), tile.heads * group
        scores = work.scores + token * (group * self._score_bytes)
        into = out + (tile.row + token) * (shape.num_heads * self._width * self._size)
        row_bytes = self._width * _FLOAT
        at_once = max(1, self._registers // (self._width // LANES))
        parts = [(start, self._values_helper(min(at_once, group - start))) for start in range(0, group, at_once)]
        weigh = self._weigh_helper()

        def block(index: Int, _: list[Vec]) -> None:
            values = of_block(emit, tile.stride, tile.blocks, tile.values, index)
            following = self._following(emit, index, (tile, tile.values), (coming, coming.keys))
            begin = index * self._block
            first, last = begin.most(lowest), (begin + self._block).least(position + 1)
            weights = scores + (begin - work.first) * _FLOAT

            def head(which: Int, _: list[Vec]) -> None:
                at = which * self._head_bytes
                for start, add in parts:
                    row = which * group + start
                    places = (weights + row * self._score_bytes, values + at, work.sums + row * row_bytes)
                    add(emit, *places, first - begin, last - begin, following + at)

            emit.loop(0, tile.heads, 1, head)

        def begin_row(row: Int, _: list[Vec]) -> None:
            inverse = work.inverses + row * (LANES * _FLOAT)
            sink = [work.sinks + (tile.head * group + row) * _FLOAT] if self._sinks else []
            weigh(emit, scores + row * self._score_bytes, lowest, position, work.first, inverse, *sink)
            for offset in range(0, self._width, LANES):
                emit.store(emit.vec(0.0), work.sums + row * row_bytes + offset * _FLOAT, "float32")

        def end_row(row: Int, _: list[Vec]) -> None:
            inverse = emit.load(work.inverses + row * (LANES * _FLOAT), "float32")
            totals = [
                emit.load(work.sums + row * row_bytes + offset * _FLOAT, "float32") * inverse
                for offset in range(0, self._width, LANES)
            ]
            emit.store_row(totals, into + row * (self._width * self._size), self._dtype, self._kv_dtype)

        emit.loop(0, rows, 1, begin_row)
        emit.loop(lowest // self._block, position // self._block + 1, 1, block)
        emit.loop(0, rows, 1, end_row)

    def _weigh_helper(self) -> Callable[..., None]:
        """Add a helper: `softmax_row`."""

        def body(emit: Emitter, *arguments: Int) -> None:
            softmax_row(emit, *arguments, cap=self._shape.softcap)

        return self._code.helper(f"{self._name}_weigh", 6 if self._sinks else 5, body)

    def _values_helper(self, rows: int) -> Callable[..., None]:
        """Add a helper: add the weighted values of places begin to end - 1 of a block to the sums of `rows` heads."""
        columns, width, size = self._width // LANES, self._width, self._kv_size
        at_once = min(columns, max(1, self._registers // rows))  # all columns, or an even number, as load_row needs

        def body(emit: Emitter, weights: Int, values: Int, sums: Int, begin: Int, end: Int, following: Int) -> None:
            for start in range(0, columns, at_once):
                part = range(start, min(columns, start + at_once))
                places = [sums + (row * width + column * LANES) * _FLOAT for row in range(rows) for column in part]

                def key(at: Int, totals: list[Vec], part: range = part) -> list[Vec]:
                    row_bytes = width * size
                    if part.start == 0:
                        emit.prefetch(following + at * row_bytes, row_bytes, level=2)
                    value = emit.load_row(
                        values + at * row_bytes + part.start * LANES * size, self._kv_dtype, len(part)
                    )
                    place = weights + at * _FLOAT
                    weight = [emit.load_all(place + row * self._score_bytes, "float32") for row in range(rows)]
                    products = [(weight[row], each) for row in range(rows) for each in value]
                    return [w.times_plus(v, total) for (w, v), total in zip(products, totals, strict=True)]

                totals = emit.loop(begin, end, 1, key, [emit.load(place, "float32") for place in places])
                for total, place in zip(totals, places, strict=True):
                    emit.store(total, place, "float32")

        return self._code.helper(f"{self._name}_values_{rows}", 6, body)


def _parts(places: Sequence[tuple[int, int, int]], most: int) -> list[Sequence[tuple[int, int, int]]]:
    return [places[start : start + most] for start in range(0, len(places), most)]
