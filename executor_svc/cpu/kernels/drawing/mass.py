"""The mass of whole rows under temperature and floor: p / p of the most likely token, added up by folds.

The order of sums is that of `sampling.row_math.fold_sum`: halves are added, in float64 from NARROW numbers on.
"""

from __future__ import annotations

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import exp, where
from executor_svc.sampling.row_math import NARROW

PIECE = 8192
"""Numbers of a row that an item weighs."""
_F32, _F64 = ir.FloatType(), ir.DoubleType()
_VF64 = ir.VectorType(_F64, LANES)


def scaled(emit: Emitter, number: Vec, peak: Vec, temperature: Vec, floor: Vec) -> Vec:
    """Return log(p / p of the most likely token) of logits; -inf below the floor."""
    found = (number - peak) / temperature
    below = emit.builder.fcmp_ordered("<", found.value, floor.value)
    return where(emit, below, emit.vec(float("-inf")), found)


def weigh_pieces(code: Code) -> str:
    """Add the kernel that writes the masses of rows; returns its name. Items: pieces of rows.

    Arguments: rows, width, pieces of a row, addresses of rows of logits [rows] int64, peaks, temperatures, floors
    [rows], masses [rows, width]; float32 where nothing else is said.
    """

    def body(
        emit: Emitter, item: Int, _: Int, rows: Int, width: Int, pieces: Int, sources: Int, peaks: Int,
        temperatures: Int, floors: Int, masses: Int,
    ) -> None:  # fmt: skip
        row, start = item // pieces, item % pieces * PIECE
        x, into = emit.load_int(sources + row * 8), masses + row * width * 4
        shape = [emit.load_all(each + row * 4, "float32") for each in (peaks, temperatures, floors)]
        end = (start + PIECE).least(width)
        whole = end - (end - start) % LANES

        def weigh(place: Int, _: list[Vec]) -> None:
            mass = exp(scaled(emit, emit.load(x + place * 4, "float32"), *shape))
            emit.store(mass, into + place * 4, "float32")

        def weigh_rest() -> None:
            mass = exp(scaled(emit, emit.load_some(x + whole * 4, "float32", end - whole), *shape))
            emit.store_some(mass, into + whole * 4, "float32", end - whole)

        emit.loop(start, whole, LANES, weigh)
        emit.when(whole.less(end), weigh_rest)

    return code.kernel("weigh_pieces", 8, body)


def fold_masses(code: Code, width: int) -> str:
    """Add the kernel that adds up rows of masses; returns its name. Items: one for each row.

    Arguments: rows, masses [rows, width] float32, which it overwrites, scratch [rows, NARROW] and totals [rows]
    float64.
    """

    def body(emit: Emitter, item: Int, _: Int, rows: Int, masses: Int, scratch: Int, totals: Int) -> None:
        row, wide, left = masses + item * (width * 4), scratch + item * (NARROW * 8), width
        while left > NARROW:
            _fold(emit, row, left)
            left //= 2
        _widen(emit, row, wide, left)
        while left > 1:
            _fold_wide(emit, wide, left)
            left //= 2
        builder = emit.builder
        builder.store(builder.load(emit.pointer(wide, _F64)), emit.pointer(totals + item * 8, _F64))

    return code.kernel(f"fold_masses_{width}", 4, body)


def _fold(emit: Emitter, row: Int, width: int) -> None:
    """Add the second half of a row of float32 to its first; the last of an odd number is added to the first one."""
    half = width // 2

    def add(place: Int, count: int) -> None:
        at = row + place * 4
        total = emit.load(at, "float32", count) + emit.load(at + half * 4, "float32", count)
        emit.store(total, at, "float32", count)

    emit.loop(0, half // LANES * LANES, LANES, lambda place, _: add(place, LANES))
    if half % LANES:
        add(emit.integer(half // LANES * LANES), half % LANES)
    if width % 2:
        total = emit.load_all(row, "float32") + emit.load_all(row + (width - 1) * 4, "float32")
        emit.store(total, row, "float32", 1)


def _widen(emit: Emitter, row: Int, wide: Int, width: int) -> None:
    """Write a row of float32 as float64."""
    builder = emit.builder

    def widen(place: Int, _: list[Vec]) -> None:
        numbers = builder.fpext(emit.load(row + place * 4, "float32").value, _VF64)
        builder.store(numbers, emit.pointer(wide + place * 8, _VF64)).align = 8

    whole = width // LANES * LANES
    emit.loop(0, whole, LANES, widen)
    for place in range(whole, width):
        number = builder.fpext(builder.load(emit.pointer(row + place * 4, _F32)), _F64)
        builder.store(number, emit.pointer(wide + place * 8, _F64))


def _fold_wide(emit: Emitter, wide: Int, width: int) -> None:
    """As `_fold`, of float64."""
    builder, half = emit.builder, width // 2

    def add(first: Int, second: Int, kind: ir.Type) -> None:
        numbers = [builder.load(emit.pointer(at, kind)) for at in (first, second)]
        for each in numbers:
            each.align = 8
        builder.store(builder.fadd(*numbers), emit.pointer(first, kind)).align = 8

    whole = half // LANES * LANES
    emit.loop(0, whole, LANES, lambda place, _: add(wide + place * 8, wide + (place + half) * 8, _VF64))
    for place in range(whole, half):
        add(wide + place * 8, wide + (place + half) * 8, _F64)
    if width % 2:
        add(wide, wide + (width - 1) * 8, _F64)
