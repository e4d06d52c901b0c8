"""The weights of a row of attention, from its stored scores."""

from __future__ import annotations

from typing import Any

from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import exp, tanh, where

_FLOAT = ITEM_BYTES["float32"]


def softmax_row(
    emit: Emitter, scores: Int, lowest: Int, position: Int, first: Int, inverse: Int, *, cap: float | None
) -> None:
    """Turn scores into exp(score - maximum), 0 for masked keys; write 1 over their sum to every lane of `inverse`.

    Positions lowest to position are seen. scores: address of the score of position `first`, a multiple of LANES; scores
    of whole vectors are there. With a cap, a score is cap * tanh(stored score). A lane is a position modulo LANES.
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

    peak = emit.loop(begin, end, LANES, find_highest, [emit.vec(float("-inf"))])[0].highest()

    def weigh(at: Int, sums: list[Vec]) -> list[Vec]:
        place = scores + (at - first) * _FLOAT
        weight = where(emit, seen(at), exp(emit.load(place, "float32") - peak), emit.vec(0.0))
        emit.store(weight, place, "float32")
        return [sums[0] + weight]

    sums = emit.loop(begin, end, LANES, weigh, [emit.vec(0.0)])
    emit.store(emit.vec(1.0) / sums[0].total(), inverse, "float32")
