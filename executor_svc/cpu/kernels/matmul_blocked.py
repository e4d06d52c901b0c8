"""The matrix product of many rows on levels without a dot product of bfloat16 pairs, and of floats on every level.

A block of a panel of the weight is widened to floats once, into a thread's scratch memory, which stays in its L1 cache;
all rows run over it, tile by tile. An element's sum is kept in memory between blocks, so it stays one chain of fused
operations over the inner dimension, ascending, for every number of rows. Tiles have as many sums as registers hold
beside weights and a factor (Goto, van de Geijn, Anatomy of high-performance matrix multiplication, TOMS 2008).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.panels import PANEL, ROWS_AT_ONCE, inner_step, load_weights, widened_weights

_FLOAT = ITEM_BYTES["float32"]
_VECTOR_BYTES = LANES * _FLOAT
_HALVES = PANEL // LANES
_UNROLL = 4


@dataclass(frozen=True, slots=True)
class Blocking:
    """Sizes for a level's registers and first cache."""

    max_rows: int
    """Rows of the largest tile."""
    vectors: int
    """Vectors of LANES columns of a tile."""
    inner: int
    """Numbers of the inner dimension in a block."""
    few_rows: int
    """Up to so many rows the weight is widened in registers: reading it takes longer."""

    @property
    def sum_bytes(self) -> int:
        """Size of the sums, [PANEL / 16 / vectors, ROWS_AT_ONCE, vectors, 16] floats."""
        return ROWS_AT_ONCE * PANEL * _FLOAT

    @property
    def group_bytes(self) -> int:
        """Size of the part of a widened block that a tile reads, [inner, vectors, 16] floats."""
        return self.inner * self.vectors * _VECTOR_BYTES

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of a thread: sums and a widened block."""
        return self.sum_bytes + self.group_bytes * _HALVES // self.vectors

    def tile_sizes(self) -> range:
        """Return the rows of tiles, descending: those of even splits of more than few_rows rows."""
        least = min(rows // -(-rows // self.max_rows) for rows in range(self.few_rows + 1, ROWS_AT_ONCE + 1))
        return range(self.max_rows, least - 1, -1)


def blocking(isa: Isa) -> Blocking:
    """Return the sizes of a level: 32 registers of 16 floats, or 16 registers of 8."""
    if isa.has("avx512f"):
        return Blocking(max_rows=12, vectors=2, inner=192, few_rows=4)
    return Blocking(max_rows=6, vectors=1, inner=256, few_rows=3)


def is_blocked(isa: Isa, dtype: Dtype) -> bool:
    """Return whether products of this dtype are computed here."""
    return not (dtype == "bfloat16" and isa.has("avx512bf16"))


def widen_rows(code: Code) -> str:
    """Add the kernel that widens rows of bfloat16; returns its name.

    Items: one for each row. Arguments: rows, x [rows, K], y [rows, K rounded up to even] floats, K.
    """

    def body(emit: Emitter, item: Int, _: Int, __: Int, x: Int, y: Int, inner: Int) -> None:
        even = _even(inner, "bfloat16")
        source, target = x + item * inner * ITEM_BYTES["bfloat16"], y + item * even * _FLOAT

        def widen(at: Int, _: list[Vec]) -> None:
            numbers = emit.load_some(source + at * ITEM_BYTES["bfloat16"], "bfloat16", inner - at)
            emit.store_some(numbers, target + at * _FLOAT, "float32", even - at)

        emit.loop(0, even, LANES, widen)

    return code.kernel("widen_rows", 4, body)


def blocked_panel(
    code: Code, emit: Emitter, dtype: Dtype, *, rows: Int, x: Int, inner: Int, panel: Int, coming: Int, scratch: Int
) -> Int:
    """Emit the products of up to ROWS_AT_ONCE rows of x, floats, and a panel; return the address of their sums.

    coming: the panel that this thread will probably need next, which is prefetched.
    """
    sizes, step, columns = blocking(code.isa), inner_step(dtype), _even(inner, dtype)
    sums, block = scratch, scratch + sizes.sum_bytes
    widen = _widen_block(code, dtype, sizes)
    tiles = {count: _tile(code, sizes, count) for count in sizes.tile_sizes()}

    def clear(row: Int, _: list[Vec]) -> None:
        for group in range(_HALVES // sizes.vectors):
            for vector in range(sizes.vectors):
                emit.store(emit.vec(0.0), _sum_at(sums, sizes, group, row) + vector * _VECTOR_BYTES, "float32")

    def run_block(start: Int, _: list[Vec]) -> None:
        count, offset = (columns - start).least(sizes.inner), start * (PANEL * ITEM_BYTES[dtype])
        widen(emit, panel + offset, coming + offset, block, count // step)
        for group in range(_HALVES // sizes.vectors):
            weights = block + group * sizes.group_bytes

            def tile(at: Int, size: int, group: int = group, weights: Int = weights) -> None:
                into = _sum_at(sums, sizes, group, at)
                tiles[size](emit, x + (at * columns + start) * _FLOAT, columns * _FLOAT, weights, count, into)

            _in_tiles(emit, sizes, rows, tile)

    emit.loop(0, rows, 1, clear)
    emit.loop(0, columns, sizes.inner, run_block)
    return sums


def sum_of(emit: Emitter, sums: Int, sizes: Blocking, row: Int, half: int) -> Vec:
    """Load 16 sums of a row, of the first or second half of a panel."""
    group, vector = divmod(half, sizes.vectors)
    return emit.load(_sum_at(sums, sizes, group, row) + vector * _VECTOR_BYTES, "float32")


def _sum_at(sums: Int, sizes: Blocking, group: int, row: Int) -> Int:
    return sums + (row + group * ROWS_AT_ONCE) * (sizes.vectors * _VECTOR_BYTES)


def _even(inner: Int, dtype: Dtype) -> Int:
    step = inner_step(dtype)
    return (inner + (step - 1)) // step * step


def _in_tiles(emit: Emitter, sizes: Blocking, rows: Int, tile: Callable[[Int, int], None]) -> None:
    """Call tile(first row, size) for an even split of rows: sizes differ by at most one."""
    num_tiles = (rows + (sizes.max_rows - 1)) // sizes.max_rows
    base, larger = rows // num_tiles, rows % num_tiles
    at = emit.integer(0)
    for size in sizes.tile_sizes():
        count = larger.where(base.equals(size - 1), (num_tiles - larger).where(base.equals(size), 0))

        def run(index: Int, _: list[Vec], at: Int = at, size: int = size) -> None:
            tile(at + index * size, size)

        emit.loop(0, count, 1, run)
        at = at + count * size


def _widen_block(code: Code, dtype: Dtype, sizes: Blocking) -> Callable[..., None]:
    """Add a helper that widens `steps` steps of a panel, [steps, 32, step], and prefetches those of the next one."""
    size, step = ITEM_BYTES[dtype], inner_step(dtype)

    def body(emit: Emitter, panel: Int, coming: Int, block: Int, steps: Int) -> None:
        def widen(index: Int, _: list[Vec]) -> None:
            offset = index * (PANEL * step * size)
            emit.prefetch(coming + offset, PANEL * step * size, level=2)
            for half in range(_HALVES):
                group, vector = divmod(half, sizes.vectors)
                loaded = load_weights(emit, panel + offset + LANES * step * size * half, dtype)
                target = block + (group * sizes.group_bytes + vector * _VECTOR_BYTES)
                for which, floats in enumerate(widened_weights(emit, loaded, dtype)):
                    emit.store(floats, target + (index * step + which) * (sizes.vectors * _VECTOR_BYTES), "float32")

        emit.loop(0, steps, 1, widen)

    return code.helper(f"widen_block_{dtype}", 4, body)


def _tile(code: Code, sizes: Blocking, rows: int) -> Callable[..., None]:
    """Add a helper that continues the sums of `rows` rows over `count` numbers of the inner dimension."""
    stride, vectors = sizes.vectors * _VECTOR_BYTES, range(sizes.vectors)

    def body(emit: Emitter, x: Int, x_stride: Int, weights: Int, count: Int, into: Int) -> None:
        starts = [x + x_stride * row for row in range(rows)]
        places = [into + (row * stride + vector * _VECTOR_BYTES) for row in range(rows) for vector in vectors]

        def advance(index: Int, sums: list[Vec]) -> list[Vec]:
            panel = [emit.load(weights + index * stride + vector * _VECTOR_BYTES, "float32") for vector in vectors]
            result = []
            for row, start in enumerate(starts):
                factor = emit.load_all(start + index * _FLOAT, "float32")
                result += [factor.times_plus(panel[v], sums[row * sizes.vectors + v]) for v in vectors]
            return result

        def advance_many(index: Int, sums: list[Vec]) -> list[Vec]:
            for offset in range(_UNROLL):
                sums = advance(index + offset, sums)
            return sums

        whole = count // _UNROLL * _UNROLL
        sums = emit.loop(0, whole, _UNROLL, advance_many, [emit.load(place, "float32") for place in places])
        sums = emit.loop(whole, count, 1, advance, sums)
        for place, total in zip(places, sums, strict=True):
            emit.store(total, place, "float32")

    return code.helper(f"blocked_tile_{rows}", 5, body)
