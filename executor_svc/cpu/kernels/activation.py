"""Gated activations, and scaling and softcap of logits. Rounded where transformers rounds."""

from __future__ import annotations

import math
from collections.abc import Callable

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, Dtype, Emitter, Int, Vec
from executor_svc.cpu.kernels.codegen.functions import exp, expm1, tanh, where
from executor_svc.cpu.kernels.norm import each_piece
from executor_svc.device.kernels import FactorActivation, GatedActivation, PlainActivation

ROWS_AT_ONCE = 2
_GELU_SCALE = 2 * math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715
_SQRT_HALF = math.sqrt(0.5)
ERFC = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)
"""Of the exponent of erfcc by powers of its t, the highest first."""


def gated(code: Code, activation: GatedActivation, dtype: Dtype, width: int) -> str:
    """Add the kernel y = activation(gate) * up; returns its name.

    Items: one for each ROWS_AT_ONCE rows. Arguments: rows, gate_up [rows, 2 * width], y [rows, width].
    """
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, rows: Int, gate_up: Int, y: Int) -> None:
        def row(index: Int, _: list[Vec]) -> None:
            start, into = gate_up + index * (2 * width * size), y + index * (width * size)

            def piece(offset: Int, count: int) -> None:
                gate = emit.load(start + offset * size, dtype, count)
                up = emit.load(start + (offset + width) * size, dtype, count)
                emit.store(gated_product(activation, gate, up, dtype), into + offset * size, dtype, count)

            each_piece(emit, width, piece)

        first = item * ROWS_AT_ONCE
        emit.loop(first, (first + ROWS_AT_ONCE).least(rows), 1, row)

    return code.kernel(f"{activation}_{dtype}_{width}", 3, body)


def gated_product(activation: GatedActivation, gate: Vec, up: Vec, dtype: Dtype) -> Vec:
    """Return activation(gate), rounded to dtype, times up."""
    activate = {"silu": silu, "gelu_tanh": _gelu_tanh}[activation]
    return activate(gate).rounded(dtype) * up


def clipped_swiglu(code: Code, dtype: Dtype, width: int, alpha: float, limit: float) -> str:
    """Add the kernel y = (up + 1) * gate * sigmoid(alpha * gate), gate and up clipped; returns its name.

    As `device.experts.ExpertKernels.clipped_swiglu`. Items and arguments: as of `gated`.
    """
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, rows: Int, gate_up: Int, y: Int) -> None:
        most, least = emit.vec(limit), emit.vec(-limit)

        def row(index: Int, _: list[Vec]) -> None:
            start, into = gate_up + index * (2 * width * size), y + index * (width * size)

            def piece(offset: Int, count: int) -> None:
                gate = _at_most(emit, emit.load(start + offset * size, dtype, count), most)
                up = _at_most(emit, emit.load(start + (offset + width) * size, dtype, count), most)
                up = where(emit, emit.builder.fcmp_ordered("<", up.value, least.value), least, up)
                share = emit.vec(1.0) / (exp((gate * alpha).rounded(dtype) * -1.0) + 1.0)
                glu = (gate * share.rounded(dtype)).rounded(dtype)
                emit.store((up + 1.0).rounded(dtype) * glu, into + offset * size, dtype, count)

            each_piece(emit, width, piece)

        first = item * ROWS_AT_ONCE
        emit.loop(first, (first + ROWS_AT_ONCE).least(rows), 1, row)

    return code.kernel(f"clipped_swiglu_{dtype}_{width}_{alpha}_{limit}", 3, body)


def _at_most(emit: Emitter, value: Vec, most: Vec) -> Vec:
    """Return the smaller of both; NaN stays NaN."""
    return where(emit, emit.builder.fcmp_ordered(">", value.value, most.value), most, value)


def plain(code: Code, activation: PlainActivation, dtype: Dtype, width: int) -> str:
    """Add the kernel y = activation(x); returns its name.

    Items: one for each ROWS_AT_ONCE rows. Arguments: rows, x and y [rows, width], scalars [4] float32 of xielu.
    """
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, rows: Int, x: Int, y: Int, scalars: Int) -> None:
        activate = _PLAIN.get(activation) or _xielu(emit, scalars)

        def row(index: Int, _: list[Vec]) -> None:
            start, into = x + index * (width * size), y + index * (width * size)

            def piece(offset: Int, count: int) -> None:
                value = activate(emit.load(start + offset * size, dtype, count))
                emit.store(value, into + offset * size, dtype, count)

            each_piece(emit, width, piece)

        first = item * ROWS_AT_ONCE
        emit.loop(first, (first + ROWS_AT_ONCE).least(rows), 1, row)

    return code.kernel(f"plain_{activation}_{dtype}_{width}", 4, body)


