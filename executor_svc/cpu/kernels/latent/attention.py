"""Attention among latents on the CPU: one row of the cache is the key and the value of all heads.

A row of queries (one token, one head) passes over its keys in pieces of 64 positions, with a running maximum (Milakov
and Gimelshein, 2018, arXiv 1805.02867): so rows of the cache are read from memory once, and their values come from the
processor's cache. Pieces begin at absolute positions, and every number is one chain of operations in their order: a
row's bits depend only on its own query and its sequence's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from executor_svc.cpu.kernels.attention_plan import TILE_FIELDS, latent_heads, tile_tokens
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.cpu.kernels.codegen.functions import exp, where
from executor_svc.device.kernels import AttentionShape
from executor_svc.device.latent import padded_latent

_FLOAT = 4
_VECTOR = LANES * _FLOAT
_PIECE = 64
"""Positions of a piece: a multiple of every block size, and of LANES."""
_PAIR = 2 * LANES
_I32 = ir.IntType(32)


def scratch_bytes(shape: AttentionShape) -> int:
    """Return the bytes of scratch memory of one thread."""
    return _scratch_rows(shape) * _row_bytes(shape)


def _scratch_rows(shape: AttentionShape) -> int:
    return tile_tokens(shape) * latent_heads(shape)


def _row_bytes(shape: AttentionShape) -> int:
    """Return the bytes of a row's query, sums of values, scores, and maximum, factor and sum of weights."""
    assert shape.latent is not None
    return (shape.padded_head_size + padded_latent(shape.latent) + _PIECE + 3 * LANES) * _FLOAT


def latent_attention(code: Code, dtypes: tuple[Dtype, Dtype], shape: AttentionShape, block_size: int) -> str:
    """Add the kernel; returns its name. dtypes: of queries and out, and of the cache.

    Items: one for each query tile and some heads. Arguments: items, absorbed queries [H * T, LP] by head, the rotated
    columns of queries of head 0, the bytes from one token of these to the next and from one head, kv_layer, the bytes
    from one of its blocks to the next, out [H * T, LP] by head, the table of `CpuAttentionPlan`.
    """
    return _LatentKernel(code, dtypes, shape, block_size).add()


@dataclass(frozen=True, slots=True)
class _Tile:
    """What an item works on, as addresses and numbers in the code that is made."""

    row: Int
    tokens: Int
    position: Int
    head: Int
    heads: Int
    blocks: Int
    """Address of the sequence's block table."""
    num_tokens: Int
    """Of the step."""
    stride: Int
    keys: Int
    """Address of the first row of block 0."""
    queries: Int
    sums: Int
    scores: Int
    peaks: Int
    factors: Int
    weights: Int
    """Addresses of memory for all rows, by token, the heads of a token together."""


