"""exp, expm1, log, softplus and tanh of vectors, from IEEE 754 arithmetic: the same bits in each lane and processor.

Ranges, splits and coefficients are those of expf, logf and tanhf in Moshier's Cephes library (single/expf.c, logf.c,
tanhf.c).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from executor_svc.cpu.kernels.codegen.emit import LANES, Emitter, Vec, every

_VI32 = ir.VectorType(ir.IntType(32), LANES)
_VF32 = ir.VectorType(ir.FloatType(), LANES)

_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_LOWEST, _EXP_HIGHEST = -87.0, 88.0
_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
_SQRT_HALF_BITS = 0x3F3504F3
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_TANH_SERIES_BELOW = 0.625
_SOFTPLUS_LINEAR_ABOVE = 20.0

# A float below 2^22 plus this constant, read as an integer, is the constant's integer plus the rounded float.
_ROUNDER = 12582912.0
_ROUNDER_BITS = 0x4B400000


def exp(x: Vec) -> Vec:
    """e to the x, within 2 units of the last place; 0 below -87, infinity above 88, NaN for NaN."""
    emit, builder = x.emit, x.emit.builder
    above_one, power = _parts_of_exp(x)
    value = (above_one + 1.0) * power
    tiny = builder.fcmp_ordered("<", x.value, emit.vec(_EXP_LOWEST).value)
    huge = builder.fcmp_unordered(">", x.value, emit.vec(_EXP_HIGHEST).value)
    return where(emit, tiny, emit.vec(0.0), where(emit, huge, x * float("inf"), value))


def expm1(x: Vec) -> Vec:
    """e to the x, less 1, of numbers up to 88, within 2 units of the last place; NaN for NaN."""
    emit, builder = x.emit, x.emit.builder
    tiny = builder.fcmp_ordered("<", x.value, emit.vec(_EXP_LOWEST).value)
    above_one, power = _parts_of_exp(x)
    return where(emit, tiny, emit.vec(-1.0), above_one.times_plus(power, power - 1.0))


def _parts_of_exp(x: Vec) -> tuple[Vec, Vec]:
    """Return r and a power of 2 p with e to the x = (1 + r) * p, for -87 to 88."""
    emit, builder = x.emit, x.emit.builder
    shifted = x.times_plus(_LOG2_E, _ROUNDER)
    whole = shifted - _ROUNDER
    rest = whole.times_plus(-_LN2_LOW, whole.times_plus(-_LN2_HIGH, x))
    series = emit.vec(_EXP[0])
    for coefficient in _EXP[1:]:
        series = series.times_plus(rest, coefficient)
    exponent = builder.sub(builder.bitcast(shifted.value, _VI32), every(_ROUNDER_BITS - 127))
    power = Vec(emit, builder.bitcast(builder.shl(exponent, every(23)), _VF32))
    return series.times_plus(rest * rest, rest), power


def log(x: Vec) -> Vec:
    """The natural logarithm of positive normal numbers, within 1 unit of the last place; undefined for others."""
    emit, builder = x.emit, x.emit.builder
    # Bits above those of sqrt(1/2) are the exponent of a mantissa from sqrt(1/2) to sqrt(2).
    above = builder.sub(builder.bitcast(x.value, _VI32), every(_SQRT_HALF_BITS))
    exponent = builder.ashr(above, every(23))
    mantissa = builder.add(builder.and_(above, every(0x7FFFFF)), every(_SQRT_HALF_BITS))
    power = Vec(emit, builder.sitofp(exponent, _VF32))
    f = Vec(emit, builder.bitcast(mantissa, _VF32)) - 1.0
    square = f * f
    series = emit.vec(_LOG[0])
    for coefficient in _LOG[1:]:
        series = series.times_plus(f, coefficient)
    rest = power.times_plus(_LN2_LOW, square.times_plus(-0.5, series * f * square))
    return power.times_plus(_LN2_HIGH, f + rest)


def softplus(x: Vec) -> Vec:
    """log(1 + exp(x)), within a few units of the last place; x above 20, as PyTorch has it; NaN for NaN.

    log(1 + e) is log(u) * e / (u - 1) for the rounded u = 1 + e (Kahan), which does not lose the bits of a small e.
    """
    emit, builder = x.emit, x.emit.builder
    small = exp(x)
    above = small + 1.0
    ratio = small / (above - 1.0)
    is_one = builder.fcmp_ordered("==", above.value, emit.vec(1.0).value)
    value = where(emit, is_one, small, log(above) * ratio)
    linear = builder.fcmp_ordered(">", x.value, emit.vec(_SOFTPLUS_LINEAR_ABOVE).value)
    return where(emit, linear, x, value)


def tanh(x: Vec) -> Vec:
    """The hyperbolic tangent, within a few units of the last place; NaN for NaN."""
    emit, builder = x.emit, x.emit.builder
    size = emit.call("llvm.fabs.v16f32", x)
    falling = exp(size * -2.0)
    far = emit.call("llvm.copysign.v16f32", (emit.vec(1.0) - falling) / (falling + 1.0), x)
    square = x * x
    series = emit.vec(_TANH[0])
    for coefficient in _TANH[1:]:
        series = series.times_plus(square, coefficient)
    near = (series * square).times_plus(x, x)
    return where(emit, builder.fcmp_ordered("<", size.value, emit.vec(_TANH_SERIES_BELOW).value), near, far)


def where(emit: Emitter, condition: Any, chosen: Vec, other: Vec) -> Vec:
    """Return, for each lane, `chosen` if the condition holds, else `other`."""
    return Vec(emit, emit.builder.select(condition, chosen.value, other.value))
