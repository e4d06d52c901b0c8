"""Gathers rows by index, token embeddings and the hidden states of logits rows; copies columns of rows, scales rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.variant import ALL_ARCHS, Variant

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Triton's names of the activations' types."""
HIDDEN_SIZES = (576, 896, 1024, 2048, 4096, 8192)
"""Widths of the variants compiled ahead of time; the launchers accept any width."""

_CHUNK = 1024
_LANE_ELEMENTS = 8


@triton.jit
def _take_rows(
    table, ids, out, scale, WIDTH: tl.constexpr, STRIDE: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr
):
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    row = program // parts
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    source = tl.load(ids + row)
    value = tl.load(table + source * STRIDE + columns, mask & (source >= 0), other=0.0)
    if SCALED:
        value = (value.to(tl.float32) * scale).to(value.dtype)
    tl.store(out + row.to(tl.int64) * WIDTH + columns, value, mask)


def embed(table: Tensor, token_ids: Tensor, scale: float, out: Tensor) -> None:
    """Write table[token_ids] * scale to out [T, hidden], for table [vocabulary, hidden] and token_ids [T] int64.

    Rows of the table may have any stride. The row of id -1 is zeros; other ids are not checked.
    """
    check("out", out, (token_ids.shape[0], table.shape[1]), table.dtype)
    check("token_ids", token_ids, (token_ids.shape[0],), torch.int64)
    check_rows("table", table)
    constants = picking_constants(table.shape[1], table.stride(0), scale != 1.0)
    programs = out.shape[0] * chunks(table.shape[1], constants["CHUNK"])
    if programs:
        _take_rows[programs,](table, token_ids, out, float(scale), **constants, **options(constants["CHUNK"]))


def take_rows(table: Tensor, ids: Tensor, out: Tensor) -> None:
    """Write table[ids] to out [R, columns], for ids [R] int64; the row of id -1 is zeros."""
    embed(table, ids, 1.0, out)


@triton.jit
def _copy_columns(
    source, target, WIDTH: tl.constexpr, SOURCE_STRIDE: tl.constexpr, TARGET_STRIDE: tl.constexpr, CHUNK: tl.constexpr
):
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    mask = columns < WIDTH
    tl.store(target + row * TARGET_STRIDE + columns, tl.load(source + row * SOURCE_STRIDE + columns, mask), mask)


def copy_columns(source: Tensor, target: Tensor) -> None:
    """Copy source to target, both [T, columns] of any stride between rows; they share no memory."""
    check_rows("source", source)
    check_rows("target", target, source.dtype)
    if source.shape != target.shape:
        raise ValueError(f"target must be {list(source.shape)}, is {list(target.shape)}")
    constants = copying_constants(source.shape[1], source.stride(0), target.stride(0))
    programs = source.shape[0] * chunks(source.shape[1], constants["CHUNK"])
    if programs:
        _copy_columns[programs,](source, target, **constants, **options(constants["CHUNK"]))


