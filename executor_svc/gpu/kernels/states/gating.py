"""Norms of groups of columns with a gate, behind recurrences, and products of rows, rounded as in transformers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.states import GatedNormKind
from executor_svc.gpu.kernels.norm import LARGEST_HIDDEN, root_mean_square
from executor_svc.gpu.kernels.rows import DTYPES, check, check_rows, chunk_size, chunks, options, variant
from executor_svc.gpu.kernels.variant import Variant

_LEAST_ELEMENTS = 512
_MAX_WARPS = 16
_LAYERS: dict[str, tuple[int, int, int, int, GatedNormKind]] = {
    "qwen3.5": (32 * 128, 128, 128, 32 * 128, "norm then silu"),
    "kimi": (32 * 128, 128, 128, 32 * 128, "norm then sigmoid"),
    "granite": (8192, 8192, 8192, 16768, "silu then norm"),
    "nemotron": (4096, 512, 4096, 10304, "silu then norm"),
}
"""Width, columns of a group and of the weight, stride of the gate, and kind of the variants compiled ahead of time."""
_WIDTHS = {"lfm2": (2048, 6144), "lfm2 large": (2560, 7680)}
"""Width and stride of factors of the variants compiled ahead of time."""


@triton.jit(do_not_specialize=["count"])
def _gated_norm(
    x, gate, weight, out, count, eps, WIDTH: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr,
    WEIGHTS: tl.constexpr, SIGMOID: tl.constexpr, GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize groups of columns, `count` of them in all rows together."""
    groups: tl.constexpr = WIDTH // GROUP
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, first = (index // groups).to(tl.int64), index % groups * GROUP
    column = tl.arange(0, BLOCK)
    mask = (index < count)[:, None] & (column < GROUP)[None, :]
    values = tl.load(x + (row * WIDTH + first)[:, None] + column[None, :], mask, other=0.0)
    gates = tl.load(gate + (row * STRIDE + first)[:, None] + column[None, :], mask, other=0.0).to(tl.float32)
    factors = tl.load(weight + (first % WEIGHTS)[:, None] + column[None, :], mask, other=0.0)
    dtype = values.dtype
    wide = values.to(tl.float32)
    activated = (1.0 if SIGMOID else gates) / (tl.exp(-gates) + 1.0)
    if GATE_FIRST:
        wide *= activated
    normed = wide * tl.div_rn(1.0, root_mean_square(wide, eps, GROUP))[:, None]
    if factors.dtype == dtype:
        normed = normed.to(dtype).to(tl.float32)
    scaled = normed * factors.to(tl.float32)
    if factors.dtype == dtype:
        scaled = scaled.to(dtype).to(tl.float32)
    if not GATE_FIRST:
        scaled *= activated
    tl.store(out + (row * WIDTH + first)[:, None] + column[None, :], scaled.to(dtype), mask)


@triton.jit
def _multiply(x, factors, out, WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, STRIDE: tl.constexpr, CHUNK: tl.constexpr):
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    value = tl.load(x + row * X_STRIDE + columns, mask, other=0.0)
    factor = tl.load(factors + row * STRIDE + columns, mask, other=0.0)
    product = value.to(tl.float32) * factor.to(tl.float32)
    tl.store(out + row * WIDTH + columns, product.to(value.dtype), mask)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, kind: GatedNormKind, out: Tensor
) -> None:
    """Write groups of columns of x [T, width], normalized, weighed and gated, to out.

    Args:
        gate: [T, width] in the dtype of x, of any stride.
        weight: [group] or [width], in the dtype of x or fp32; rounding as in `device.states.StateKernels.gated_norm`.

    Raises ValueError naming the argument.
    """
    rows, width = x.shape
    check("x", x, (rows, width), *DTYPES)
    check_rows("gate", gate, x.dtype)
    if not 0 < group <= LARGEST_HIDDEN or width % group:
        raise ValueError(f"group must divide {width} and be at most {LARGEST_HIDDEN}, is {group}")
    check("weight", weight, (group if len(weight) == group else width,), x.dtype, torch.float32)
    check("out", out, tuple(gate.shape), x.dtype)
    count = rows * (width // group)
    if count:
        constants = norm_constants(width, gate.stride(0), group, len(weight), kind)
        launched = norm_options(constants)
        programs = -(-count // constants["ROWS"])
        _gated_norm[programs,](x, gate, weight, out, count, float(eps), **constants, **launched)


def norm_constants(width: int, stride: int, group: int, weights: int, kind: GatedNormKind) -> dict[str, Any]:
    """Return the constants of the kernel: a program has one group, or several short ones."""
    block = triton.next_power_of_2(group)
    return {
        "WIDTH": width, "STRIDE": stride, "GROUP": group, "WEIGHTS": weights, "SIGMOID": kind == "norm then sigmoid",
        "GATE_FIRST": kind == "silu then norm", "ROWS": max(1, _LEAST_ELEMENTS // block), "BLOCK": block,
    }  # fmt: skip


def norm_options(constants: dict[str, Any]) -> dict[str, Any]:
    """Return the launch options; longer groups have more warps."""
    return options(constants["ROWS"] * constants["BLOCK"], _MAX_WARPS)


def multiply(x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Write x * factors [T, width], rounded, to out; rows of both may have any stride."""
    check_rows("x", x, *DTYPES)
    check_rows("factors", factors, x.dtype)
    if factors.shape != x.shape:
        raise ValueError(f"factors must be {list(x.shape)}, is {list(factors.shape)}")
    check("out", out, tuple(x.shape), x.dtype)
    constants = product_constants(x.shape[1], x.stride(0), factors.stride(0))
    programs = x.shape[0] * chunks(x.shape[1], constants["CHUNK"])
    if programs:
        _multiply[programs,](x, factors, out, **constants, **options(constants["CHUNK"]))


def product_constants(width: int, x_stride: int, stride: int) -> dict[str, Any]:
    """Return the constants of the kernel for rows of this width, strides in numbers."""
    return {"WIDTH": width, "X_STRIDE": x_stride, "STRIDE": stride, "CHUNK": chunk_size(width)}


def variants() -> list[Variant]:
    """Return the configurations compiled ahead of time."""
    found = []
    for dtype in DTYPES.values():
        for name, (width, group, weights, stride, kind) in _LAYERS.items():
            for weight in dict.fromkeys((dtype, "fp32")):
                constants = norm_constants(width, stride, group, weights, kind)
                arguments = dict.fromkeys(("x", "gate", "out"), f"*{dtype}") | {"weight": f"*{weight}"}
                arguments |= {"count": "i32", "eps": "fp32"}
                title = f"gated_norm {name} {dtype}{' wide' if weight != dtype else ''}"
                quick = (name, dtype, weight) == ("qwen3.5", "bf16", "bf16")
                found.append(variant(title, _gated_norm, arguments, constants, norm_options(constants), quick))
        for name, (width, stride) in _WIDTHS.items():
            constants = product_constants(width, stride, stride)
            arguments = dict.fromkeys(("x", "factors", "out"), f"*{dtype}")
            title = f"multiply {name} {dtype}"
            found.append(variant(title, _multiply, arguments, constants, options(constants["CHUNK"])))
    return found
