"""Norms of rows, optionally after a residual sum, and of all heads together. Rounded where transformers rounds."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.device.kernels import HeadNorms
from executor_svc.gpu.kernels.rows import DTYPES, HIDDEN_SIZES, check, options, variant
from executor_svc.gpu.kernels.variant import Variant

LARGEST_HIDDEN = 16384
"""Largest hidden size: a program keeps a whole row in its registers."""

_LEAST_ELEMENTS = 512
_MAX_WARPS = 8
_MAX_WIDE_WARPS = 16
_WIDE = 8192
_GROUP = 256
"""Columns of a layer's input, of the variants compiled ahead of time."""


@triton.jit
def root_mean_square(x, eps, WIDTH: tl.constexpr):
    """Return sqrt(mean(x^2) + eps) [rows] of x [rows, columns] fp32, whose columns from WIDTH on are zeros."""
    return tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 1), WIDTH * 1.0) + eps)


@triton.jit
def weighted(x, root, weight, DTYPE: tl.constexpr):
    """Return x [rows, columns] fp32 / root [rows] * weight [columns], in DTYPE.

    A weight of DTYPE multiplies after the rounding (Llama); a weight in fp32, with a narrower DTYPE, multiplies before
    the rounding (Gemma).
    """
    normed = x * tl.div_rn(1.0, root)[:, None]
    if weight.dtype == DTYPE:
        normed = normed.to(DTYPE).to(tl.float32)
    return (normed * weight.to(tl.float32)[None, :]).to(DTYPE)


