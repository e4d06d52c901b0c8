"""A draw from what top_k and top_p leave of each row's most likely tokens, in one program.

It rounds where the sampler's operations over whole rows round, and adds in their order, so a row's token is the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import exp, where
from executor_svc.cpu.kernels.codegen.team import KernelLaunch, LaunchProgram, Team
from executor_svc.cpu.kernels.drawing.mass import PIECE, fold_masses, scaled, weigh_pieces
from executor_svc.cpu.kernels.drawing.noise import VI64, gumbel, in_every_lane, uniform
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.sampling.functions import PrefixDraws
from executor_svc.sampling.row_math import NARROW

_SCRATCH_BYTES = 4 + 8 + 8
"""Of a candidate: its scaled logit, its mass, and the mass up to it."""
_MOST_PROGRAMS = 32
_INFINITY = float("inf")
_F32, _F64, _I64 = ir.FloatType(), ir.DoubleType(), ir.IntType(64)
_VF32, _VF64 = ir.VectorType(_F32, LANES), ir.VectorType(_F64, LANES)
_FIRST = ir.Constant(ir.IntType(32), 0)


class PrefixRace:
    """Draws a token for each of some rows of logits; for use by one thread at a time."""

    def __init__(self, code: Code, team: Team) -> None:
        self._code, self._team = code, team
        self._programs: dict[tuple[int, int, int], _PrefixProgram] = {}
        """By numbers of draws, candidates and tokens; steps have the same few."""

    def draw(self, logits: Tensor, draws: PrefixDraws) -> tuple[IntArray, BoolArray] | None:
        """As `sampling.functions.RowFunctions.draw_prefix`."""
        count, size = draws.ids.shape
        if size % LANES or size >= logits.shape[1]:
            return None
        key = count, size, logits.shape[1]
        if key not in self._programs:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            self._programs[key] = _PrefixProgram(self._code, self._team, *key)
        return self._programs[key].run(logits, draws)


class _PrefixProgram:
    """The launches of so many draws, and the memory that they read and write."""

    def __init__(self, code: Code, team: Team, count: int, size: int, width: int) -> None:
        self._width = width
        self._rows, self._limits, self._keys = (np.zeros(count, np.int64) for _ in range(3))
        self._peak, self._temperature, self._floor = (np.zeros(count, np.float32) for _ in range(3))
        self._top_p, self._totals = np.zeros(count), np.zeros(count)
        self._ids = np.zeros((count, size), np.int64)
        self._tokens, self._decided = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._masses, self._wide = np.zeros((count, width), np.float32), np.zeros((count, NARROW))
        self._scratch = np.zeros((count, size * _SCRATCH_BYTES), np.uint8)
        about = _addresses(self._rows, self._peak, self._temperature, self._floor)
        pieces = -(-width // PIECE)
        choice = (self._ids, self._limits, self._top_p, self._keys, self._totals, self._scratch, self._tokens)
        launches = [
            KernelLaunch(weigh_pieces(code), "totals", 1, pieces, (width, pieces, *about, *_addresses(self._masses))),
            KernelLaunch(
                fold_masses(code, width), "totals", 1, 1, _addresses(self._masses, self._wide, self._totals)
            ),
            KernelLaunch(
                _race_kernel(code), "rows", 1, 1, (width, size, *about, *_addresses(*choice, self._decided))
            ),
        ]  # fmt: skip
        self._program = LaunchProgram(team, launches)

    def run(self, logits: Tensor, draws: PrefixDraws) -> tuple[IntArray, BoolArray]:
        assert logits.is_contiguous()
        whole = draws.whole
        self._rows[:] = whole.rows
        self._rows *= 4 * self._width
        self._rows += logits.data_ptr()
        self._peak[:], self._temperature[:] = whole.peak, whole.temperature
        self._floor[:] = -_INFINITY if whole.floor is None else whole.floor
        self._keys[:], self._ids[:] = whole.keys, draws.ids
        self._limits[:], self._top_p[:] = draws.top_k, draws.top_p
        count = len(self._rows)
        # Masses over the vocabulary only if some row has top_p without top_k.
        needs_totals = any(limit >= self._width for limit in self._limits.tolist())
        self._program.run(totals=count if needs_totals else 0, rows=count)
        return self._tokens.copy(), self._decided.astype(np.bool_)


def _addresses(*arrays: NDArray[Any]) -> tuple[int, ...]:
    return tuple(each.ctypes.data for each in arrays)


def _race_kernel(code: Code) -> str:
    """Add the kernel; returns its name. Items: one for each row.

    Arguments: rows, width, size, addresses of rows of logits [rows] int64, peaks, temperatures, floors [rows] float32,
    ids [rows, size] int64, best first, limits [rows] int64 of top_k, top_p [rows] float64, keys [rows] int64, total
    masses [rows] float64 (of rows without top_k), scratch [rows, size] of `_SCRATCH_BYTES`, tokens [rows] int64,
    whether the candidates were enough [rows] int64.
    """

    def body(
        emit: Emitter, item: Int, _: Int, rows: Int, width: Int, size: Int, sources: Int, peaks: Int,
        temperatures: Int, floors: Int, ids: Int, limits: Int, top_p: Int, keys: Int, totals: Int, scratch: Int,
        tokens: Int, decided: Int,
    ) -> None:  # fmt: skip
        builder, at = emit.builder, item * 8
        x, own_ids = emit.load_int(sources + at), ids + item * size * 8
        y = scratch + item * size * _SCRATCH_BYTES
        mass, running = y + size * 4, y + size * 12
        limit = emit.load_int(limits + at)
        shape = [emit.load_all(each + item * 4, "float32") for each in (peaks, temperatures, floors)]

        def weigh(place: Int, _: list[Vec]) -> None:
            number = scaled(emit, _gathered(emit, x, own_ids + place * 8), *shape)
            emit.store(number, y + place * 4, "float32")
            taken = builder.icmp_signed("<", _numbers_from(emit, place), in_every_lane(emit, limit))
            wide = builder.fpext(exp(number).value, _VF64)
            _store_wide(emit, builder.select(taken, wide, ir.Constant(_VF64, [0.0] * LANES)), mass + place * 8)

        def add(index: Int, carried: list[Vec]) -> list[Vec]:
            total = builder.fadd(carried[0].value, builder.load(emit.pointer(mass + index * 8, _F64)))
            builder.store(total, emit.pointer(running + index * 8, _F64))
            return [Vec(emit, total)]

        emit.loop(0, size, LANES, weigh)
        (end,) = emit.loop(0, size, 1, add, [Vec(emit, ir.Constant(_F64, 0.0))])
        limited = limit.less(width)
        whole = builder.select(limited, end.value, builder.load(emit.pointer(totals + at, _F64)))
        share = builder.load(emit.pointer(top_p + at, _F64))
        is_on = builder.fcmp_ordered("<", share, ir.Constant(_F64, 1.0))
        target = builder.select(is_on, builder.fmul(share, whole), ir.Constant(_F64, _INFINITY))
        token = _winner(emit, size, (own_ids, y, mass, running), target, emit.load_int(keys + at))
        builder.store(token, emit.pointer(tokens + at, _I64))
        last = builder.load(emit.pointer(mass + (size - 1) * 8, _F64))
        enough = builder.or_(
            builder.or_(limited, builder.fcmp_ordered(">=", end.value, target)),
            builder.fcmp_ordered("==", last, ir.Constant(_F64, 0.0)),
        )
        builder.store(builder.zext(enough, _I64), emit.pointer(decided + at, _I64))

    return code.kernel("race_of_prefix", 15, body)


def _winner(emit: Emitter, size: Int, places: tuple[Int, Int, Int, Int], target: Any, key: Int) -> Any:
    """Return the id, int64, of the kept candidate with the largest score, the lowest of equal ones.

    places: of ids, scaled logits, masses, and masses up to each. top_p keeps every token with less than `target` of the
    mass before it; the first is always kept.
    """
    builder, (ids, y, mass, running) = emit.builder, places
    noise_key, lanes_target = in_every_lane(emit, key), _every(emit, target)

    def look(place: Int, best: list[Vec]) -> list[Vec]:
        own, up_to = (_load_wide(emit, each + place * 8) for each in (mass, running))
        before = builder.fsub(up_to, own)
        kept = builder.and_(
            builder.fcmp_ordered("<", before, lanes_target),
            builder.fcmp_ordered(">", own, ir.Constant(_VF64, [0.0] * LANES)),
        )
        is_first = builder.icmp_signed("==", _numbers_from(emit, place), ir.Constant(VI64, [0] * LANES))
        candidates = builder.load(emit.pointer(ids + place * 8, VI64))
        candidates.align = 8
        number = where(emit, builder.or_(kept, is_first), emit.load(y + place * 4, "float32"), emit.vec(-_INFINITY))
        score = number + gumbel(uniform(emit, noise_key, candidates))
        named = Vec(emit, builder.sitofp(candidates, _VF32))  # ids below 2^24 are floats
        largest, its_id = best
        ahead = builder.fcmp_ordered(">", score.value, largest.value)
        level = builder.fcmp_ordered("==", score.value, largest.value)
        lower = builder.fcmp_ordered("<", named.value, its_id.value)
        better = builder.or_(ahead, builder.and_(level, lower))
        return [where(emit, better, score, largest), where(emit, better, named, its_id)]

    largest, its_id = emit.loop(0, size, LANES, look, [emit.vec(-_INFINITY), emit.vec(_INFINITY)])
    is_highest = builder.fcmp_ordered("==", largest.value, largest.highest().value)
    lowest = where(emit, is_highest, its_id * -1.0, emit.vec(-_INFINITY)).highest() * -1.0
    return builder.fptosi(builder.extract_element(lowest.value, _FIRST), _I64)


def _gathered(emit: Emitter, x: Int, ids: Int) -> Vec:
    """Return the numbers of x at LANES ids."""
    numbers = ir.Constant(_VF32, ir.Undefined)
    for lane in range(LANES):
        at = x + emit.load_int(ids + lane * 8) * 4
        number = emit.builder.load(emit.pointer(at, _F32))
        numbers = emit.builder.insert_element(numbers, number, ir.Constant(ir.IntType(32), lane))
    return Vec(emit, numbers)


def _numbers_from(emit: Emitter, place: Int) -> Any:
    """Return place to place + LANES - 1, int64."""
    return emit.builder.add(in_every_lane(emit, place), ir.Constant(VI64, list(range(LANES))))


def _every(emit: Emitter, number: Any) -> Any:
    """Return a float64 in every lane."""
    one = emit.builder.insert_element(ir.Constant(_VF64, ir.Undefined), number, _FIRST)
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return emit.builder.shuffle_vector(one, ir.Constant(_VF64, ir.Undefined), lanes)


def _load_wide(emit: Emitter, address: Int) -> Any:
    numbers = emit.builder.load(emit.pointer(address, _VF64))
    numbers.align = 8
    return numbers


def _store_wide(emit: Emitter, numbers: Any, address: Int) -> None:
    emit.builder.store(numbers, emit.pointer(address, _VF64)).align = 8
