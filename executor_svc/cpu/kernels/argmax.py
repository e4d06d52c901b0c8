"""The most likely token of each row of logits."""

from __future__ import annotations

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import where

_INFINITY = float("inf")
_I64 = ir.IntType(64)


def argmax(code: Code, vocab_size: int) -> str:
    """Add the kernel ids = the lowest id among the largest logits, -1 for a row that cannot be sampled.

    Items: one for each row. Arguments: rows, logits [rows, vocab_size] float32, ids [rows] int64. Returns its name.
    Ids are kept as floats, which represent every integer up to 2^24.
    """
    assert vocab_size < 1 << 24

    def body(emit: Emitter, item: Int, _: Int, rows: Int, logits: Int, ids: Int) -> None:
        start = logits + item * (vocab_size * 4)
        whole = vocab_size - vocab_size % LANES

        def look(place: Int, best: list[Vec], count: int = LANES) -> list[Vec]:
            value = emit.load(start + place * 4, "float32", count)
            if count < LANES:
                value = where(emit, emit.first(emit.integer(count)), value, emit.vec(-_INFINITY))
            return _better(emit, best, value)

        first = [emit.vec(-_INFINITY), emit.vec(0.0), lane_numbers(emit), emit.vec(0.0)]
        best = emit.loop(0, whole, LANES, look, first)
        if whole < vocab_size:
            best = look(emit.integer(whole), best, vocab_size - whole)
        emit.builder.store(_chosen(emit, best), emit.pointer(ids + item * 8, _I64))

    return code.kernel(f"argmax_{vocab_size}", 3, body)


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


def _chosen(emit: Emitter, best: list[Vec]) -> ir.Value:
    """Return the id of the row, or -1, by a reduction over the lanes."""
    builder = emit.builder
    largest, at, _, spoilt = best
    peak = largest.highest()
    here = builder.fcmp_ordered("==", largest.value, peak.value)
    lowest = where(emit, here, at * -1.0, emit.vec(-_INFINITY)).highest() * -1.0

    def number(vector: Vec) -> ir.Value:
        return builder.extract_element(vector.value, ir.Constant(ir.IntType(32), 0))

    infinite = builder.fcmp_ordered(
        "==", number(emit.call("llvm.fabs.v16f32", peak)), ir.Constant(ir.FloatType(), _INFINITY)
    )
    failed = builder.or_(
        infinite, builder.fcmp_ordered(">", number(spoilt.highest()), ir.Constant(ir.FloatType(), 0.0))
    )
    return builder.select(failed, ir.Constant(_I64, -1), builder.fptosi(number(lowest), _I64))
