"""Kernels of the sampler's functions: from IEEE 754 arithmetic, so their bits depend on no processor and no level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import exp
from executor_svc.cpu.kernels.codegen.team import KernelLaunch, LaunchProgram, Team
from executor_svc.cpu.kernels.drawing.noise import VI64, every_long, gumbel, in_every_lane, uniform
from executor_svc.cpu.kernels.drawing.prefix import PrefixRace
from executor_svc.cpu.kernels.drawing.race import Race
from executor_svc.cpu.kernels.drawing.standings import RowStandings
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.portable_math import log as portable_log
from executor_svc.sampling.functions import PrefixDraws, Standings, WholeDraws

_PIECE = 8192
"""Numbers of a row that an item computes."""
_VI1 = ir.VectorType(ir.IntType(1), LANES)


class CpuRowFunctions:
    """Implements `sampling.functions.RowFunctions` with a code's kernels; for use by one thread at a time."""

    def __init__(self, code: Code, team: Team) -> None:
        self._team = team
        self._exp, self._gumbel = _exp_kernel(code), _gumbel_kernel(code)
        self._race, self._prefix_race = Race(code, team), PrefixRace(code, team)
        self._standings = RowStandings(code, team)
        self._programs: dict[tuple[str, int], LaunchProgram] = {}
        """By kernel and pieces of a row: to make one takes longer than to run it for few rows."""

    def exp(self, x: Tensor, shift: Tensor) -> Tensor:
        assert x.is_contiguous()
        y, shift = torch.empty_like(x), shift.contiguous()
        self._run(self._exp, x.shape, x.data_ptr(), shift.data_ptr(), y.data_ptr())
        return y

    def log(self, x: Tensor) -> Tensor:
        return torch.tensor([portable_log(value) for value in x[:, 0].tolist()], dtype=torch.float64)[:, None]

    def gumbel(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        keys, token_ids = keys.contiguous(), token_ids.contiguous()
        width = token_ids.shape[-1]
        y = torch.empty((keys.shape[0], width), dtype=torch.float32)
        row_bytes = 8 * width if token_ids.dim() == 2 else 0
        self._run(self._gumbel, y.shape, keys.data_ptr(), token_ids.data_ptr(), row_bytes, y.data_ptr())
        return y

    def draw(self, logits: Tensor, draws: WholeDraws) -> IntArray | None:
        return self._race.draw(logits, draws)

    def draw_prefix(self, logits: Tensor, draws: PrefixDraws) -> tuple[IntArray, BoolArray] | None:
        return self._prefix_race.draw(logits, draws)

    def standings(self, logits: Tensor, rows: IntArray, tokens: IntArray) -> Standings | None:
        return self._standings.find(logits, rows, tokens)

    def _run(self, kernel: str, shape: torch.Size, *arguments: int) -> None:
        rows, width = shape
        pieces = -(-width // _PIECE)
        program = self._programs.get((kernel, pieces))
        if program is None:
            launch = KernelLaunch(kernel, "rows", 1, pieces, (width, pieces, *arguments))
            program = self._programs[kernel, pieces] = LaunchProgram(self._team, [launch])
        program.set_arguments(width, pieces, *arguments)
        program.run(rows=rows)


def _exp_kernel(code: Code) -> str:
    """Add the kernel y = exp(x - shift); items: pieces of rows.

    Arguments: rows, width, pieces of a row, x [rows, width], shift [rows], y [rows, width], all float32.
    """

    def body(emit: Emitter, item: Int, _: Int, rows: Int, width: Int, pieces: Int, x: Int, shift: Int, y: Int) -> None:
        row = item // pieces
        from_x, into = x + row * width * 4, y + row * width * 4
        subtracted = emit.load_all(shift + row * 4, "float32")

        def vector(place: Int, count: Int | None) -> None:
            at = from_x + place * 4
            number = emit.load(at, "float32") if count is None else emit.load_some(at, "float32", count)
            _store(emit, exp(number - subtracted), into + place * 4, count)

        _each_vector(emit, item % pieces, width, vector)

    return code.kernel("exp_of_rows", 6, body)


def _gumbel_kernel(code: Code) -> str:
    """Add the kernel y = -log(-log1p(-v)) of v = `noise.uniform` of keys and ids; items: pieces of rows.

    Arguments: rows, width, pieces of a row, keys [rows] int64, ids int64, bytes from a row of ids to the next (0: all
    rows have the same), y [rows, width] float32.
    """

    def body(
        emit: Emitter,
        item: Int,
        _: Int,
        rows: Int,
        width: Int,
        pieces: Int,
        keys: Int,
        ids: Int,
        row_bytes: Int,
        y: Int,
    ) -> None:
        row = item // pieces
        from_ids, into = ids + row * row_bytes, y + row * width * 4
        key = in_every_lane(emit, emit.load_int(keys + row * 8))

        def vector(place: Int, count: Int | None) -> None:
            noise = gumbel(uniform(emit, key, _load_ids(emit, from_ids + place * 8, count)))
            _store(emit, noise, into + place * 4, count)

        _each_vector(emit, item % pieces, width, vector)

    return code.kernel("gumbel_of_rows", 7, body)


def _each_vector(emit: Emitter, piece: Int, width: Int, body: Callable[[Int, Int | None], None]) -> None:
    """Emit body(place, None) for each whole vector of a piece of a row, and body(place, numbers left) for the rest."""
    start = piece * _PIECE
    end = (start + _PIECE).least(width)
    whole = end - (end - start) % LANES

    def at(place: Int, _: list[Vec]) -> None:
        body(place, None)

    emit.loop(start, whole, LANES, at)
    emit.when(whole.less(end), lambda: body(whole, end - whole))


def _store(emit: Emitter, vector: Vec, address: Int, count: Int | None) -> None:
    if count is None:
        emit.store(vector, address, "float32")
    else:
        emit.store_some(vector, address, "float32", count)


def _load_ids(emit: Emitter, address: Int, count: Int | None) -> Any:
    if count is None:
        raw = emit.builder.load(emit.pointer(address, VI64))
        raw.align = 8
        return raw
    i32 = ir.IntType(32)
    function = emit.declare("llvm.masked.load.v16i64.p0", VI64, [VI64.as_pointer(), i32, _VI1, VI64])
    arguments = [emit.pointer(address, VI64), ir.Constant(i32, 8), emit.first(count), every_long(0)]
    return emit.builder.call(function, arguments)
