"""Kernels of the sampler's functions: from IEEE 754 arithmetic, so their bits depend on no processor and no level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Int, Vec, repeated
from executor_svc.cpu.kernels.codegen.functions import exp, log, where
from executor_svc.cpu.kernels.codegen.team import KernelLaunch, LaunchProgram, Team
from executor_svc.portable_math import log as portable_log
from executor_svc.sampling.noise import BELOW_ONE, GOLDEN_GAMMA, MIX_1, MIX_2

_PIECE = 8192
"""Numbers of a row that an item computes."""
_VI64, _VF64, _VF32, _VI1 = (
    ir.VectorType(element, LANES) for element in (ir.IntType(64), ir.DoubleType(), ir.FloatType(), ir.IntType(1))
)
_TWO_TO_52_BITS = 0x4330000000000000


class CpuRowFunctions:
    """Implements `sampling.functions.RowFunctions` with a code's kernels; for use by one thread at a time."""

    def __init__(self, code: Code, team: Team) -> None:
        self._team = team
        self._exp, self._gumbel = _exp_kernel(code), _gumbel_kernel(code)

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

    def _run(self, kernel: str, shape: torch.Size, *arguments: int) -> None:
        rows, width = shape
        pieces = -(-width // _PIECE)
        LaunchProgram(self._team, [KernelLaunch(kernel, "rows", 1, pieces, (width, pieces, *arguments))]).run(rows=rows)


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
        key = _in_every_lane(emit, emit.load_int(keys + row * 8))

        def vector(place: Int, count: Int | None) -> None:
            noise = _gumbel(_uniform(emit, key, _load_ids(emit, from_ids + place * 8, count)))
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


def _uniform(emit: Emitter, key: Any, ids: Any) -> Vec:
    """Return `noise.uniform` of a key and ids, [LANES] int64 each."""
    builder = emit.builder
    z = builder.add(key, builder.mul(ids, _every(GOLDEN_GAMMA)))
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z = builder.mul(builder.xor(z, builder.lshr(z, _every(shift))), _every(factor))
    z = builder.xor(z, builder.lshr(z, _every(31)))
    # A number n below 2^52 in the mantissa of 2^52 is 2^52 + n; n plus a half is exact.
    bits = builder.or_(builder.lshr(z, _every(12)), _every(_TWO_TO_52_BITS))
    number = builder.fsub(builder.bitcast(bits, _VF64), ir.Constant(_VF64, [2.0**52 - 0.5] * LANES))
    scaled = builder.fmul(number, ir.Constant(_VF64, [2.0**-52] * LANES))
    v = Vec(emit, builder.fptrunc(scaled, _VF32))
    return where(emit, builder.fcmp_ordered(">", v.value, emit.vec(BELOW_ONE).value), emit.vec(BELOW_ONE), v)


def _gumbel(v: Vec) -> Vec:
    """Return -log(-log1p(-v)) for v from 2^-53 to 1 - 2^-24."""
    emit = v.emit
    rest = emit.vec(1.0) - v
    # 1 - v is rest + lost, and log(rest + lost) nearly log(rest) + lost / rest.
    lost = (emit.vec(1.0) - rest) - v
    return log((log(rest) + lost / rest) * -1.0) * -1.0


def _load_ids(emit: Emitter, address: Int, count: Int | None) -> Any:
    if count is None:
        raw = emit.builder.load(emit.pointer(address, _VI64))
        raw.align = 8
        return raw
    i32 = ir.IntType(32)
    function = emit.declare("llvm.masked.load.v16i64.p0", _VI64, [_VI64.as_pointer(), i32, _VI1, _VI64])
    arguments = [emit.pointer(address, _VI64), ir.Constant(i32, 8), emit.first(count), _every(0)]
    return emit.builder.call(function, arguments)


def _in_every_lane(emit: Emitter, number: Int) -> Any:
    nothing, i32 = ir.Constant(_VI64, ir.Undefined), ir.IntType(32)
    one = emit.builder.insert_element(nothing, number.value, ir.Constant(i32, 0))
    return emit.builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(i32, LANES), [0] * LANES))


def _every(number: int) -> Any:
    return repeated(_VI64, number)
