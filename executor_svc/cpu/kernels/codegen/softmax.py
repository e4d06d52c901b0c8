"""The weights of a row of attention, from its stored scores."""

from __future__ import annotations

from typing import Any

from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import exp, tanh, where

_FLOAT = ITEM_BYTES["float32"]


def softmax_row(
    emit: Emitter,
    scores: Int,
    lowest: Int,
    position: Int,
    first: Int,
    inverse: Int,
    sink: Int | None = None,
    *,
    cap: float | None,
) -> None:
    """Turn scores into exp(score - maximum), 0 for masked keys; write 1 over their sum to every lane of `inverse`.

    Positions lowest to position are seen. scores: address of the score of position `first`, a multiple of LANES; scores
    of whole vectors are there. With a cap, a score is cap * tanh(stored score). A lane is a position modulo LANES.
    sink: address of one more score, which has no value and no cap; it is the first of its lane.
    """
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

    extra = emit.vec(float("-inf")) if sink is None else emit.load_all(sink, "float32")
    peak = emit.loop(begin, end, LANES, find_highest, [extra])[0].highest()

    def weigh(at: Int, sums: list[Vec]) -> list[Vec]:
        place = scores + (at - first) * _FLOAT
        weight = where(emit, seen(at), exp(emit.load(place, "float32") - peak), emit.vec(0.0))
        emit.store(weight, place, "float32")
        return [sums[0] + weight]

    nothing = emit.vec(0.0)
    at_first = nothing if sink is None else where(emit, emit.first(emit.integer(1)), exp(extra - peak), nothing)
    sums = emit.loop(begin, end, LANES, weigh, [at_first])
    emit.store(emit.vec(1.0) / sums[0].total(), inverse, "float32")
