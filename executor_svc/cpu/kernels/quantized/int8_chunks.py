"""Products of many int8 rows with a weight in few bits: a chunk of a panel is unpacked once for all rows of an item.

Codes become vectors as a level's dot products read them, scales and minimums floats, in scratch memory that stays in
the first cache. Sums are exact and their floats are added in the order of `device.int8_reference`, so the bits are
those of `int8_product`'s other tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.panel_layout import CACHE_LINE, PANEL, ROWS_AT_ONCE
from executor_svc.cpu.kernels.quantized.few_rows import TOTALS_BYTES, format_key
from executor_svc.cpu.kernels.quantized.int8_codes import PanelCodes, PanelStep, most_code
from executor_svc.cpu.kernels.quantized.int8_dots import Method, method
from executor_svc.cpu.kernels.quantized.int8_steps import StepEmitter, Totals
from executor_svc.cpu.kernels.quantized.layout import STEP, WORD_BYTES, PackedLayout
from executor_svc.cpu.kernels.quantized.many_rows import clear
from executor_svc.cpu.kernels.quantized.row_steps import RowSteps
from executor_svc.cpu.kernels.quantized.vectors import Vectors, register_lanes

_LEAST_ROWS = 24
"""For fewer rows of an item codes are unpacked in registers."""
_CODES_BYTES = 16 * 1024
"""Of a chunk."""
_NUMBERS = ("scales", "minimums", "zero_points")


@dataclass(frozen=True, slots=True)
class PanelChunk:
    """Places of a thread's numbers in its scratch memory: totals [rows][32], then steps of a panel.

    A step has its codes [words][parts][32 columns] in vectors, then each of its numbers [groups][32] in 32 bits.
    """

    layout: PackedLayout
    how: Method

    @property
    def parts(self) -> int:
        """Vectors of codes that a word becomes."""
        return STEP * self.code_bytes // self.layout.low_words // WORD_BYTES

    @property
    def code_bytes(self) -> int:
        return 2 if self.how == "pairs" else 1

    @property
    def codes_bytes(self) -> int:
        """Of the codes of a step."""
        return PANEL * STEP * self.code_bytes

    @property
    def numbers(self) -> list[str]:
        """Names of the numbers of groups that are there."""
        return [name for name in _NUMBERS if name in self.layout.planes]

    @property
    def group_bytes(self) -> int:
        """Of one of the numbers of a step."""
        return self.layout.groups_per_step * PANEL * WORD_BYTES

    @property
    def step_bytes(self) -> int:
        return self.codes_bytes + len(self.numbers) * self.group_bytes

    @property
    def steps(self) -> int:
        return _CODES_BYTES // self.codes_bytes

    @property
    def start(self) -> int:
        """Offset of the steps."""
        return ROWS_AT_ONCE * TOTALS_BYTES

    @property
    def num_bytes(self) -> int:
        return self.start + self.steps * self.step_bytes

    def code(self, word: int, part: int, vector: int) -> int:
        """Return the offset of a vector of codes in its step, of vectors as wide as `vector` bytes in all."""
        return (word * self.parts + part) * PANEL * WORD_BYTES + vector

    def number(self, name: str, group: int, vector: int) -> int:
        return self.codes_bytes + self.numbers.index(name) * self.group_bytes + group * PANEL * WORD_BYTES + vector


class _UnpackedCodes:
    """Emits the loads of an unpacked step's numbers, as `PanelCodes` does those of a packed one."""

    def __init__(self, vectors: Vectors, chunk: PanelChunk) -> None:
        self._vectors, self._chunk = vectors, chunk

    def words(self, place: PanelStep, word: int, at: int) -> tuple[Any, Any]:
        return place.step, at

    def codes(self, words: tuple[Any, Any], word: int, part: int) -> Any:
        step, at = words
        return self._vectors.load(step + self._chunk.code(word, part, self._offset(at)))

    def numbers(self, place: PanelStep, name: str, group: int, at: int) -> Any:
        return self._load(place, name, group, at, self._vectors.floats)

    def zero_points(self, place: PanelStep, group: int, at: int) -> Any:
        return self._load(place, "zero_points", group, at, self._vectors.integers)

    def _load(self, place: PanelStep, name: str, group: int, at: int, kind: Any) -> Any:
        return self._vectors.load(place.step + self._chunk.number(name, group, self._offset(at)), kind)

    def _offset(self, at: int) -> int:
        return at * self._vectors.lanes * WORD_BYTES


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """Rows of x and vectors of columns that are computed together."""

    rows: int
    vectors: int
    in_memory: bool
    """Whether totals are in memory between steps: registers are few."""


def chunk_tile(isa: Isa) -> ChunkTile:
    """Return the tile of a level; five or six rows are no faster."""
    return ChunkTile(4, 2, not isa.has("avx512f"))


def goes_by_chunks(isa: Isa, layout: PackedLayout, steps: RowSteps) -> bool:
    """Return whether many rows of this form are multiplied by chunks.

    With registers of 512 bits only groups of 16 columns are: six rows share what unpacks other codes, which runs beside
    their dot products (measured on Zen 4).
    """
    if steps.tiled or steps.whole_row or layout.whole_row:
        return False
    return layout.groups_per_step > 1 or not isa.has("avx512f")


