"""The most likely token of each row of logits."""

from __future__ import annotations

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import where

_INFINITY = float("inf")
_I64 = ir.IntType(64)


PARTS = LANES
"""Of a row, in which threads look at once."""
_STATE_BYTES = 3 * 4 * LANES
LEAST_IN_PARTS = 1 << 14
"""Logits of a row that is worth it."""


def argmax(code: Code, vocab_size: int) -> str:
    """Add the kernel ids = the lowest id among the largest logits, -1 for a row that cannot be sampled.

    Items: one for each row. Arguments: rows, logits [rows, vocab_size] float32, ids [rows] int64. Returns its name.
    Ids are kept as floats, which represent every integer up to 2^24.
    """
    assert vocab_size < 1 << 24

    def body(emit: Emitter, item: Int, _: Int, rows: Int, logits: Int, ids: Int) -> None:
        start, whole = logits + item * (vocab_size * 4), vocab_size // LANES * LANES
        best = _look(emit, start, emit.integer(0), emit.integer(whole))
        if whole < vocab_size:
            best = _look_at_last(emit, start, vocab_size, best)
        _store_chosen(emit, best, ids + item * 8)

    return code.kernel(f"argmax_{vocab_size}", 3, body)


def argmax_of_parts(code: Code, vocab_size: int) -> tuple[str, str]:
    """Add two kernels that find what `argmax` does, the first for each part of a row; returns their names.

    The first has PARTS items for each row; arguments: rows, logits, found [rows, 3, PARTS] float32: largest, its id,
    and 1 after a NaN. The second has an item for each row; arguments: rows, found, ids.
    """
    assert LEAST_IN_PARTS <= vocab_size < 1 << 24
    whole, size = vocab_size // LANES * LANES, -(-vocab_size // (LANES * PARTS)) * LANES

    def look(emit: Emitter, item: Int, _: Int, rows: Int, logits: Int, found: Int) -> None:
        row, part = item // PARTS, item % PARTS
        start, first = logits + row * (vocab_size * 4), part * size
        best = _look(emit, start, first, (first + size).least(whole))
        into = found + row * _STATE_BYTES + part * 4

        def store(state: list[Vec]) -> None:
            largest, at, _, spoilt = state
            peak = largest.highest()
            for index, each in enumerate((peak, _lowest(emit, largest, at, peak), spoilt.highest())):
                emit.store(each, into + index * (4 * LANES), "float32", 1)

        store(best)
        if whole < vocab_size:
            is_last = part.equals(PARTS - 1)
            emit.when(is_last, lambda: store(_look_at_last(emit, start, vocab_size, best)))

    def choose(emit: Emitter, item: Int, _: Int, rows: Int, found: Int, ids: Int) -> None:
        place = found + item * _STATE_BYTES
        largest, at, spoilt = (emit.load(place + index * (4 * LANES), "float32") for index in range(3))
        _store_chosen(emit, [largest, at, at, spoilt], ids + item * 8)

    return code.kernel(f"argmax_parts_{vocab_size}", 3, look), code.kernel("argmax_of_parts", 3, choose)


def _look(emit: Emitter, start: Int, first: Int, end: Int) -> list[Vec]:
    """Return the state of `_better` after the logits from `first` to `end`, multiples of LANES."""
    number = Vec(emit, emit.builder.sitofp(emit.every(first), lane_numbers(emit).value.type)) + lane_numbers(emit)
    state = [emit.vec(-_INFINITY), emit.vec(0.0), number, emit.vec(0.0)]
    return emit.loop(
        first, end, LANES, lambda place, best: _better(emit, best, emit.load(start + place * 4, "float32")), state
    )


def _look_at_last(emit: Emitter, start: Int, vocab_size: int, best: list[Vec]) -> list[Vec]:
    """Return the state after the last logits, fewer than LANES."""
    count = vocab_size % LANES
    value = emit.load(start + (vocab_size - count) * 4, "float32", count)
    return _better(emit, best, where(emit, emit.first(emit.integer(count)), value, emit.vec(-_INFINITY)))


def lane_numbers(emit: Emitter) -> Vec:
    """Return 0 to LANES - 1 as floats."""
    return Vec(emit, ir.Constant(ir.VectorType(ir.FloatType(), LANES), [float(lane) for lane in range(LANES)]))


def _better(emit: Emitter, best: list[Vec], value: Vec) -> list[Vec]:
    """Return each lane's state after a value: largest so far, its first id, the next value's id, and 1 after a NaN."""
    largest, at, number, spoilt = best
    larger = emit.builder.fcmp_ordered(">", value.value, largest.value)
    is_nan = emit.builder.fcmp_unordered("uno", value.value, value.value)
    return [
        where(emit, larger, value, largest),
        where(emit, larger, number, at),
        number + float(LANES),
        where(emit, is_nan, emit.vec(1.0), spoilt),
    ]


def _lowest(emit: Emitter, largest: Vec, at: Vec, peak: Vec) -> Vec:
    """Return the lowest id of the lanes that have the peak, in every lane."""
    here = emit.builder.fcmp_ordered("==", largest.value, peak.value)
    return where(emit, here, at * -1.0, emit.vec(-_INFINITY)).highest() * -1.0


def _store_chosen(emit: Emitter, best: list[Vec], place: Int) -> None:
    """Write the id of the row, or -1, by a reduction over the lanes."""
    builder = emit.builder
    largest, at, _, spoilt = best
    peak = largest.highest()
    lowest = _lowest(emit, largest, at, peak)

    def number(vector: Vec) -> ir.Value:
        return builder.extract_element(vector.value, ir.Constant(ir.IntType(32), 0))

    infinite = builder.fcmp_ordered(
        "==", number(emit.call("llvm.fabs.v16f32", peak)), ir.Constant(ir.FloatType(), _INFINITY)
    )
    failed = builder.or_(
        infinite, builder.fcmp_ordered(">", number(spoilt.highest()), ir.Constant(ir.FloatType(), 0.0))
    )
    chosen = builder.select(failed, ir.Constant(_I64, -1), builder.fptosi(number(lowest), _I64))
    builder.store(chosen, emit.pointer(place, _I64))
