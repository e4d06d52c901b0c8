"""log, exp, pow, cos and sin in float64 with the same bits on every processor.

Only operations that IEEE 754 rounds, in a written order: +, -, *, / and scaling by powers of 2. numpy's and the C
library's own functions choose their code by the processor (SVML for AVX-512, variants with fused multiply-adds), and
their last bits differ. Methods and coefficients are those of Sun's fdlibm (e_log.c, e_exp.c, k_cos.c, k_sin.c; error
below one unit of the last place); the reduction of angles is Cody and Waite's, in three parts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LOG2_E = 1.44269504088896338700e00
_SQRT_HALF = 0.70710678118654752440
_LOG = (
    *(6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01),
    *(1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01),
)
_EXP = (
    *(1.66666666666666019037e-01, -2.77777777770155933842e-03, 6.61375632143793436117e-05),
    *(-1.65339022054652515390e-06, 4.13813679705723846039e-08),
)
_COS = (
    *(4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05),
    *(-2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11),
)
_SIN = (
    *(-1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04),
    *(2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10),
)
_TWO_OVER_PI = 6.36619772367581382433e-01
# pi/2 as a sum: two parts of 27 bits, whose products with integers below 2^26 are exact, and the rest.
_HALF_PI = (float.fromhex("0x1.921fb54p+0"), float.fromhex("0x1.10b461p-30"), float.fromhex("0x1.a62633145c06ep-58"))
LARGEST_ANGLE = 2.0**24


def log(x: float) -> float:
    """Return the natural logarithm of a positive normal number, within 1 unit of the last place."""
    mantissa, exponent = math.frexp(x)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = mantissa * 2, exponent - 1
    return float(_log(mantissa, exponent))


def log_each(x: Doubles) -> Doubles:
    """Return the natural logarithms of positive normal numbers: the same bits as `log`."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < _SQRT_HALF
    result: Doubles = _log(np.where(small, mantissa * 2, mantissa), exponent - small)
    return result


def _log(mantissa: Any, exponent: Any) -> Any:
    """Return log(mantissa * 2^exponent), of floats or arrays, for a mantissa from sqrt(1/2) to sqrt(2)."""
    f = mantissa - 1
    s = f / (f + 2)
    z = s * s
    half_square = f * f * 0.5
    rest = z * _polynomial(z, _LOG)
    return exponent * _LN2_HIGH - ((half_square - (s * (half_square + rest) + exponent * _LN2_LOW)) - f)


def exp_each(x: Doubles) -> Doubles:
    """Return e to each number from -700 to 700, within 1 unit of the last place."""
    k = np.rint(x * _LOG2_E)
    high, low = x - k * _LN2_HIGH, k * _LN2_LOW
    r = high - low
    c = r - r * r * _polynomial(r * r, _EXP)
    result: Doubles = np.ldexp(1 - ((low - (r * c) / (2 - c)) - high), k.astype(np.int32))
    return result


def power(base: Doubles | float, exponent: Doubles) -> Doubles:
    """Return base to the exponent, for bases above 0.

    The relative error is below 2^-51 * (1 + the logarithm of the result), so rounding to float32 hides nearly all.
    """
    return exp_each(exponent * log_each(np.asarray(base, np.float64)))


def cos_and_sin(angles: Doubles) -> tuple[Doubles, Doubles]:
    """Return cosines and sines of float32 angles, as float64, of a size up to LARGEST_ANGLE; error below 2^-52.

    Raises ValueError for larger angles.
    """
    if angles.size and not np.abs(angles).max() <= LARGEST_ANGLE:
        raise ValueError(f"angles of more than {LARGEST_ANGLE:.0f} radians")
    turns = np.rint(angles * _TWO_OVER_PI)
    r = angles
    for part in _HALF_PI:
        r = r - turns * part
    z = r * r
    sin = r + z * r * _polynomial(z, _SIN)
    half = z * 0.5
    whole = 1 - half
    cos = whole + (((1 - whole) - half) + z * z * _polynomial(z, _COS))
    quadrant = turns.astype(np.int64)
    swapped = (quadrant & 1).astype(np.bool_)
    cos_sign = 1.0 - ((quadrant + 1) & 2)
    sin_sign = 1.0 - (quadrant & 2)
    return np.where(swapped, sin, cos) * cos_sign, np.where(swapped, cos, sin) * sin_sign


def _polynomial(z: Any, coefficients: tuple[float, ...]) -> Any:
    """Return c[0] + c[1] z + c[2] z^2 + ..., from the last coefficient on."""
    total: Any = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * z + coefficient
    return total
