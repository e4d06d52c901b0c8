"""Rows of x as int8 numbers with a scale for every 32 columns, in the order in which integer products read them.

`device.int8_reference` defines the numbers. A row is a sequence of steps of 32 columns:

    32 numbers of 8 or 16 bits      in the order of the codes that multiply them
    the step's scale                float32
    offsets                         1 or 2, see `Offset`: the correction for the weight's zeros or minimums

Tiles (AMX) read 16 rows at a time, so the numbers are also written by blocks of 16 rows. For each block and each step
(two steps, where the whole row has one scale):

    numbers                         [16][32] or [16][64] bytes, in the same order
    factors                         [1 or more][16] float32: the step's scale and scaled sums of each row, 0 for a row
                                    that is missing; none where the whole row has one scale
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir

from executor_svc.cpu.kernels.activation import gated_product
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import where
from executor_svc.cpu.kernels.codegen.tiles import TILE_ROWS
from executor_svc.cpu.kernels.quantized.layout import STEP
from executor_svc.device.kernels import GatedActivation

STEPS_AT_ONCE, _STEPS_OF_BLOCK = 64, 16
"""Steps of a row, or of 16 rows for tiles, that an item computes, unless the whole row has one scale."""
FACTOR_BYTES = 4 * TILE_ROWS
_MOST = 127.0
# A float below 2^22 plus this constant, read as an integer, is the constant's integer plus the rounded float.
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000
_INFINITY_BITS = 0x7F800000
_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_VI32, _VF32 = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)

Offset = Literal["sum", "scaled_sum"]
"""sum: the sum of the numbers times RowSteps.times, an int32; scaled_sum: float(sum) * scale, a float32."""


@dataclass(frozen=True, slots=True)
class RowSteps:
    """How rows are written for a format of weights on a level."""

    order: tuple[int, ...]
    """Of each 8 columns, or of a divisor of 8."""
    bits: Literal[8, 16]
    offset: Offset
    times: int = 1
    sum_of: int = STEP
    """Columns of an offset: 16 or 32; with whole_row a multiple of 32, whose first step has it, or 0 for all of K."""
    whole_row: bool = False
    tiled: bool = False
    """Tiles read them, if there are many."""

    def __str__(self) -> str:
        order = "".join(map(str, self.order))
        span = f"{'row' if self.whole_row else ''}{self.sum_of}{'_tiled' if self.tiled else ''}"
        return f"{order}_{self.bits}_{self.offset}{self.times}_{span}"

    @property
    def scale_at(self) -> int:
        """Bytes from a step to its scale; offsets follow."""
        return STEP * self.bits // 8

    @property
    def num_offsets(self) -> int:
        return 2 if self.sum_of == LANES else 1

    @property
    def step_bytes(self) -> int:
        return self.scale_at + 4 + 4 * self.num_offsets

    @property
    def tile_steps(self) -> int:
        """Steps whose numbers lie side by side in a block."""
        return 2 if self.whole_row else 1

    @property
    def factors_at(self) -> int:
        """Bytes from the start of a block's step, or steps, to its factors."""
        return TILE_ROWS * STEP * self.tile_steps

    @property
    def num_factors(self) -> int:
        if self.whole_row:
            return 0
        return 1 + (self.num_offsets if self.offset == "scaled_sum" else 0)

    @property
    def block_step_bytes(self) -> int:
        return self.factors_at + FACTOR_BYTES * self.num_factors

    @property
    def rows_of_item(self) -> int:
        """Rows of an item of `quantize_rows`: a block's, so that no two threads write into one cache line."""
        return TILE_ROWS if self.tiled and not self.whole_row else 1

    @property
    def steps_of_item(self) -> int:
        return _STEPS_OF_BLOCK if self.rows_of_item > 1 else STEPS_AT_ONCE

    def row_bytes(self, width: int) -> int:
        return -(-width // STEP) * self.step_bytes

    def block_bytes(self, width: int) -> int:
        """Return the bytes of 16 rows as tiles read them."""
        return -(-width // (STEP * self.tile_steps)) * self.block_step_bytes


def row_items(steps: RowSteps, width: int) -> int:
    """Return the items of `rows_of_item` rows of `quantize_rows`."""
    return 1 if steps.whole_row else -(-width // (STEP * steps.steps_of_item))


def quantize_rows(code: Code, dtype: Dtype, steps: RowSteps, activation: GatedActivation | None = None) -> str:
    """Add the kernel that quantizes rows of dtype; returns its name.

    Items: `row_items` for each `rows_of_item` rows. Arguments: rows, x [rows, K], result, K, blocks of rows or 0.
    Columns beyond K are 0. activation: x is [rows, 2 K], gate and up, and the rows of `activation.gated` are quantized,
    which are not written; not of whole rows.
    """
    if steps.whole_row:
        assert activation is None
        return code.kernel(f"quantize_rows_{dtype}_{steps}", 5, lambda *given: _whole_rows(dtype, steps, *given))
    name = f"quantize_rows_{dtype}_{steps}{'' if activation is None else f'_{activation}'}"
    return code.kernel(name, 5, lambda *given: _rows(dtype, activation, steps, *given))


def _rows(
    dtype: Dtype,
    activation: GatedActivation | None,
    steps: RowSteps,
    emit: Emitter,
    item: Int,
    _: Int,
    rows: Int,
    x: Int,
    into: Int,
    width: Int,
    beside: Int,
) -> None:
    count = (width + (STEP - 1)) // STEP
    items = (count + (steps.steps_of_item - 1)) // steps.steps_of_item
    block, first = item // items, item % items * steps.steps_of_item
    whole, last = width // STEP, (first + steps.steps_of_item).least(count)
    blocks = beside + block * count * steps.block_step_bytes

    def step(row: Int, lane: Int, index: Int, left: Int | None) -> None:
        target, offset = into + row * count * steps.step_bytes, index * (STEP * ITEM_BYTES[dtype])
        if activation is None:
            parts = _load(emit, x + row * width * ITEM_BYTES[dtype] + offset, dtype, left)
        else:
            gate, up = (x + (row * 2 + which) * width * ITEM_BYTES[dtype] + offset for which in range(2))
            loaded = zip(_load(emit, gate, dtype, left), _load(emit, up, dtype, left), strict=True)
            parts = [gated_product(activation, *each, dtype).rounded(dtype) for each in loaded]
        scale, inverse = _scales(emit, _highest(emit, parts))
        numbers = [_rounded(part * inverse) for part in parts]
        place = target + index * steps.step_bytes
        tile = blocks + index * steps.block_step_bytes
        _store_step(emit, steps, numbers, scale, place, tile + lane * STEP if steps.tiled else None)
        sums = numbers if steps.num_offsets == 2 else [numbers[0] + numbers[1]]
        offsets = [_store_offset(emit, steps, each, scale, place, which) for which, each in enumerate(sums)]
        if steps.tiled:
            factors = tile + steps.factors_at + lane * 4
            for which, number in enumerate([scale, *offsets][: steps.num_factors]):
                emit.builder.store(number, emit.pointer(factors + which * FACTOR_BYTES, _F32)).align = 4

    def one_row(lane: Int, _: object) -> None:
        row = block * steps.rows_of_item + lane
        emit.loop(first, last.least(whole), 1, lambda index, _: step(row, lane, index, None))
        emit.when(whole.less(last), lambda: step(row, lane, whole, width - whole * STEP))

    def no_row(lane: Int, _: object) -> None:
        def zero(index: Int, _: object) -> None:
            factors = blocks + index * steps.block_step_bytes + steps.factors_at + lane * 4
            for which in range(steps.num_factors):
                emit.builder.store(ir.Constant(_F32, 0.0), emit.pointer(factors + which * FACTOR_BYTES, _F32)).align = 4

        emit.loop(first, last, 1, zero)

    if steps.rows_of_item == 1:
        one_row(emit.integer(0), None)
        return
    here = (rows - block * TILE_ROWS).least(TILE_ROWS)
    emit.loop(0, here, 1, one_row)
    emit.loop(here, TILE_ROWS, 1, no_row)


def _whole_rows(
    dtype: Dtype, steps: RowSteps, emit: Emitter, item: Int, _: Int, __: Int, x: Int, into: Int, width: Int, beside: Int
) -> None:
    count, whole = (width + (STEP - 1)) // STEP, width // STEP
    source, target = x + item * width * ITEM_BYTES[dtype], into + item * count * steps.step_bytes

    blocks = beside + item // TILE_ROWS * ((count + 1) // 2) * steps.block_step_bytes

    def tile_of(index: Int) -> Int:
        return blocks + index // 2 * steps.block_step_bytes + (item % TILE_ROWS * 2 + index % 2) * STEP

    def parts_of(index: Int, left: Int | None) -> list[Vec]:
        return _load(emit, source + index * (STEP * ITEM_BYTES[dtype]), dtype, left)

    def highest(index: Int, found: list[Vec], left: Int | None) -> list[Vec]:
        return [_as_floats(emit, _highest_of(emit, [found[0], *parts_of(index, left)]))]

    found = emit.loop(0, whole, 1, lambda index, each: highest(index, each, None), [emit.vec(0.0)])
    found = emit.loop(whole, count, 1, lambda index, each: highest(index, each, width - index * STEP), found)
    scale, inverse = _scales(emit, _highest(emit, found))

    def step(index: Int, sums: list[Vec], left: Int | None) -> list[Vec]:
        numbers = [_rounded(part * inverse) for part in parts_of(index, left)]
        tile = tile_of(index) if steps.tiled else None
        _store_step(emit, steps, numbers, scale, target + index * steps.step_bytes, tile)
        return [sums[0] + (numbers[0] + numbers[1])]

    def group(first: Int, stop: Int) -> None:
        zero = [emit.vec(0.0)]
        sums = emit.loop(first, stop.least(whole), 1, lambda at, each: step(at, each, None), zero)
        sums = emit.loop(first.most(whole), stop, 1, lambda at, each: step(at, each, width - at * STEP), sums)
        _store_offset(emit, steps, sums[0], scale, target + first * steps.step_bytes, 0)

    if steps.sum_of:
        length = steps.sum_of // STEP
        emit.loop(0, count, length, lambda first, _: group(first, (first + length).least(count)))
    else:
        group(emit.integer(0), count)
    if steps.tiled:
        emit.when((count % 2).equals(1), lambda: _store_numbers(emit, steps, [emit.vec(0.0)] * 2, tile_of(count)))


def _load(emit: Emitter, place: Int, dtype: Dtype, left: Int | None) -> list[Vec]:
    places = [(place + half * LANES * ITEM_BYTES[dtype], half * LANES) for half in range(STEP // LANES)]
    if left is None:
        return [emit.load(at, dtype) for at, _ in places]
    return [emit.load_some(at, dtype, left - offset) for at, offset in places]


def _highest(emit: Emitter, parts: list[Vec]) -> Any:
    """Return the largest size of all numbers, a float; a NaN wins, since its bits are larger than infinity's."""
    builder, found = emit.builder, _highest_of(emit, parts)
    distance = LANES // 2
    while distance:
        lanes = ir.Constant(_VI32, [lane ^ distance for lane in range(LANES)])
        found = _larger(emit, found, builder.shuffle_vector(found, found, lanes))
        distance //= 2
    return builder.bitcast(builder.extract_element(found, ir.Constant(_I32, 0)), _F32)


def _highest_of(emit: Emitter, parts: list[Vec]) -> Any:
    """Return the largest sizes of each lane, as bits."""
    sizes = [
        emit.builder.and_(emit.builder.bitcast(part.value, _VI32), ir.Constant(_VI32, [0x7FFFFFFF] * LANES))
        for part in parts
    ]
    found = sizes[0]
    for each in sizes[1:]:
        found = _larger(emit, found, each)
    return found


def _larger(emit: Emitter, left: Any, right: Any) -> Any:
    return emit.builder.select(emit.builder.icmp_signed(">", left, right), left, right)


def _as_floats(emit: Emitter, bits: Any) -> Vec:
    return Vec(emit, emit.builder.bitcast(bits, _VF32))


def _scales(emit: Emitter, highest: Any) -> tuple[Any, Vec]:
    """Return the scale, a float, and the factor that makes numbers of a step integers, in every lane."""
    builder = emit.builder
    most = ir.Constant(_F32, _MOST)
    quotient = builder.fdiv(most, highest)
    finite = builder.icmp_signed("<", builder.bitcast(quotient, _I32), ir.Constant(_I32, _INFINITY_BITS))
    inverse = builder.select(finite, quotient, ir.Constant(_F32, 0.0))
    return builder.fdiv(highest, most), _in_every_lane(emit, inverse)


def _in_every_lane(emit: Emitter, number: Any) -> Vec:
    one = emit.builder.insert_element(ir.Constant(_VF32, ir.Undefined), number, ir.Constant(_I32, 0))
    return Vec(emit, one).lane(0)


def _rounded(scaled: Vec) -> Vec:
    """Return numbers below 2^22 to the nearest integer, ties to even, and 0 for NaN."""
    emit = scaled.emit
    is_nan = emit.builder.fcmp_unordered("uno", scaled.value, scaled.value)
    return (where(emit, is_nan, emit.vec(0.0), scaled) + _ROUNDER) - _ROUNDER


def _store_step(emit: Emitter, steps: RowSteps, numbers: list[Vec], scale: Any, place: Int, tile: Int | None) -> None:
    """Write the integers of a step in their order, to two places if tiles read them, and its scale."""
    for at in (place, tile):
        if at is not None:
            _store_numbers(emit, steps, numbers, at)
    emit.builder.store(scale, emit.pointer(place + steps.scale_at, _F32)).align = 4


def _store_numbers(emit: Emitter, steps: RowSteps, numbers: list[Vec], place: Int) -> None:
    builder = emit.builder
    item = _I8 if steps.bits == 8 else _I16
    whole = [
        builder.trunc(builder.bitcast((each + _ROUNDER).value, _VI32), ir.VectorType(item, LANES)) for each in numbers
    ]
    span = len(steps.order)
    order = [start + column for start in range(0, STEP, span) for column in steps.order]
    ordered = builder.shuffle_vector(*whole, ir.Constant(ir.VectorType(_I32, STEP), order))
    builder.store(ordered, emit.pointer(place, ir.VectorType(item, STEP))).align = 4


def _store_offset(emit: Emitter, steps: RowSteps, numbers: Vec, scale: Any, place: Int, which: int) -> Any:
    """Write the offset of integers that are given as floats: their sums are exact below 2^24, so 132,104 columns."""
    builder = emit.builder
    total = builder.extract_element(numbers.total().value, ir.Constant(_I32, 0))
    if steps.offset == "scaled_sum":
        offset = builder.fmul(scale, total)
    else:
        offset = builder.mul(builder.fptosi(total, _I32), ir.Constant(_I32, steps.times))
    builder.store(offset, emit.pointer(place + (steps.scale_at + 4 + 4 * which), offset.type)).align = 4
    return offset
