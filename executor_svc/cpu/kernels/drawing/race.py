"""A draw from the whole vocabulary in one kernel: the largest of scaled logits plus Gumbel noise, piece by piece.

It rounds where the sampler's operations over whole rows round, so a row's token is the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import where
from executor_svc.cpu.kernels.codegen.team import KernelLaunch, LaunchProgram, Team
from executor_svc.cpu.kernels.drawing.mass import scaled
from executor_svc.cpu.kernels.drawing.noise import VI64, gumbel, in_every_lane, uniform
from executor_svc.plan.arrays import IntArray
from executor_svc.sampling.functions import WholeDraws

_PIECE = 8192
"""Token ids that an item draws from; their places in it are kept as floats, which represent each."""
_INFINITY = float("inf")
_I64, _F32 = ir.IntType(64), ir.FloatType()


class Race:
    """Draws a token for each of some rows of logits; for use by one thread at a time."""

    def __init__(self, code: Code, team: Team) -> None:
        self._team, self._kernel = team, _race_kernel(code)
        self._program: tuple[tuple[int, ...], LaunchProgram] | None = None
        """For logits of one address, shape and capacity; steps have the same ones."""
        self._room = 0

    def draw(self, logits: Tensor, draws: WholeDraws) -> IntArray:
        """Return the tokens [n] of draws from rows of logits [L, vocab] float32, contiguous."""
        assert logits.is_contiguous()
        count, (num_logits, width) = len(draws.rows), logits.shape
        pieces = -(-width // _PIECE)
        if count > self._room:
            self._make_room(max(count, 2 * self._room), pieces)
        about = logits.data_ptr(), num_logits, width, self._room
        if self._program is None or self._program[0] != about:
            self._make_room(self._room, pieces)
            self._program = about, self._new_program(logits.data_ptr(), width, pieces)
        self._rows[:count], self._keys[:count] = draws.rows, draws.keys
        self._peak[:count], self._temperature[:count] = draws.peak, draws.temperature
        self._floor[:count] = -_INFINITY if draws.floor is None else draws.floor
        self._program[1].run(rows=count)
        scores = self._scores[: count * pieces].reshape(count, pieces)
        # The first of equal ones, as within a piece: ties go to the lowest id.
        best = scores.argmax(axis=1)
        places: IntArray = self._places[: count * pieces].reshape(count, pieces)[np.arange(count), best]
        found: IntArray = places + best * _PIECE
        return found

    def _make_room(self, count: int, pieces: int) -> None:
        self._room, self._program = count, None
        self._rows, self._keys = (np.zeros(count, np.int64) for _ in range(2))
        self._peak, self._temperature, self._floor = (np.zeros(count, np.float32) for _ in range(3))
        self._scores, self._places = np.zeros(count * pieces, np.float32), np.zeros(count * pieces, np.int64)

    def _new_program(self, logits: int, width: int, pieces: int) -> LaunchProgram:
        arrays: tuple[NDArray[Any], ...] = (
            self._rows, self._peak, self._temperature, self._floor, self._keys, self._scores, self._places,
        )  # fmt: skip
        arguments = width, pieces, logits, *(each.ctypes.data for each in arrays)
        return LaunchProgram(self._team, [KernelLaunch(self._kernel, "rows", 1, pieces, arguments)])


def _race_kernel(code: Code) -> str:
    """Add the kernel: of a piece of a row the largest score and its first place; items: pieces of rows.

    Arguments: rows, width, pieces of a row, logits [L, width], row of logits [rows] int64, peaks, temperatures, floors
    [rows], keys [rows] int64, scores [rows, pieces], places [rows, pieces] int64; float32 where nothing else is said.
    """

    def body(
        emit: Emitter, item: Int, _: Int, rows: Int, width: Int, pieces: Int, logits: Int, sources: Int, peaks: Int,
        temperatures: Int, floors: Int, keys: Int, scores: Int, places: Int,
    ) -> None:  # fmt: skip
        row, builder = item // pieces, emit.builder
        start = item % pieces * _PIECE
        length = (start + _PIECE).least(width) - start
        from_x = logits + (emit.load_int(sources + row * 8) * width + start) * 4
        peak, temperature, floor = (emit.load_all(at + row * 4, "float32") for at in (peaks, temperatures, floors))
        key = in_every_lane(emit, emit.load_int(keys + row * 8))
        lanes = ir.Constant(VI64, list(range(LANES)))

        def look(place: Int, best: list[Vec], count: Int | None = None) -> list[Vec]:
            at = from_x + place * 4
            number = emit.load(at, "float32") if count is None else emit.load_some(at, "float32", count)
            ids = builder.add(in_every_lane(emit, start + place), lanes)
            score = scaled(emit, number, peak, temperature, floor) + gumbel(uniform(emit, key, ids))
            if count is not None:
                score = where(emit, emit.first(count), score, emit.vec(-_INFINITY))
            largest, its_place, here = best
            larger = builder.fcmp_ordered(">", score.value, largest.value)
            return [where(emit, larger, score, largest), where(emit, larger, here, its_place), here + float(LANES)]

        numbers = Vec(emit, ir.Constant(ir.VectorType(_F32, LANES), [float(lane) for lane in range(LANES)]))
        whole = length - length % LANES
        best = emit.loop(0, whole, LANES, look, [emit.vec(-_INFINITY), numbers, numbers])
        # No number is left of a row whose width LANES divides: then all lanes are below those found.
        largest, its_place, _here = look(whole, best, length - whole)
        highest = largest.highest()
        is_highest = builder.fcmp_ordered("==", largest.value, highest.value)
        lowest = where(emit, is_highest, its_place * -1.0, emit.vec(-_INFINITY)).highest() * -1.0
        first = ir.Constant(ir.IntType(32), 0)
        score = builder.extract_element(highest.value, first)
        found = builder.fptosi(builder.extract_element(lowest.value, first), _I64)
        builder.store(score, emit.pointer(scores + item * 4, _F32))
        builder.store(found, emit.pointer(places + item * 8, _I64))

    return code.kernel("race_of_rows", 11, body)