class _LatentKernel:
    def __init__(self, code: Code, dtypes: tuple[Dtype, Dtype], shape: AttentionShape, block_size: int) -> None:
        assert shape.latent is not None
        self._code, self._shape, self._block, self._width = code, shape, block_size, shape.padded_head_size
        self._dtype, self._kv_dtype = dtypes
        self._size, self._kv_size = (ITEM_BYTES[each] for each in dtypes)
        self._latent, self._rope = padded_latent(shape.latent), shape.head_size - shape.latent
        self._row_bytes = self._width * self._kv_size
        wide = code.isa.has("avx512f")
        self._rows = 4 if wide else 2
        """Rows whose sums are in registers together."""
        self._keys = min(4 if wide else 2, block_size)
        self._vectors = 4 if wide else 2
        sizes = f"{shape.num_heads}_{shape.latent}_{self._rope}_{block_size}_{shape.scale}"
        self._name = f"latent_attention_{'_'.join(dict.fromkeys(dtypes))}_{sizes}"

    def add(self) -> str:
        return self._code.kernel(self._name, 9, self._item)

    def _item(
        self, emit: Emitter, item: Int, thread: Int, _: Int, absorbed: Int, rotated: Int, token_stride: Int,
        head_stride: Int, kv_layer: Int, stride: Int, out: Int, table: Int,
    ) -> None:  # fmt: skip
        tile = self._tile(emit, item, thread, kv_layer, stride, table)
        queries = absorbed, rotated + tile.row * token_stride + tile.head * head_stride, token_stride, head_stride
        emit.loop(0, tile.tokens, 1, lambda token, _: self._begin(emit, tile, token, queries))
        end = tile.position + tile.tokens

        def piece(start: Int, _: list[Vec]) -> None:
            first = start // self._block
            last = ((end - 1) // self._block + 1).least(first + _PIECE // self._block)
            self._score(emit, tile, first, last)
            later = (start - tile.position).most(0)  # tokens before this piece see none of it
            emit.loop(later, tile.tokens, 1, lambda token, _: self._add_piece(emit, tile, token, start))

        emit.loop(0, end, _PIECE, piece)
        emit.loop(0, tile.tokens, 1, lambda token, _: self._end(emit, tile, token, out))

    def _tile(self, emit: Emitter, item: Int, thread: Int, kv_layer: Int, stride: Int, table: Int) -> _Tile:
        heads = emit.load_int(table + 40)
        items = emit.integer(self._shape.num_heads) // heads  # of a query tile
        record = emit.load_int(table) + item // items * (8 * TILE_FIELDS)
        row, tokens, position, sequence = (emit.load_int(record + 8 * field) for field in range(TILE_FIELDS))
        sizes = (self._width * _FLOAT, self._latent * _FLOAT, _PIECE * _FLOAT, _VECTOR, _VECTOR)
        places = [emit.load_int(table + 24) + thread * scratch_bytes(self._shape)]
        for each in sizes:
            places.append(places[-1] + each * _scratch_rows(self._shape))
        return _Tile(
            row, tokens, position, item % items * heads, heads,
            emit.load_int(table + 8) + sequence * emit.load_int(table + 16),
            emit.load_int(table + 48), stride, kv_layer, *places,
        )  # fmt: skip

    def _begin(self, emit: Emitter, tile: _Tile, token: Int, queries: tuple[Int, Int, Int, Int]) -> None:
        """Write a token's queries times the scale as floats, in the order of `load_row`, and empty sums."""
        absorbed, rotated, token_stride, head_stride = queries
        scale, size = self._shape.scale, self._size

        def head(index: Int, _: list[Vec]) -> None:
            row = token * tile.heads + index
            into = tile.queries + row * (self._width * _FLOAT)
            source = absorbed + ((tile.head + index) * tile.num_tokens + tile.row + token) * (self._latent * size)

            def some(at: Int, vectors: int) -> None:
                for which, each in enumerate(emit.load_row(source + at * size, self._dtype, vectors, self._kv_dtype)):
                    emit.store(each * scale, into + (at + which * LANES) * _FLOAT, "float32")

            self._each_pair(emit, self._latent, some)
            key = rotated + token * token_stride + index * head_stride
            for offset, count in pieces(self._width - self._latent):
                here = max(0, min(count, self._rope - offset))
                number = emit.load(key + offset * size, self._dtype, here) * scale if here else emit.vec(0.0)
                emit.store(number, into + (self._latent + offset) * _FLOAT, "float32")
            sums = tile.sums + row * (self._latent * _FLOAT)
            emit.loop(0, self._latent, LANES, lambda at, _: emit.store(emit.vec(0.0), sums + at * _FLOAT, "float32"))
            emit.store(emit.vec(float("-inf")), tile.peaks + row * _VECTOR, "float32")
            emit.store(emit.vec(0.0), tile.weights + row * _VECTOR, "float32")

        emit.loop(0, tile.heads, 1, head)

    def _each_pair(self, emit: Emitter, length: int, body: Callable[[Int, int], None]) -> None:
        """Call body(offset, vectors) for pairs of vectors that cover `length` numbers, and perhaps one more."""
        whole = length // _PAIR * _PAIR
        emit.loop(0, whole, _PAIR, lambda at, _: body(at, 2))
        if whole < length:
            body(emit.integer(whole), 1)

    # ------------------------------------------------------------------ scores

    def _score(self, emit: Emitter, tile: _Tile, first: Int, last: Int) -> None:
        """Compute the scores of all rows with the keys of blocks first to last - 1, which begin a piece."""
        rows, most = tile.tokens * tile.heads, self._rows
        several, single = self._score_helper(most), self._score_helper(1)
        whole = rows // most * most

        def block(index: Int, _: list[Vec]) -> None:
            keys = tile.keys + emit.load_int32(tile.blocks + index * 4) * tile.stride
            into = tile.scores + (index - first) * (self._block * _FLOAT)

            def some(call: Callable[..., None]) -> Callable[[Int, list[Vec]], None]:
                def run(row: Int, _: list[Vec]) -> None:
                    call(emit, tile.queries + row * (self._width * _FLOAT), keys, into + row * (_PIECE * _FLOAT))

                return run

            emit.loop(0, whole, most, some(several))
            emit.loop(whole, rows, 1, some(single))

        emit.loop(first, last, 1, block)

    def _score_helper(self, rows: int) -> Callable[..., None]:
        """Add a helper: scores of `rows` queries with all keys of a block."""

        def body(emit: Emitter, queries: Int, keys: Int, scores: Int) -> None:
            def some(start: Int, _: list[Vec]) -> None:
                places = [keys + (start + which) * self._row_bytes for which in range(self._keys)]
                sums = self._dots(emit, queries, places, rows)
                for row in range(rows):
                    totals = sums[row * self._keys : (row + 1) * self._keys]
                    _store_totals(emit, totals, scores + row * (_PIECE * _FLOAT) + start * _FLOAT)

            emit.loop(0, self._block, self._keys, some)

        return self._code.helper(f"{self._name}_scores_{rows}", 3, body)

    def _dots(self, emit: Emitter, queries: Int, keys: Sequence[Int], rows: int) -> list[Vec]:
        """Return for each row and key a vector whose sum is their product."""

        def add(loaded: Sequence[Sequence[Vec]], at: Int, sums: list[Vec]) -> list[Vec]:
            for which in range(len(loaded[0])):
                place = queries + (at + which * LANES) * _FLOAT
                query = [emit.load(place + row * (self._width * _FLOAT), "float32") for row in range(rows)]
                products = [(each, key[which]) for each in query for key in loaded]
                sums = [q.times_plus(k, total) for (q, k), total in zip(products, sums, strict=True)]
            return sums

        def some(vectors: int) -> Callable[[Int, list[Vec]], list[Vec]]:
            def run(at: Int, sums: list[Vec]) -> list[Vec]:
                return add([emit.load_row(key + at * self._kv_size, self._kv_dtype, vectors) for key in keys], at, sums)

            return run

        whole = self._latent // _PAIR * _PAIR
        sums = emit.loop(0, whole, _PAIR, some(2), [emit.vec(0.0)] * (rows * len(keys)))
        return emit.loop(whole, self._width, LANES, some(1), sums)

    # ------------------------------------------------------------------ weights and values

    def _add_piece(self, emit: Emitter, tile: _Tile, token: Int, start: Int) -> None:
        """Turn a token's scores of a piece into weights, and add its weighted values to the sums."""
        count = (tile.position + token + 1 - start).least(_PIECE)
        weigh, first = self._weigh_helper(), token * tile.heads
        whole = tile.heads // self._rows * self._rows

        def each(row: Int, _: list[Vec]) -> None:
            at = first + row
            weigh(
                emit, tile.scores + at * (_PIECE * _FLOAT), count,
                *(place + at * _VECTOR for place in (tile.peaks, tile.factors, tile.weights)),
            )  # fmt: skip

        emit.loop(0, tile.heads, 1, each)
        blocks = tile.blocks + start // self._block * 4

        def some(rows: int) -> Callable[[Int, list[Vec]], None]:
            def run(row: Int, _: list[Vec]) -> None:
                at = first + row
                places = tile.scores + at * (_PIECE * _FLOAT), tile.factors + at * _VECTOR
                sums = tile.sums + at * (self._latent * _FLOAT)
                self._add_values(emit, rows, (*places, sums, blocks, tile.keys, tile.stride, count))

            return run

        emit.loop(0, whole, self._rows, some(self._rows))
        emit.loop(whole, tile.heads, 1, some(1))

    def _weigh_helper(self) -> Callable[..., None]:
        """Add a helper: weights of a row's first `count` scores of a piece; others are not read later."""

        def body(emit: Emitter, scores: Int, count: Int, peak: Int, factor: Int, total: Int) -> None:
            before, below = emit.load(peak, "float32"), emit.vec(float("-inf"))
            places = range(0, _PIECE, LANES)
            seen = [emit.first(count - place) for place in places]
            found = [emit.load(scores + place * _FLOAT, "float32") for place in places]
            highest = below
            for condition, score in zip(seen, found, strict=True):  # NaN is not above; its weight is then NaN
                highest = where(emit, condition, score, below).larger(highest)
            highest = highest.highest().larger(before)
            shrink = exp(before - highest)
            sums = emit.load(total, "float32") * shrink
            for place, condition, score in zip(places, seen, found, strict=True):
                weight = where(emit, condition, exp(score - highest), emit.vec(0.0))
                emit.store(weight, scores + place * _FLOAT, "float32")
                sums = sums + weight
            for vector, address in ((highest, peak), (shrink, factor), (sums, total)):
                emit.store(vector, address, "float32")

        return self._code.helper(f"{self._name}_weigh", 5, body)

    def _add_values(self, emit: Emitter, rows: int, places: tuple[Int, ...]) -> None:
        """Emit the products with all columns of values, some vectors at a time."""
        weights, factors, sums, blocks, keys, stride, count = places
        vectors = self._latent // LANES
        step, rest = self._vectors, vectors % self._vectors

        def some(at: Int, number: int) -> None:
            column = keys + at * self._kv_size
            given = weights, factors, sums + at * _FLOAT, blocks, column, stride, count
            self._values_helper(rows, number)(emit, *given)

        emit.loop(0, (vectors - rest) * LANES, step * LANES, lambda at, _: some(at, step))
        for first in range(vectors - rest, vectors, 2):  # in pairs, as `load_row` has them
            some(emit.integer(first * LANES), min(2, vectors - first))

    def _values_helper(self, rows: int, vectors: int) -> Callable[..., None]:
        """Add a helper: shrink the sums of `rows` rows, and add weighted values of the first `count` keys."""
        block, row_bytes = self._block, self._row_bytes

        def body(
            emit: Emitter, weights: Int, factors: Int, sums: Int, blocks: Int, keys: Int, stride: Int, count: Int
        ) -> None:
            places = [
                sums + (row * self._latent + which * LANES) * _FLOAT for row in range(rows) for which in range(vectors)
            ]
            shrink = [emit.load(factors + row * _VECTOR, "float32") for row in range(rows)]
            totals = [emit.load(place, "float32") * shrink[at // vectors] for at, place in enumerate(places)]

            def of_block(index: Int, totals: list[Vec]) -> list[Vec]:
                values = keys + emit.load_int32(blocks + index * 4) * stride
                first = index * block

                def key(at: Int, totals: list[Vec]) -> list[Vec]:
                    value = emit.load_row(values + at * row_bytes, self._kv_dtype, vectors)
                    place = weights + (first + at) * _FLOAT
                    found = iter(totals)
                    added: list[Vec] = []
                    for row in range(rows):
                        weight = emit.load_all(place + row * (_PIECE * _FLOAT), "float32")
                        added += [weight.times_plus(each, next(found)) for each in value]
                    return added

                return emit.loop(0, (count - first).least(block), 1, key, totals)

            totals = emit.loop(0, (count + (block - 1)) // block, 1, of_block, totals)
            for total, place in zip(totals, places, strict=True):
                emit.store(total, place, "float32")

        return self._code.helper(f"{self._name}_values_{rows}_{vectors}", 7, body)

    def _end(self, emit: Emitter, tile: _Tile, token: Int, out: Int) -> None:
        """Divide a token's sums by those of its weights, and write them, rounded."""

        def head(index: Int, _: list[Vec]) -> None:
            row = token * tile.heads + index
            inverse = emit.vec(1.0) / emit.load(tile.weights + row * _VECTOR, "float32").total()
            place = (tile.head + index) * tile.num_tokens + tile.row + token
            into, sums = out + place * (self._latent * self._size), tile.sums + row * (self._latent * _FLOAT)

            def some(at: Int, vectors: int) -> None:
                found = [
                    emit.load(sums + (at + which * LANES) * _FLOAT, "float32") * inverse for which in range(vectors)
                ]
                emit.store_row(found, into + at * self._size, self._dtype, self._kv_dtype)

            self._each_pair(emit, self._latent, some)

        emit.loop(0, tile.heads, 1, head)


def _store_totals(emit: Emitter, vectors: Sequence[Vec], address: Int) -> None:
    """Write the sum of each vector's lanes, in the order of `Vec.total`: two vectors share each addition."""
    found, distance, builder = list(vectors), LANES // 2, emit.builder
    lanes = [0] * len(found)
    while distance:
        if len(found) > 1:
            low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
            high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
            pairs = list(zip(found[::2], found[1::2], strict=True))
            group = len(lanes) // len(pairs)
            lanes = [lane + (distance if at % group >= group // 2 else 0) for at, lane in enumerate(lanes)]
        else:
            low, high = list(range(LANES)), [lane ^ distance for lane in range(LANES)]
            pairs = [(found[0], found[0])]
        found = [Vec(emit, _shuffled(emit, pair, low)) + Vec(emit, _shuffled(emit, pair, high)) for pair in pairs]
        distance //= 2
    for which, lane in enumerate(lanes):
        number = builder.extract_element(found[0].value, ir.Constant(_I32, lane))
        builder.store(number, emit.pointer(address + which * _FLOAT, ir.FloatType()))


def _shuffled(emit: Emitter, pair: tuple[Vec, Vec], lanes: Sequence[int]) -> ir.Value:
    kind = ir.VectorType(_I32, LANES)
    return emit.builder.shuffle_vector(pair[0].value, pair[1].value, ir.Constant(kind, list(lanes)))