class ChunkProduct:
    """Emits the product of an item's rows."""

    def __init__(self, code: Code, layout: PackedLayout, steps: RowSteps) -> None:
        self._code, self._layout, self._steps = code, layout, steps
        self.chunk = PanelChunk(layout, method(code.isa, most_code(layout.kind)))
        self._shape = chunk_tile(code.isa)

    def rows(self, rows: Int) -> Int:
        """Return how many of an item's rows, the first ones, go by chunks."""
        height = self._shape.rows
        return rows.emit.integer(0).where(rows.less(_LEAST_ROWS), rows // height * height)

    def run(self, emit: Emitter, rows: Int, x: Int, panel: Int, coming: Int, count: Int, scratch: Int) -> None:
        """Emit: write totals of the item's first rows to the start of scratch memory; count: steps of a row."""
        chunk, height = self.chunk, self._shape.rows
        unpack, tile = self._unpack(), self._tile()
        stride = count * self._steps.step_bytes
        clear(emit, scratch, rows)
        chunks = (count + (chunk.steps - 1)) // chunk.steps
        each = (count + (chunks - 1)) // chunks

        def one_chunk(number: Int, _: object) -> None:
            first = number * each
            here = (count - first).least(each)
            unpack(emit, panel, first, here, scratch + chunk.start)
            start = x + first * self._steps.step_bytes

            def block(row: Int, _: object) -> None:
                totals = scratch + row * TOTALS_BYTES
                ahead = coming + (first * rows + row * here) // height * CACHE_LINE
                tile(emit, start + row * stride, stride, scratch + chunk.start, here, totals, ahead)

            emit.loop(0, rows, height, block)

        emit.loop(0, chunks, 1, one_chunk)

    def _unpack(self) -> Callable[..., None]:
        """Add the function that unpacks steps of a panel; returns a function that emits a call.

        Arguments: the panel, the first step, their number, where they are written.
        """
        layout, chunk = self._layout, self.chunk
        per_block = layout.steps_per_block

        def body(emit: Emitter, panel: Int, first: Int, count: Int, into: Int) -> None:
            vectors = Vectors(emit, register_lanes(self._code.isa))
            codes = PanelCodes(vectors, layout, chunk.how)

            def one_step(index: Int, _: object) -> None:
                step, target = first + index, into + index * chunk.step_bytes
                head = panel + step // per_block * layout.block_bytes
                place = PanelStep(head, head + (step % per_block * layout.step_bytes + layout.head_bytes), [])
                for at in range(PANEL // vectors.lanes):
                    self._one_vector(vectors, codes, place, at, target)

            emit.loop(0, count, 1, one_step)

        return self._code.helper(f"int8_chunk_{format_key(layout)}", 4, body)

    def _one_vector(self, vectors: Vectors, codes: PanelCodes, place: PanelStep, at: int, target: Int) -> None:
        chunk, offset = self.chunk, at * vectors.lanes * WORD_BYTES
        for word in range(self._layout.low_words):
            loaded = codes.words(place, word, at)
            for part in range(chunk.parts):
                vectors.store(codes.codes(loaded, word, part), target + chunk.code(word, part, offset))
        for group in range(self._layout.groups_per_step):
            for name in chunk.numbers:
                known = codes.zero_points(place, group, at) if name == "zero_points" else None
                number = known if known is not None else codes.numbers(place, name, group, at)
                vectors.store(number, target + chunk.number(name, group, offset))

    def _tile(self) -> Callable[..., None]:
        """Add the function that adds the products of some rows and a chunk to their totals.

        Returns a function that emits a call. Arguments: the first row at the chunk's first step, the bytes from a row
        to the next, the steps, their number, the rows' totals, and memory of which each step prefetches a line: all
        rows together much of the next panel, for a burst of prefetches would be dropped.
        """
        layout, steps, shape, chunk = self._layout, self._steps, self._shape, self.chunk

        def body(emit: Emitter, x: Int, stride: Int, numbers: Int, count: Int, totals: Int, ahead: Int) -> None:
            vectors = Vectors(emit, register_lanes(self._code.isa))
            starts = [x + stride * row for row in range(shape.rows)]
            own = [totals + row * TOTALS_BYTES for row in range(shape.rows)]
            for first in range(0, PANEL // vectors.lanes, shape.vectors):
                which = range(first, first + shape.vectors)
                places = [row + at * vectors.lanes * WORD_BYTES for row in own for at in which]
                step = StepEmitter(vectors, self._code.isa, layout, steps, which, _UnpackedCodes(vectors, chunk))
                self._add_steps(vectors, step, starts, numbers, count, places, None if first else ahead)

        return self._code.helper(f"int8_chunk_tile_{format_key(layout)}_{steps}", 6, body)

    def _add_steps(
        self,
        vectors: Vectors,
        step: StepEmitter,
        starts: list[Int],
        numbers: Int,
        count: Int,
        places: list[Int],
        ahead: Int | None,
    ) -> None:
        emit, in_memory = vectors.emit, self._shape.in_memory

        def once(index: Int, values: list[Vec]) -> list[Vec]:
            offset = index * self._steps.step_bytes
            if ahead is not None:
                emit.prefetch(ahead + index * CACHE_LINE, CACHE_LINE, level=2)
            place = PanelStep(numbers, numbers + index * self.chunk.step_bytes, [row + offset for row in starts])
            totals = Totals(vectors, [each.value for each in values], places if in_memory else None)
            for group in range(self._layout.groups_per_step):
                dots = step.products(place, group, step.starts(place, group))
                step.add_to_totals(place, group, dots.sum, totals)
            return [Vec(emit, each) for each in totals.values]

        if in_memory:
            emit.loop(0, count, 1, once)
            return
        known = [Vec(emit, vectors.load(place, vectors.floats)) for place in places]
        for place, total in zip(places, emit.loop(0, count, 1, once, known), strict=True):
            vectors.store(total.value, place)
