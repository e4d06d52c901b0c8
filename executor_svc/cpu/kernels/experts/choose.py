"""The experts that rows choose, and what these count: the kernel of `device.experts.Router`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.argmax import lane_numbers
from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, LANES, Dtype, Emitter, Int, Vec, pieces
from executor_svc.cpu.kernels.codegen.functions import exp, where
from executor_svc.device.experts import Router

_FLOAT = 4
_LOWEST = float("-inf")
_I64 = ir.IntType(64)


def scratch_bytes(router: Router) -> int:
    """Return the bytes that a thread needs: scores, and what the choice is by, of each expert."""
    return 2 * _padded(router.num_experts) * _FLOAT


def choose(code: Code, router: Router, dtype: Dtype, rounded: Dtype) -> str:
    """Add the kernel of a router; returns its name.

    Items: one for each row. Arguments: rows, logits [rows, E] of dtype, bias and scales [E] float32 or 0, ids [rows, K]
    int64, weights [rows, K] float32, scratch and its bytes by thread. rounded: the model's dtype.
    """

    def body(
        emit: Emitter,
        item: Int,
        thread: Int,
        _: Int,
        logits: Int,
        bias: Int,
        scales: Int,
        ids: Int,
        weights: Int,
        scratch: Int,
        stride: Int,
    ) -> None:
        scores = scratch + thread * stride
        row = _Row(emit, router, rounded, scores, scores + _padded(router.num_experts) * _FLOAT)
        row.score(logits + item * (router.num_experts * ITEM_BYTES[dtype]), dtype, bias)
        if router.groups > 1:
            row.keep_groups()
        chosen = ids + item * (router.num_chosen * 8)
        into = weights + item * (router.num_chosen * _FLOAT)
        row.choose(chosen, into)
        row.weigh(chosen, into, scales)

    return code.kernel(f"choose_{router}_{dtype}_{rounded}".replace('"', ""), 8, body)


def _padded(count: int) -> int:
    return -(-count // LANES) * LANES


class _Row:
    """Emits the steps of one row. A number that is one for the whole row is in every lane of a vector."""

    def __init__(self, emit: Emitter, router: Router, rounded: Dtype, scores: Int, choices: Int) -> None:
        """scores, choices: addresses of E float32 each, in whole vectors."""
        self._emit, self._router, self._rounded = emit, router, rounded
        self._scores, self._choices = scores, choices

    def score(self, logits: Int, dtype: Dtype, bias: Int) -> None:
        """Write scores, and with the bias what the choice is by; lanes behind the last expert are never chosen."""
        emit, router = self._emit, self._router
        parts = pieces(router.num_experts)
        found = [emit.load(logits + start * ITEM_BYTES[dtype], dtype, count) for start, count in parts]
        inside = [emit.first(emit.integer(count)) for _, count in parts]
        if router.scores == "softmax":
            found = self._softmax(found, inside)
        elif router.scores == "sigmoid":
            found = [emit.vec(1.0) / (exp(each * -1.0) + 1.0) for each in found]
        if router.rounded_scores:
            found = [each.rounded(self._rounded) for each in found]
        for (start, count), score, here in zip(parts, found, inside, strict=True):
            emit.store(score, self._scores + start * _FLOAT, "float32")
            emit.store(where(emit, here, score, emit.vec(_LOWEST)), self._choices + start * _FLOAT, "float32")

            def add(start: int = start, count: int = count, score: Vec = score) -> None:
                emit.store(
                    score + emit.load(bias + start * _FLOAT, "float32", count),
                    self._choices + start * _FLOAT,
                    "float32",
                    count,
                )

            emit.when(emit.builder.not_(bias.equals(0)), add)

    def _softmax(self, logits: list[Vec], inside: list[Any]) -> list[Vec]:
        emit = self._emit
        peak = emit.vec(_LOWEST)
        for logit, here in zip(logits, inside, strict=True):
            peak = where(emit, here, logit, emit.vec(_LOWEST)).larger(peak)
        peak, sums, found = peak.highest(), emit.vec(0.0), []
        for logit, here in zip(logits, inside, strict=True):
            found.append(where(emit, here, exp(logit - peak), emit.vec(0.0)))
            sums = sums + found[-1]
        total = sums.total()
        return [each / total for each in found]

    def keep_groups(self) -> None:
        """Let none be chosen outside of the best groups."""
        emit, router = self._emit, self._router
        size = router.num_experts // router.groups
        worth = []
        for group in range(router.groups):
            start = self._choices + group * size * _FLOAT

            def look(index: Int, best: list[Vec], start: Int = start) -> list[Vec]:
                value = emit.load_all(start + index * _FLOAT, "float32")
                second = where(emit, _above(emit, value, best[0]), best[0], value.larger(best[1]))
                return [value.larger(best[0]), second]

            best = emit.loop(0, size, 1, look, [emit.vec(_LOWEST), emit.vec(_LOWEST)])
            worth.append(best[0] + best[1] if router.two_best and size > 1 else best[0])
        for group, own in enumerate(worth):
            before = [
                (other, index < group) for index, other in enumerate(worth) if index != group
            ]  # groups that are better, or as good and of a lower index
            rank = emit.vec(0.0)
            for other, first in before:
                ahead = emit.builder.fcmp_ordered(">=" if first else ">", other.value, own.value)
                rank = rank + where(emit, ahead, emit.vec(1.0), emit.vec(0.0))
            dropped = emit.builder.extract_element(
                emit.builder.fcmp_ordered(">=", rank.value, emit.vec(float(router.kept_groups)).value),
                ir.Constant(ir.IntType(32), 0),
            )
            start = self._choices + group * size * _FLOAT

            def drop(start: Int = start) -> None:
                for offset, count in pieces(size):
                    emit.store(emit.vec(_LOWEST), start + offset * _FLOAT, "float32", count)

            emit.when(dropped, drop)

    def choose(self, ids: Int, weights: Int) -> None:
        """Write the chosen, the highest first, and their scores."""
        emit, router = self._emit, self._router

        def pick(number: Int, _: list[Vec]) -> None:
            chosen = self._highest()
            emit.builder.store(chosen.value, emit.pointer(ids + number * 8, _I64))
            score = emit.load_all(self._scores + chosen * _FLOAT, "float32")
            if router.weighing == "sparsemixer":
                score = self._share(score)
            emit.store(score, weights + number * _FLOAT, "float32", 1)
            emit.store(emit.vec(_LOWEST), self._choices + chosen * _FLOAT, "float32", 1)

        emit.loop(0, router.num_chosen, 1, pick)

    def _highest(self) -> Int:
        """Return the expert whose choice is highest, the lowest index of several; 0 where there is no number."""
        emit = self._emit

        def look(place: Int, best: list[Vec]) -> list[Vec]:
            value = emit.load(self._choices + place * _FLOAT, "float32")
            larger = emit.builder.fcmp_ordered(">", value.value, best[0].value)
            return [where(emit, larger, value, best[0]), where(emit, larger, best[2], best[1]), best[2] + float(LANES)]

        first = [emit.vec(_LOWEST), emit.vec(0.0), lane_numbers(emit)]
        largest, at, _ = emit.loop(0, _padded(self._router.num_experts), LANES, look, first)
        here = emit.builder.fcmp_ordered("==", largest.value, largest.highest().value)
        lowest = where(emit, here, at * -1.0, emit.vec(_LOWEST)).highest() * -1.0
        number = emit.builder.extract_element(lowest.value, ir.Constant(ir.IntType(32), 0))
        return Int(emit, emit.builder.fptosi(number, _I64))

    def _share(self, best: Vec) -> Vec:
        """Return the share of the best logit among those near it that are not chosen yet."""
        emit, dtype = self._emit, self._rounded
        limit = emit.vec(2 * self._router.jitter).rounded(dtype)

        def look(place: Int, so_far: list[Vec]) -> list[Vec]:
            logit = emit.load(self._choices + place * _FLOAT, "float32")
            distance = (best - logit).rounded(dtype) / logit.larger(logit * -1.0).larger(best)
            near = emit.builder.fcmp_unordered("<=", distance.rounded(dtype).value, limit.value)
            near = emit.builder.and_(near, emit.builder.fcmp_ordered(">", logit.value, emit.vec(_LOWEST).value))
            return [so_far[0] + where(emit, near, exp(logit - best), emit.vec(0.0))]

        (total,) = emit.loop(0, _padded(self._router.num_experts), LANES, look, [emit.vec(0.0)])
        return emit.vec(1.0) / total.total()

    def weigh(self, ids: Int, weights: Int, scales: Int) -> None:
        """Turn the scores of the chosen into their weights."""
        emit, router = self._emit, self._router
        if router.weighing == "shares":
            total = self._each(weights, lambda weight, total: total + weight, emit.vec(0.0)) + router.epsilon
            self._update(weights, lambda weight: weight / total.larger(emit.vec(router.least_sum)))
        elif router.weighing == "softmax":
            peak = emit.load_all(weights, "float32")  # the first is the highest
            self._update(weights, lambda weight: exp(weight - peak))
            total = self._each(weights, lambda weight, total: total + weight, emit.vec(0.0))
            self._update(weights, lambda weight: weight / total)
        elif router.weighing == "sigmoid":
            self._update(weights, lambda weight: emit.vec(1.0) / (exp(weight * -1.0) + 1.0))
        if router.factor != 1.0:
            self._update(weights, lambda weight: weight * router.factor)

        def scale() -> None:
            def one(number: Int, _: list[Vec]) -> None:
                at = weights + number * _FLOAT
                scale = emit.load_all(scales + emit.load_int(ids + number * 8) * _FLOAT, "float32")
                emit.store(emit.load_all(at, "float32") * scale, at, "float32", 1)

            emit.loop(0, router.num_chosen, 1, one)

        emit.when(emit.builder.not_(scales.equals(0)), scale)
        if router.rounded and self._rounded != "float32":
            self._update(weights, lambda weight: weight.rounded(self._rounded))

    def _each(self, weights: Int, add: Callable[[Vec, Vec], Vec], first: Vec) -> Vec:
        emit = self._emit

        def one(number: Int, so_far: list[Vec]) -> list[Vec]:
            return [add(emit.load_all(weights + number * _FLOAT, "float32"), so_far[0])]

        return emit.loop(0, self._router.num_chosen, 1, one, [first])[0]

    def _update(self, weights: Int, change: Callable[[Vec], Vec]) -> None:
        emit = self._emit

        def one(number: Int, _: list[Vec]) -> None:
            at = weights + number * _FLOAT
            emit.store(change(emit.load_all(at, "float32")), at, "float32", 1)

        emit.loop(0, self._router.num_chosen, 1, one)


def _above(emit: Emitter, value: Vec, best: Vec) -> Any:
    return emit.builder.fcmp_ordered(">", value.value, best.value)