def activate_times(
    code: Code, activation: FactorActivation | None, dtype: Dtype, width: int, strides: tuple[int, int]
) -> str:
    """Add the kernel y = activation(x) * factors, or x * factors; returns its name.

    strides: from row to row of x, and of factors. Items: one for each ROWS_AT_ONCE rows. Arguments: rows, the address
    of x, that of the first factor, y [rows, width].
    """
    x_stride, factor_stride = strides
    size, activate = ITEM_BYTES[dtype], {"gelu_tanh": _gelu_tanh, "sigmoid": sigmoid, None: None}[activation]

    def body(emit: Emitter, item: Int, _: Int, rows: Int, x: Int, factors: Int, y: Int) -> None:
        def row(index: Int, _: list[Vec]) -> None:
            start, into = x + index * (x_stride * size), y + index * (width * size)
            others = factors + index * (factor_stride * size)

            def piece(offset: Int, count: int) -> None:
                value = emit.load(start + offset * size, dtype, count)
                value = value if activate is None else activate(value).rounded(dtype)
                factor = emit.load(others + offset * size, dtype, count)
                emit.store(value * factor, into + offset * size, dtype, count)

            each_piece(emit, width, piece)

        first = item * ROWS_AT_ONCE
        emit.loop(first, (first + ROWS_AT_ONCE).least(rows), 1, row)

    return code.kernel(f"{activation}_times_{dtype}_{width}_{x_stride}_{factor_stride}", 4, body)


def finish_logits(code: Code, dtype: Dtype, vocab_size: int, divisor: float, cap: float | None) -> str:
    """Add the kernel x = cap * tanh(x / divisor / cap) on logits in place, rounded to dtype after each operation.

    Items: one for each row. Arguments: rows, x [rows, vocab_size] float32. Returns its name.
    """

    def body(emit: Emitter, item: Int, _: Int, rows: Int, x: Int) -> None:
        start = x + item * (vocab_size * 4)

        def piece(offset: Int, count: int) -> None:
            value = emit.load(start + offset * 4, "float32", count)
            if divisor != 1.0:
                value = (value / divisor).rounded(dtype)
            if cap is not None:
                value = (tanh((value / cap).rounded(dtype)).rounded(dtype) * cap).rounded(dtype)
            emit.store(value, start + offset * 4, "float32", count)

        each_piece(emit, vocab_size, piece)

    return code.kernel(f"finish_logits_{dtype}_{vocab_size}_{divisor}_{cap}", 2, body)


def silu(gate: Vec) -> Vec:
    return gate / (exp(gate * -1.0) + 1.0)


def sigmoid(x: Vec) -> Vec:
    return x.emit.vec(1.0) / (exp(x * -1.0) + 1.0)


def _relu(x: Vec) -> Vec:
    return _positive(x, x)


def _relu2(x: Vec) -> Vec:
    positive = _positive(x, x)
    return positive * positive


def _xielu(emit: Emitter, scalars: Int) -> Callable[[Vec], Vec]:
    """Return xIELU with its alpha_p, alpha_n, beta and eps, as `device.reference.xielu` defines it."""
    alpha_p, alpha_n, beta, eps = (emit.load_all(scalars + 4 * index, "float32") for index in range(4))

    def activate(x: Vec) -> Vec:
        least = where(emit, emit.builder.fcmp_ordered("<", x.value, eps.value), x, eps)
        below = (expm1(least) - x) * alpha_n
        return _positive(x, x * x * alpha_p, below) + x * beta

    return activate


def _positive(x: Vec, chosen: Vec, other: Vec | float = 0.0) -> Vec:
    """Return `chosen` where x is above 0, else `other`; NaN chooses it too, so that it stays NaN."""
    return where(x.emit, x.emit.builder.fcmp_unordered(">", x.value, x.emit.vec(0.0).value), chosen, x.emit.vec(other))


def _gelu_tanh(gate: Vec) -> Vec:
    """The tanh form of gelu (Hendrycks and Gimpel, 2016), x / 2 * (1 + tanh(u)), as x / (1 + exp(-2u))."""
    exponent = (gate * gate * (-_GELU_SCALE * _GELU_CUBE) - _GELU_SCALE) * gate
    return gate / (exp(exponent) + 1.0)


def _gelu(x: Vec) -> Vec:
    """x times the normal distribution function of x (Hendrycks and Gimpel, 2016), which below 0 is erfc's half.

    erfc is the approximation of Press et al. (Numerical Recipes, erfcc), within 1.2e-7 of its value everywhere.
    """
    emit = x.emit
    size = emit.call("llvm.fabs.v16f32", x)
    scaled = size * _SQRT_HALF
    t = emit.vec(1.0) / scaled.times_plus(0.5, 1.0)
    series = emit.vec(ERFC[0])
    for coefficient in ERFC[1:]:
        series = series.times_plus(t, coefficient)
    below = t * 0.5 * exp(series - size * size * 0.5)
    is_below = emit.builder.fcmp_ordered("<", x.value, emit.vec(0.0).value)
    return x * where(emit, is_below, below, emit.vec(1.0) - below)


_PLAIN: dict[PlainActivation, Callable[[Vec], Vec]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "relu2": _relu2,
}
