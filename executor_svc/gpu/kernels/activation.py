"""Activations, gated or not, and scaling and softcap of logits. Rounded where transformers rounds."""

from __future__ import annotations

from typing import Any, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.kernels import FactorActivation, PlainActivation
from executor_svc.gpu.kernels.rows import DTYPES, check, check_rows, chunk_size, chunks, options, variant
from executor_svc.gpu.kernels.variant import Variant

INTERMEDIATE_SIZES = (1536, 3072, 4864, 8192, 14336)
VOCAB_SIZES = (49155, 256000)
"""Widths of the variants compiled ahead of time; the launchers accept any width."""

_FACTORS: dict[FactorActivation, tuple[int, int, int]] = {
    "gelu_tanh": (256, 256, 35 * 256),
    "sigmoid": (16 * 256, (2 * 16 + 2 * 4) * 256, 16 * 256),
}
"""Columns and strides of the variants compiled ahead of time: of a layer's input among those of all layers (Gemma 4),
and of gates beside queries, keys and values (Qwen3.5)."""

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_GELU_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_GELU_CUBE = tl.constexpr(0.044715)
_TANH_SERIES_BELOW = tl.constexpr(0.625)


@triton.jit
def _exp(x):
    """e^x, infinity above 88."""
    return tl.where(x > 88.0, float("inf"), tl.exp(tl.minimum(x, 88.0)))


@triton.jit
def silu(gate):
    return gate / (_exp(-gate) + 1.0)


@triton.jit
def gelu_tanh(gate):
    """The tanh form of gelu (Hendrycks and Gimpel, 2016), x / 2 * (1 + tanh(u)), as x / (1 + exp(-2u))."""
    return gate / (_exp((gate * gate * (-_GELU_SCALE * _GELU_CUBE) - _GELU_SCALE) * gate) + 1.0)


@triton.jit
def _gelu(x):
    """x times the normal distribution function of x (Hendrycks and Gimpel, 2016), which below 0 is erfc's half.

    erfc is the approximation of Press et al. (Numerical Recipes, erfcc), within 1.2e-7 of its value everywhere.
    """
    t = tl.div_rn(1.0, tl.fma(tl.abs(x), 0.35355339059327373, 1.0))
    series = tl.fma(t, 0.17087277, -0.82215223)
    series = tl.fma(series, t, 1.48851587)
    series = tl.fma(series, t, -1.13520398)
    series = tl.fma(series, t, 0.27886807)
    series = tl.fma(series, t, -0.18628806)
    series = tl.fma(series, t, 0.09678418)
    series = tl.fma(series, t, 0.37409196)
    series = tl.fma(series, t, 1.00002368)
    series = tl.fma(series, t, -1.26551223)
    below = t * 0.5 * tl.exp(series - x * x * 0.5)
    return x * tl.where(x < 0.0, below, 1.0 - below)


@triton.jit
def _tanh(x):
    """The hyperbolic tangent, within a few units of the last place.

    Ranges and coefficients are those of tanhf in Moshier's Cephes library (single/tanhf.c).
    """
    size = tl.abs(x)
    falling = tl.exp(size * -2.0)
    far = (1.0 - falling) / (falling + 1.0)
    square = x * x
    series = tl.fma(square, -5.70498872745e-3, 2.06390887954e-2)
    series = tl.fma(series, square, -5.37397155531e-2)
    series = tl.fma(series, square, 1.33314422036e-1)
    series = tl.fma(series, square, -3.33332819422e-1)
    near = tl.fma(series * square, x, x)
    return tl.where(size < _TANH_SERIES_BELOW, near, tl.where(x < 0, -far, far))


@triton.jit
def _gated(gate_up, out, WIDTH: tl.constexpr, GELU: tl.constexpr, CHUNK: tl.constexpr):
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + columns, mask, other=0.0)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + columns, mask, other=0.0)
    wide = gate.to(tl.float32)
    activated = gelu_tanh(wide) if GELU else silu(wide)
    product = activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * WIDTH + columns, product.to(gate.dtype), mask)


@triton.jit
def _clipped_swiglu(gate_up, out, alpha, limit, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    dtype = out.dtype.element_ty
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + columns, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + columns, mask, other=0.0).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)  # NaN stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    share = 1.0 / (_exp(-(gate * alpha).to(dtype).to(tl.float32)) + 1.0)
    glu = (gate * share.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + columns, ((up + 1.0).to(dtype).to(tl.float32) * glu).to(dtype), mask)


@triton.jit
def _activate_times(
    x,
    factors,
    out,
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    GELU: tl.constexpr,
    CHUNK: tl.constexpr,
):
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    value = tl.load(x + row * X_STRIDE + columns, mask, other=0.0)
    factor = tl.load(factors + row * STRIDE + columns, mask, other=0.0)
    wide = value.to(tl.float32)
    activated = gelu_tanh(wide) if GELU else 1.0 / (_exp(-wide) + 1.0)
    product = activated.to(value.dtype).to(tl.float32) * factor.to(tl.float32)
    tl.store(out + row * WIDTH + columns, product.to(value.dtype), mask)


