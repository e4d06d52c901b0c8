"""The noise of draws, in kernels: `sampling.noise.uniform` and standard Gumbel noise of it, by the token."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Int, Vec, repeated
from executor_svc.cpu.kernels.codegen.functions import log, where
from executor_svc.sampling.noise import BELOW_ONE, GOLDEN_GAMMA, MIX_1, MIX_2

VI64 = ir.VectorType(ir.IntType(64), LANES)
_VF64, _VF32 = (ir.VectorType(element, LANES) for element in (ir.DoubleType(), ir.FloatType()))
_TWO_TO_52_BITS = 0x4330000000000000


def uniform(emit: Emitter, key: Any, ids: Any) -> Vec:
    """Return `noise.uniform` of a key and ids, [LANES] int64 each."""
    builder = emit.builder
    z = builder.add(key, builder.mul(ids, every_long(GOLDEN_GAMMA)))
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z = builder.mul(builder.xor(z, builder.lshr(z, every_long(shift))), every_long(factor))
    z = builder.xor(z, builder.lshr(z, every_long(31)))
    # A number n below 2^52 in the mantissa of 2^52 is 2^52 + n; n plus a half is exact.
    bits = builder.or_(builder.lshr(z, every_long(12)), every_long(_TWO_TO_52_BITS))
    number = builder.fsub(builder.bitcast(bits, _VF64), ir.Constant(_VF64, [2.0**52 - 0.5] * LANES))
    scaled = builder.fmul(number, ir.Constant(_VF64, [2.0**-52] * LANES))
    v = Vec(emit, builder.fptrunc(scaled, _VF32))
    return where(emit, builder.fcmp_ordered(">", v.value, emit.vec(BELOW_ONE).value), emit.vec(BELOW_ONE), v)


def gumbel(v: Vec) -> Vec:
    """Return -log(-log1p(-v)) for v from 2^-53 to 1 - 2^-24."""
    emit = v.emit
    rest = emit.vec(1.0) - v
    # 1 - v is rest + lost, and log(rest + lost) nearly log(rest) + lost / rest.
    lost = (emit.vec(1.0) - rest) - v
    return log((log(rest) + lost / rest) * -1.0) * -1.0


def in_every_lane(emit: Emitter, number: Int) -> Any:
    """Return a 64-bit integer in every lane."""
    nothing, i32 = ir.Constant(VI64, ir.Undefined), ir.IntType(32)
    one = emit.builder.insert_element(nothing, number.value, ir.Constant(i32, 0))
    return emit.builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(i32, LANES), [0] * LANES))


def every_long(number: int) -> Any:
    """Return a constant of 64 bits in every lane."""
    return repeated(VI64, number)