@triton.jit
def _scale_rows(x, scale, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    parts: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    columns = program % parts * CHUNK + tl.arange(0, CHUNK)
    at = x + (program // parts).to(tl.int64) * WIDTH + columns
    value = tl.load(at, columns < WIDTH)
    tl.store(at, (value.to(tl.float32) * scale).to(value.dtype), columns < WIDTH)


def scale_rows(x: Tensor, scale: float) -> None:
    """Multiply x [T, columns] by a number in place, rounded as `embed` rounds."""
    check("x", x, tuple(x.shape), *DTYPES)
    constants = scaling_constants(x.shape[1])
    programs = x.shape[0] * chunks(x.shape[1], constants["CHUNK"])
    if programs:
        _scale_rows[programs,](x, float(scale), **constants, **options(constants["CHUNK"]))


def scaling_constants(width: int) -> dict[str, Any]:
    """Return the constants of the kernel for rows of this width."""
    return {"WIDTH": width, "CHUNK": chunk_size(width)}


def copying_constants(width: int, source_stride: int, target_stride: int) -> dict[str, Any]:
    """Return the constants of the kernel for rows of this width, strides in numbers."""
    strides = {"SOURCE_STRIDE": source_stride, "TARGET_STRIDE": target_stride}
    return {"WIDTH": width, **strides, "CHUNK": chunk_size(width)}


def picking_constants(width: int, stride: int, scaled: bool) -> dict[str, Any]:
    """Return the constants of the kernel for rows of this width, `stride` numbers apart."""
    return {"WIDTH": width, "STRIDE": stride, "SCALED": scaled, "CHUNK": chunk_size(width)}


def chunk_size(width: int) -> int:
    """Return the columns per program for rows of this width: at most two 16-byte loads of fp32 per thread."""
    return min(_CHUNK, int(triton.next_power_of_2(width)))


def chunks(width: int, chunk: int) -> int:
    """Return the number of programs per row."""
    return -(-width // chunk)


def options(elements: int, max_warps: int = 32) -> dict[str, Any]:
    """Return the launch options of a kernel with `elements` elements per program, a power of two, at eight per lane."""
    num_warps = max(1, min(max_warps, elements // (32 * _LANE_ELEMENTS)))
    return {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False}


def check(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ValueError, naming the argument, unless the tensor is contiguous, of this shape and one of these dtypes."""
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        laid = "" if tensor.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"{name} must be contiguous {wanted} {list(shape)}, is {tensor.dtype} {list(tensor.shape)}{laid}"
        )


def check_rows(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless the tensor is a matrix with adjacent columns, of these dtypes or any of activations."""
    allowed = dtypes or tuple(DTYPES)
    if tensor.dim() != 2 or tensor.dtype not in allowed or (tensor.stride(1) != 1 and tensor.shape[1] > 1):
        wanted = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(
            f"{name} must be a matrix of {wanted} with adjacent columns, is {tensor.dtype} {list(tensor.shape)} "
            f"with strides {list(tensor.stride())}"
        )


def variant(
    name: str,
    kernel: Any,
    arguments: dict[str, str],
    constants: dict[str, Any],
    launched: dict[str, Any],
    quick: bool = False,
    archs: tuple[int, ...] = ALL_ARCHS,
) -> Variant:
    """Return the variant of a kernel with these argument types, constexprs and launch options."""
    return Variant(
        name=name,
        kernel=kernel,
        signature=arguments | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        divisible=tuple(argument for argument, kind in arguments.items() if kind.startswith("*")),
        num_warps=launched["num_warps"],
        num_stages=launched["num_stages"],
        fp_fusion=launched["enable_fp_fusion"],
        archs=archs,
        no_spills=True,
        quick=quick,
    )


def variants() -> list[Variant]:
    """Return the configurations compiled ahead of time."""
    found = []
    for hidden in HIDDEN_SIZES:
        for dtype in DTYPES.values():
            for scaled in (False, True):
                name = f"take_rows hidden{hidden} {dtype}{' scaled' if scaled else ''}"
                arguments = {"table": f"*{dtype}", "ids": "*i64", "out": f"*{dtype}", "scale": "fp32"}
                constants = picking_constants(hidden, hidden, scaled)
                quick = (hidden, dtype, scaled) == (4096, "bf16", False)
                found.append(variant(name, _take_rows, arguments, constants, options(constants["CHUNK"]), quick))
            constants = scaling_constants(hidden)
            arguments, name = {"x": f"*{dtype}", "scale": "fp32"}, f"scale_rows hidden{hidden} {dtype}"
            found.append(variant(name, _scale_rows, arguments, constants, options(constants["CHUNK"])))
            for times in (1, 2, 3):  # in place of rows, beside an embedding, and into auxiliary hidden states
                constants = copying_constants(hidden, hidden, times * hidden)
                arguments = {"source": f"*{dtype}", "target": f"*{dtype}"}
                name = f"copy_columns hidden{hidden} of {times} {dtype}"
                found.append(variant(name, _copy_columns, arguments, constants, options(constants["CHUNK"])))
    return found