@triton.jit
def _xielu(x, scalars):
    """xIELU, as `device.reference.xielu` defines it.

    expm1(x) is 2 tanh(x / 2) / (1 - tanh(x / 2)), which does not cancel near 0.
    """
    half = _tanh(tl.minimum(x, tl.load(scalars + 3)) * 0.5)
    below = (tl.div_rn(half * 2.0, 1.0 - half) - x) * tl.load(scalars + 1)
    return tl.where(x > 0.0, x * x * tl.load(scalars), below) + x * tl.load(scalars + 2)


@triton.jit
def _plain(x, out, scalars, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, CHUNK: tl.constexpr):
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    at = (program // parts).to(tl.int64) * WIDTH + columns
    value = tl.load(x + at, columns < WIDTH, other=0.0)
    wide = value.to(tl.float32)
    if ACTIVATION == "gelu":
        wide = _gelu(wide)
    elif ACTIVATION == "gelu_tanh":
        wide = gelu_tanh(wide)
    elif ACTIVATION == "relu":
        wide = tl.where(wide < 0.0, 0.0, wide)
    elif ACTIVATION == "relu2":
        wide = tl.where(wide < 0.0, 0.0, wide * wide)
    else:
        wide = _xielu(wide, scalars)
    tl.store(out + at, wide.to(value.dtype), columns < WIDTH)


@triton.jit
def _finish_logits(
    logits,
    divisor,
    cap,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    DIVIDED: tl.constexpr,
    CAPPED: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    places = logits + (program // parts).to(tl.int64) * STRIDE + columns
    value = tl.load(places, columns < WIDTH, other=0.0)
    if DIVIDED:
        value = tl.div_rn(value, divisor).to(DTYPE).to(tl.float32)
    if CAPPED:
        value = _tanh(tl.div_rn(value, cap).to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)
        value = (value * cap).to(DTYPE).to(tl.float32)
    tl.store(places, value, columns < WIDTH)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Write silu(gate) * up of gate_up [T, 2 * intermediate] to out [T, intermediate]."""
    _launch_gated(gate_up, out, gelu=False)


def gelu_tanh_mul(gate_up: Tensor, out: Tensor) -> None:
    """Write gelu(gate) * up, with the tanh form of gelu, of gate_up [T, 2 * intermediate] to out [T, intermediate]."""
    _launch_gated(gate_up, out, gelu=True)


def clipped_swiglu(gate_up: Tensor, alpha: float, limit: float, out: Tensor) -> None:
    """Write (up + 1) * gate * sigmoid(alpha * gate) of gate_up [T, 2 * intermediate] to out [T, intermediate].

    gate is at most limit, up between -limit and limit; rounded after each operation (gpt-oss).
    """
    rows, width = _check_gated(gate_up, out)
    if rows and width:
        chunk = chunk_size(width)
        grid = (rows * chunks(width, chunk),)
        _clipped_swiglu[grid](gate_up, out, float(alpha), float(limit), WIDTH=width, CHUNK=chunk, **options(chunk))


def activate(x: Tensor, name: PlainActivation, scalars: Tensor | None, out: Tensor) -> None:
    """Write the activation of x [T, intermediate] to out, rounded once; scalars: of xielu, [4] fp32."""
    check("x", x, tuple(x.shape), *DTYPES)
    check("out", out, tuple(x.shape), x.dtype)
    if scalars is not None:
        check("scalars", scalars, (4,), torch.float32)
    elif name == "xielu":
        raise ValueError("scalars are needed for xielu")
    rows, width = x.shape
    if rows and width:
        constants = plain_constants(width, name)
        grid = (rows * chunks(width, constants["CHUNK"]),)
        _plain[grid](x, out, x if scalars is None else scalars, **constants, **options(constants["CHUNK"]))


def activate_times(x: Tensor, factors: Tensor, name: FactorActivation, out: Tensor) -> None:
    """Write the activation of x [T, width], rounded, times factors [T, width] to out; both of any stride of rows."""
    check_rows("x", x, *DTYPES)
    check_rows("factors", factors, x.dtype)
    check("out", out, tuple(x.shape), x.dtype)
    rows, width = x.shape
    if factors.shape != x.shape:
        raise ValueError(f"factors must be {list(x.shape)}, is {list(factors.shape)}")
    if rows and width:
        constants = times_constants(width, (x.stride(0), factors.stride(0)), name)
        grid = (rows * chunks(width, constants["CHUNK"]),)
        _activate_times[grid](x, factors, out, **constants, **options(constants["CHUNK"]))


def times_constants(width: int, strides: tuple[int, int], name: FactorActivation) -> dict[str, Any]:
    """Return the constants of `activate_times` for `width` columns; strides: of rows of x, and of factors."""
    x_stride, stride = strides
    sizes = {"WIDTH": width, "X_STRIDE": x_stride, "STRIDE": stride}
    return {**sizes, "GELU": name == "gelu_tanh", "CHUNK": chunk_size(width)}


def plain_constants(width: int, name: PlainActivation) -> dict[str, Any]:
    """Return the constants of the activations without gate for `width` columns."""
    return {"WIDTH": width, "ACTIVATION": name, "CHUNK": chunk_size(width)}


def _check_gated(gate_up: Tensor, out: Tensor) -> tuple[int, int]:
    """Return the rows and columns of the result; raises ValueError naming the argument."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [rows, 2 * intermediate], is {list(gate_up.shape)}")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    check("gate_up", gate_up, (rows, 2 * width), *DTYPES)
    check("out", out, (rows, width), gate_up.dtype)
    return rows, width


def _launch_gated(gate_up: Tensor, out: Tensor, gelu: bool) -> None:
    rows, width = _check_gated(gate_up, out)
    if rows and width:
        constants = gated_constants(width, gelu)
        grid = (rows * chunks(width, constants["CHUNK"]),)
        _gated[grid](gate_up, out, **constants, **options(constants["CHUNK"]))


def finish_logits(logits: Tensor, dtype: torch.dtype, divisor: float, cap: float | None) -> None:
    """Update logits [R, vocabulary] float32 to cap * tanh(logits / divisor / cap), rounded to dtype after each step.

    Divisor 1 and cap None leave out these steps. Rows may have any stride.
    """
    check_rows("logits", logits, torch.float32)
    if dtype not in _TYPES:
        raise ValueError(f"dtype must be one of {list(_TYPES)}, is {dtype}")
    rows, vocab = logits.shape
    if rows and vocab and (divisor != 1.0 or cap is not None):
        constants = logits_constants(vocab, logits.stride(0), dtype, divisor != 1.0, cap is not None)
        grid = (rows * chunks(vocab, constants["CHUNK"]),)
        _finish_logits[grid](
            logits, float(divisor), 1.0 if cap is None else float(cap), **constants, **options(constants["CHUNK"])
        )


def gated_constants(width: int, gelu: bool) -> dict[str, Any]:
    """Return the constants of the gated activations for `width` columns of output."""
    return {"WIDTH": width, "GELU": gelu, "CHUNK": chunk_size(width)}


def logits_constants(vocab: int, stride: int, dtype: torch.dtype, divided: bool, capped: bool) -> dict[str, Any]:
    """Return the constants of `finish_logits` for rows of vocab logits, `stride` apart."""
    flags = {"DIVIDED": divided, "CAPPED": capped, "DTYPE": _TYPES[dtype]}
    return {"WIDTH": vocab, "STRIDE": stride, **flags, "CHUNK": chunk_size(vocab)}


def variants() -> list[Variant]:
    """Return the configurations compiled ahead of time."""
    found = []
    for dtype, name in DTYPES.items():
        for width in INTERMEDIATE_SIZES:
            for gelu in (False, True):
                title = f"{'gelu_tanh_mul' if gelu else 'silu_mul'} intermediate{width} {name}"
                arguments = {"gate_up": f"*{name}", "out": f"*{name}"}
                quick = (width, name, gelu) == (14336, "bf16", False)
                constants = gated_constants(width, gelu)
                found.append(variant(title, _gated, arguments, constants, options(constants["CHUNK"]), quick))
            arguments = {"gate_up": f"*{name}", "out": f"*{name}", "alpha": "fp32", "limit": "fp32"}
            constants, title = (
                {"WIDTH": width, "CHUNK": chunk_size(width)},
                f"clipped_swiglu intermediate{width} {name}",
            )
            found.append(variant(title, _clipped_swiglu, arguments, constants, options(constants["CHUNK"])))
            for activation in get_args(PlainActivation):
                scalars = "fp32" if activation == "xielu" else name
                arguments = {"x": f"*{name}", "out": f"*{name}", "scalars": f"*{scalars}"}
                constants, title = plain_constants(width, activation), f"{activation} intermediate{width} {name}"
                found.append(variant(title, _plain, arguments, constants, options(constants["CHUNK"])))
        for factor, (width, *strides) in _FACTORS.items():
            arguments = dict.fromkeys(("x", "factors", "out"), f"*{name}")
            constants = times_constants(width, (strides[0], strides[1]), factor)
            title = f"{factor} of {width} of {strides[0]} times factors of {strides[1]} {name}"
            found.append(variant(title, _activate_times, arguments, constants, options(constants["CHUNK"])))
        for vocab in VOCAB_SIZES:
            for divided, capped in ((True, False), (False, True), (True, True)):
                steps = f"{' divided' if divided else ''}{' capped' if capped else ''}"
                arguments = {"logits": "*fp32", "divisor": "fp32", "cap": "fp32"}
                constants = logits_constants(vocab, vocab, dtype, divided, capped)
                title = f"finish_logits vocab{vocab} {name}{steps}"
                launched = options(constants["CHUNK"])
                found.append(variant(title, _finish_logits, arguments, constants, launched))
    return found