@triton.jit
def _tile(rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return offsets and mask of this program's rows, and its columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    return row.to(tl.int64)[:, None] * WIDTH + columns[None, :], mask, columns


@triton.jit
def scaled_sum(x, residual, scale, SCALED: tl.constexpr):
    """Return x * scale + residual in the dtype of residual, rounded after the product and after the sum."""
    x = x.to(tl.float32)
    if SCALED:
        x = (x * scale).to(residual.dtype).to(tl.float32)
    return (x + residual.to(tl.float32)).to(residual.dtype)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(x, weight, out, rows, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    offsets, mask, columns = _tile(rows, WIDTH, ROWS, BLOCK)
    values = tl.load(x + offsets, mask, other=0.0)
    factors = tl.load(weight + columns, columns < WIDTH, other=0.0)
    wide = values.to(tl.float32)
    tl.store(out + offsets, weighted(wide, root_mean_square(wide, eps, WIDTH), factors, values.dtype), mask)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    rows,
    eps,
    scale,
    SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets, mask, columns = _tile(rows, WIDTH, ROWS, BLOCK)
    added = tl.load(x + offsets, mask, other=0.0)
    kept = tl.load(residual + offsets, mask, other=0.0)
    factors = tl.load(weight + columns, columns < WIDTH, other=0.0)
    total = scaled_sum(added, kept, scale, SCALED)
    tl.store(residual + offsets, total, mask)
    wide = total.to(tl.float32)
    tl.store(out + offsets, weighted(wide, root_mean_square(wide, eps, WIDTH), factors, total.dtype), mask)


@triton.jit
def _centred(x, weight, bias, mask, eps, WIDTH: tl.constexpr):
    """Return (x - mean) / standard deviation * weight + bias of x [rows, columns] fp32, without masked columns."""
    centred = tl.where(mask, x - tl.div_rn(tl.sum(x, 1), WIDTH * 1.0)[:, None], 0.0)
    normed = centred * tl.div_rn(1.0, root_mean_square(centred, eps, WIDTH))[:, None]
    return normed * weight[None, :] + bias[None, :]


@triton.jit(do_not_specialize=["rows"])
def _layer_norm(x, weight, bias, out, rows, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    offsets, mask, columns = _tile(rows, WIDTH, ROWS, BLOCK)
    values = tl.load(x + offsets, mask, other=0.0)
    factors = tl.load(weight + columns, columns < WIDTH, other=0.0)
    addends = tl.load(bias + columns, columns < WIDTH, other=0.0)
    normed = _centred(values.to(tl.float32), factors, addends, mask, eps, WIDTH)
    tl.store(out + offsets, normed.to(values.dtype), mask)


@triton.jit(do_not_specialize=["rows"])
def _add_layer_norm(
    x,
    residual,
    weight,
    bias,
    out,
    rows,
    eps,
    scale,
    SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets, mask, columns = _tile(rows, WIDTH, ROWS, BLOCK)
    added = tl.load(x + offsets, mask, other=0.0)
    kept = tl.load(residual + offsets, mask, other=0.0)
    factors = tl.load(weight + columns, columns < WIDTH, other=0.0)
    addends = tl.load(bias + columns, columns < WIDTH, other=0.0)
    total = scaled_sum(added, kept, scale, SCALED)
    tl.store(residual + offsets, total, mask)
    normed = _centred(total.to(tl.float32), factors, addends, mask, eps, WIDTH)
    tl.store(out + offsets, normed.to(total.dtype), mask)


@triton.jit(do_not_specialize=["rows"])
def _norm_part(
    x,
    weight,
    rows,
    eps,
    COUNT: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    offsets = row.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    values = tl.load(x + offsets, mask, other=0.0)
    factors = tl.load(weight + columns, columns < WIDTH, other=0.0)
    wide = values.to(tl.float32)
    tl.store(x + offsets, weighted(wide, root_mean_square(wide, eps, COUNT), factors, values.dtype), mask)


@triton.jit(do_not_specialize=["rows"])
def _add(
    x,
    residual,
    factor,
    rows,
    scale,
    SCALED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets, mask, _ = _tile(rows, WIDTH, ROWS, BLOCK)
    added = tl.load(x + offsets, mask, other=0.0)
    kept = tl.load(residual + offsets, mask, other=0.0)
    total = scaled_sum(added, kept, scale, SCALED)
    if MULTIPLIED:
        total = (total.to(tl.float32) * tl.load(factor).to(tl.float32)).to(total.dtype)
    tl.store(residual + offsets, total, mask)


@triton.jit(do_not_specialize=["rows"])
def _add_normed(
    x,
    into,
    weight,
    rows,
    eps,
    before,
    after,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets, mask, columns = _tile(rows, WIDTH, ROWS, BLOCK)
    values = tl.load(x + offsets, mask, other=0.0)
    kept = tl.load(into + offsets, mask, other=0.0)
    factors = tl.load(weight + columns, columns < WIDTH, other=0.0)
    wide = (values.to(tl.float32) * before).to(values.dtype).to(tl.float32)
    normed = weighted(wide, root_mean_square(wide, eps, WIDTH), factors, values.dtype)
    total = (normed.to(tl.float32) + kept.to(tl.float32)).to(values.dtype)
    tl.store(into + offsets, (total.to(tl.float32) * after).to(values.dtype), mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write x [T, hidden] / its root mean square * weight [hidden] to out, which may be x.

    A weight in the dtype of x multiplies after the rounding; a weight in fp32, with a narrower x, multiplies before the
    rounding. Raises ValueError for a hidden size above LARGEST_HIDDEN.
    """
    rows, hidden = _checked(x)
    check("out", out, (rows, hidden), x.dtype)
    check("weight", weight, (hidden,), x.dtype, torch.float32)
    if rows:
        constants = tile_constants(hidden)
        _rms_norm[_grid(rows, constants)](x, weight, out, rows, float(eps), **constants, **tile_options(constants))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float, out: Tensor) -> None:
    """Update residual to x * scale + residual, all [T, hidden], and write its rms_norm to out, which may be x."""
    rows, hidden = _checked(x)
    check("residual", residual, (rows, hidden), x.dtype)
    check("out", out, (rows, hidden), x.dtype)
    check("weight", weight, (hidden,), x.dtype, torch.float32)
    if rows:
        constants = tile_constants(hidden)
        grid, launched = _grid(rows, constants), tile_options(constants)
        _add_rms_norm[grid](
            x, residual, weight, out, rows, float(eps), float(scale), SCALED=scale != 1.0, **constants, **launched
        )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor) -> None:
    """Write (x - mean) / standard deviation * weight + bias, for x [T, hidden], to out, which may be x; rounded once.

    weight, bias: [hidden] fp32. Raises ValueError for a hidden size above LARGEST_HIDDEN.
    """
    rows, hidden = _checked(x)
    check("out", out, (rows, hidden), x.dtype)
    check("weight", weight, (hidden,), torch.float32)
    check("bias", bias, (hidden,), torch.float32)
    if rows:
        constants = tile_constants(hidden)
        grid, launched = _grid(rows, constants), tile_options(constants)
        _layer_norm[grid](x, weight, bias, out, rows, float(eps), **constants, **launched)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, scale: float, out: Tensor
) -> None:
    """Update residual to x * scale + residual, all [T, hidden], and write its layer_norm to out, which may be x."""
    rows, hidden = _checked(x)
    check("residual", residual, (rows, hidden), x.dtype)
    check("out", out, (rows, hidden), x.dtype)
    check("weight", weight, (hidden,), torch.float32)
    check("bias", bias, (hidden,), torch.float32)
    if rows:
        constants = tile_constants(hidden)
        grid, launched = _grid(rows, constants), tile_options(constants)
        _add_layer_norm[grid](
            x, residual, weight, bias, out, rows, float(eps), float(scale), SCALED=scale != 1.0, **constants, **launched
        )


def norm_all_heads(qkv: Tensor, norms: HeadNorms, num_heads: int, num_kv_heads: int, head_size: int) -> None:
    """Normalize all query heads of qkv [T, (H + 2 KVH) * DP] together, and all key heads, in place.

    head_size: D, of the numbers that count in a head; the others, and the weights for them, are zeros.
    """
    rows, stride = qkv.shape
    padded = stride // (num_heads + 2 * num_kv_heads)
    check("qkv", qkv, (rows, (num_heads + 2 * num_kv_heads) * padded), *DTYPES)
    first = 0
    for name, count, weight in (("norms.q", num_heads, norms.q), ("norms.k", num_kv_heads, norms.k)):
        width = count * padded
        if width > LARGEST_HIDDEN:
            raise ValueError(
                f"{name}: {width} numbers of a row are normalized together, at most {LARGEST_HIDDEN} can be"
            )
        check(name, weight, (width,), qkv.dtype, torch.float32)
        if rows:
            constants = part_constants(width, count * head_size, stride)
            grid, launched = _grid(rows, constants), tile_options(constants)
            _norm_part[grid](qkv[:, first:], weight, rows, float(norms.eps), **constants, **launched)
        first += width


def part_constants(width: int, count: int, stride: int) -> dict[str, int]:
    """Return the constants of the kernel for parts of rows: `count` numbers that are not padding, of rows `stride`."""
    return {"COUNT": count, "STRIDE": stride} | tile_constants(width)


def add(x: Tensor, residual: Tensor, scale: float = 1.0, factor: Tensor | None = None) -> None:
    """Update residual to (x * scale + residual) * factor, both [T, hidden]; factor: [1] in their dtype, None: 1."""
    rows, hidden = _checked(x)
    check("residual", residual, (rows, hidden), x.dtype)
    if factor is not None:
        check("factor", factor, (1,), x.dtype)
    if rows:
        constants = add_constants(hidden, scale != 1.0, factor is not None)
        grid, launched = _grid(rows, constants), tile_options(constants)
        _add[grid](x, residual, x if factor is None else factor, rows, float(scale), **constants, **launched)


def add_normed_groups(x: Tensor, into: Tensor, weight: Tensor, eps: float, before: float, after: float) -> None:
    """Update into [T, G * P] to (norm(x * before) + into) * after; each P columns of x are normalized with weight [P].

    Rounded after each operation. Raises ValueError for a P above LARGEST_HIDDEN.
    """
    rows, width = x.shape[0], weight.shape[0]
    if width > LARGEST_HIDDEN or x.shape[1] % width:
        raise ValueError(f"weight must have at most {LARGEST_HIDDEN} numbers that divide {x.shape[1]}, has {width}")
    check("x", x, (rows, x.shape[1]), *DTYPES)
    check("into", into, tuple(x.shape), x.dtype)
    check("weight", weight, (width,), x.dtype, torch.float32)
    count = x.numel() // width
    if count:
        constants = tile_constants(width)
        grid, launched = _grid(count, constants), tile_options(constants)
        _add_normed[grid](x, into, weight, count, float(eps), float(before), float(after), **constants, **launched)


def add_constants(hidden: int, scaled: bool, multiplied: bool) -> dict[str, int]:
    """Return the constants of `add` for rows of this width."""
    return {"SCALED": scaled, "MULTIPLIED": multiplied} | tile_constants(hidden)


def tile_constants(hidden: int) -> dict[str, int]:
    """Return the constants of the kernels for rows of this width: a program has one row, or several short ones."""
    block = triton.next_power_of_2(hidden)
    return {"WIDTH": hidden, "ROWS": max(1, _LEAST_ELEMENTS // block), "BLOCK": block}


def tile_options(constants: dict[str, int]) -> dict[str, Any]:
    """Return the launch options of the kernels; wider rows have more warps."""
    most = _MAX_WIDE_WARPS if constants["BLOCK"] >= _WIDE else _MAX_WARPS
    return options(constants["ROWS"] * constants["BLOCK"], most)


def _checked(x: Tensor) -> tuple[int, int]:
    if x.dim() != 2 or not 0 < x.shape[1] <= LARGEST_HIDDEN:
        raise ValueError(f"x must be [rows, 1 to {LARGEST_HIDDEN}], is {list(x.shape)}")
    rows, hidden = x.shape
    check("x", x, (rows, hidden), *DTYPES)
    return rows, hidden


def _grid(rows: int, constants: dict[str, int]) -> tuple[int]:
    return (-(-rows // constants["ROWS"]),)


def variants() -> list[Variant]:
    """Return the configurations compiled ahead of time."""
    found = []
    for hidden in HIDDEN_SIZES:
        for dtype in DTYPES.values():
            for weight in dict.fromkeys((dtype, "fp32")):
                name = f"hidden{hidden} {dtype}{' wide' if weight != dtype else ''}"
                norm = {"x": f"*{dtype}", "weight": f"*{weight}", "out": f"*{dtype}", "rows": "i32", "eps": "fp32"}
                found.append(_variant(f"rms_norm {name}", _rms_norm, norm, hidden))
                for scaled in (False, True):
                    quick = (hidden, dtype, weight, scaled) == (4096, "bf16", "bf16", False)
                    arguments = norm | {"residual": f"*{dtype}", "scale": "fp32"}
                    found.append(_variant(f"add_rms_norm {name}", _add_rms_norm, arguments, hidden, scaled, quick))
            found += _layer_norm_variants(hidden, dtype)
            for scaled, multiplied in ((False, False), (True, False), (False, True)):
                arguments = dict.fromkeys(("x", "residual", "factor"), f"*{dtype}") | {"rows": "i32", "scale": "fp32"}
                constants = add_constants(hidden, scaled, multiplied)
                name = f"add hidden{hidden} {dtype}{' scaled' if scaled else ' multiplied' if multiplied else ''}"
                found.append(variant(name, _add, arguments, constants, tile_options(constants)))
    for dtype in DTYPES.values():
        arguments = {"x": f"*{dtype}", "into": f"*{dtype}", "weight": "*fp32", "rows": "i32"}
        arguments |= dict.fromkeys(("eps", "before", "after"), "fp32")
        found.append(_variant(f"add_normed_groups of {_GROUP} {dtype}", _add_normed, arguments, _GROUP))
    return found


def _layer_norm_variants(hidden: int, dtype: str) -> list[Variant]:
    vectors = {"weight": "*fp32", "bias": "*fp32"}
    norm = {"x": f"*{dtype}"} | vectors | {"out": f"*{dtype}", "rows": "i32", "eps": "fp32"}
    after_sum = {"x": f"*{dtype}", "residual": f"*{dtype}"} | vectors
    after_sum |= {"out": f"*{dtype}", "rows": "i32", "eps": "fp32", "scale": "fp32"}
    part = {"x": f"*{dtype}", "weight": "*fp32", "rows": "i32", "eps": "fp32"}
    constants = part_constants(hidden, hidden, 3 * hidden)
    heads = variant(f"norm_part hidden{hidden} {dtype}", _norm_part, part, constants, tile_options(constants))
    name = f"hidden{hidden} {dtype}"
    first = _variant(f"layer_norm {name}", _layer_norm, norm, hidden)
    return [first, _variant(f"add_layer_norm {name}", _add_layer_norm, after_sum, hidden, False), heads]


def _variant(
    name: str, kernel: Any, arguments: dict[str, str], hidden: int, scaled: bool | None = None, quick: bool = False
) -> Variant:
    """Return a variant; scaled None: the kernel has no scale."""
    tile = tile_constants(hidden)
    constants = tile if scaled is None else {"SCALED": scaled} | tile
    return variant(f"{name}{' scaled' if scaled else ''}", kernel, arguments, constants, tile_options(tile), quick)
