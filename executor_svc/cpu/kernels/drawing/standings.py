"""Where tokens stand in rows of logits: the sum that their probabilities divide by, and how many are ahead.

It rounds and adds as `sampling.row_math.log_sum_exp` does, so a logprob has the same bits.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import where
from executor_svc.cpu.kernels.codegen.team import KernelLaunch, LaunchProgram, Team
from executor_svc.cpu.kernels.drawing.mass import PIECE, fold_masses, weigh_pieces
from executor_svc.plan.arrays import IntArray
from executor_svc.sampling.functions import Standings
from executor_svc.sampling.row_math import NARROW

_ROWS = 8
"""Rows of a launch at most: their masses are kept, and should stay in cache."""
_MOST_PROGRAMS = 4


class RowStandings:
    """Finds where tokens stand in rows of logits; for use by one thread at a time."""

    def __init__(self, code: Code, team: Team) -> None:
        self._code, self._team = code, team
        self._programs: dict[int, _StandingsProgram] = {}
        """By width; a model has one."""

    def find(self, logits: Tensor, rows: IntArray, tokens: IntArray) -> Standings:
        """As `sampling.functions.RowFunctions.standings`."""
        width = logits.shape[1]
        if width not in self._programs:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            self._programs[width] = _StandingsProgram(self._code, self._team, width)
        program = self._programs[width]
        parts = [
            program.run(logits, rows[start : start + _ROWS], tokens[start : start + _ROWS])
            for start in range(0, len(rows), _ROWS)
        ]
        if len(parts) == 1:
            return parts[0]
        return Standings(
            np.concatenate([part.peak for part in parts]),
            np.concatenate([part.total for part in parts]),
            np.concatenate([part.ahead for part in parts]),
        )


class _StandingsProgram:
    """The launches for up to `_ROWS` rows, and the memory that they read and write."""

    def __init__(self, code: Code, team: Team, width: int) -> None:
        self._width, pieces = width, -(-width // PIECE)
        self._rows, self._tokens = (np.zeros(_ROWS, np.int64) for _ in range(2))
        self._peak, self._value = (np.zeros(_ROWS, np.float32) for _ in range(2))
        self._totals, self._ahead = np.zeros(_ROWS), np.zeros((_ROWS, pieces), np.int64)
        self._masses, self._wide = np.zeros((_ROWS, width), np.float32), np.zeros((_ROWS, NARROW))
        # Masses without a temperature and a floor.
        self._ones, self._floor = np.ones(_ROWS, np.float32), np.full(_ROWS, -np.inf, np.float32)
        rows, tokens, peak, value, totals, ahead, masses, wide, ones, floor = (
            each.ctypes.data
            for each in (
                self._rows, self._tokens, self._peak, self._value, self._totals, self._ahead, self._masses, self._wide,
                self._ones, self._floor,
            )
        )  # fmt: skip
        self._program = LaunchProgram(team, [
            KernelLaunch(weigh_pieces(code), "rows", 1, pieces, (width, pieces, rows, peak, ones, floor, masses)),
            KernelLaunch(_count_kernel(code), "rows", 1, pieces, (width, pieces, rows, value, tokens, ahead)),
            KernelLaunch(fold_masses(code, width), "rows", 1, 1, (masses, wide, totals)),
        ])  # fmt: skip

    def run(self, logits: Tensor, rows: IntArray, tokens: IntArray) -> Standings:
        assert logits.is_contiguous()
        count, x = len(rows), logits.numpy()
        self._rows[:count] = rows
        self._rows *= 4 * self._width
        self._rows += logits.data_ptr()
        self._tokens[:count], self._value[:count] = tokens, x[rows, tokens]
        with np.errstate(invalid="ignore"):  # as `row_math.top_ids`
            for place, row in enumerate(rows.tolist()):
                self._peak[place] = x[row].max()
        self._program.run(rows=count)
        return Standings(self._peak[:count].copy(), self._totals[:count].copy(), self._ahead[:count].sum(axis=1))


def _count_kernel(code: Code) -> str:
    """Add the kernel that counts the tokens ahead of one, by logit and then by id; items: pieces of rows.

    Arguments: rows, width, pieces of a row, addresses of rows of logits [rows] int64, the token's logit [rows] float32,
    the token [rows] int64, counts [rows, pieces] int64.
    """

    def body(
        emit: Emitter, item: Int, _: Int, rows: Int, width: Int, pieces: Int, sources: Int, values: Int, tokens: Int,
        counts: Int,
    ) -> None:  # fmt: skip
        builder, row, start = emit.builder, item // pieces, item % pieces * PIECE
        length = (start + PIECE).least(width) - start
        from_x = emit.load_int(sources + row * 8) + start * 4
        value = emit.load_all(values + row * 4, "float32")
        # Relative to the piece, so that 32 bits hold it for any vocabulary.
        token = emit.every(emit.load_int(tokens + row * 8) - start)

        def look(place: Int, found: list[Vec], count: Int | None = None) -> list[Vec]:
            at = from_x + place * 4
            number = emit.load(at, "float32") if count is None else emit.load_some(at, "float32", count)
            level = builder.fcmp_ordered("==", number.value, value.value)
            lower = builder.icmp_signed("<", builder.add(emit.every(place), emit.lanes()), token)
            ahead = builder.or_(builder.fcmp_ordered(">", number.value, value.value), builder.and_(level, lower))
            if count is not None:
                ahead = builder.and_(ahead, emit.first(count))
            return [found[0] + where(emit, ahead, emit.vec(1.0), emit.vec(0.0))]

        whole = length - length % LANES
        found = look(whole, emit.loop(0, whole, LANES, look, [emit.vec(0.0)]), length - whole)
        total = builder.extract_element(found[0].total().value, ir.Constant(ir.IntType(32), 0))
        builder.store(builder.fptosi(total, ir.IntType(64)), emit.pointer(counts + item * 8, ir.IntType(64)))

    return code.kernel("tokens_ahead", 7, body)
