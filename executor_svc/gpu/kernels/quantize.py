"""Quantizes to 8-bit numbers with a scale for each row: weights when they are loaded, activations in every product.

A row's scale maps its largest magnitude to the largest number of the format, so nothing is clipped (absmax scaling;
LLM.int8(), Dettmers et al., 2022). Weights are quantized by PyTorch, activations by a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.variant import Variant

INT8_MAX = 127
FP8_MAX = 448.0
"""Largest number of float8_e4m3fn."""

_CHUNK = 2048
_WARPS = 8


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [out, in] as (int8, scale [out] float32), symmetric: weight = int8 * scale[:, None].

    The error of a weight is at most half a scale (the largest magnitude of its row / 254) and float32 rounding. Raises
    ValueError if a weight is not finite.
    """
    wide, scale = _scaled(weight, INT8_MAX)
    return wide.round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [out, in] as (float8_e4m3fn, scale [out] float32): weight = fp8 * scale[:, None].

    The error of a weight is at most the larger of 2^-4 of its magnitude (three bits of mantissa) and 2^-10 scales
    (below the smallest normal number), and float32 rounding. Raises ValueError if a weight is not finite.
    """
    wide, scale = _scaled(weight, FP8_MAX)
    return wide.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def _scaled(weight: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return (weight / scale, a new tensor, scale), both float32; a row of zeros has scale 1."""
    magnitudes = weight.float().abs().amax(1)
    if not bool(magnitudes.isfinite().all()):
        raise ValueError("weight: not all numbers are finite")
    # The smallest normal number: the quotient by a smaller scale would not be accurate enough.
    # Over a tensor: a GPU multiplies by the reciprocal of a number instead, which rounds otherwise, and a scale that
    # is rounded otherwise sends weights to the other side of a tie.
    scale = (magnitudes / torch.full_like(magnitudes, largest)).clamp_(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(magnitudes == 0, torch.ones_like(scale), scale)
    return weight.float() / scale[:, None], scale


@triton.jit
def _quantize_rows(x, narrow, scales, columns, CHUNK: tl.constexpr):
    """Quantize a row: read it for its largest magnitude, then again, from cache, for the quotients."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, CHUNK)
    greatest = tl.zeros((CHUNK,), tl.float32)
    unsound = tl.zeros((CHUNK,), tl.float32)
    for start in tl.range(0, columns, CHUNK):
        inside = start + offsets < columns
        some = tl.load(x + row * columns + start + offsets, mask=inside, other=0.0).to(tl.float32)
        greatest = tl.maximum(greatest, tl.abs(some))
        unsound += some * 0.0
    magnitude = tl.max(greatest, 0)
    # A number that is not finite must turn the row's results into NaN, which neither maximum nor fp8 would preserve.
    scale = tl.where(magnitude > 0, magnitude / 448.0, 1.0) + tl.sum(unsound, 0)
    for start in tl.range(0, columns, CHUNK):
        inside = start + offsets < columns
        some = tl.load(x + row * columns + start + offsets, mask=inside, other=0.0).to(tl.float32)
        # The division may round up above the format's largest number.
        scaled = tl.minimum(tl.maximum(some / scale, -448.0), 448.0)
        tl.store(narrow + row * columns + start + offsets, scaled.to(narrow.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def quantize_rows(x: Tensor, narrow: Tensor, scales: Tensor) -> None:
    """Write rows of x as narrow * scales[:, None], each row by its own largest magnitude.

    A row with a number that is not finite gets the scale NaN.

    Args:
        x: [M, K] bfloat16, float16 or float32.
        narrow: [M, K] float8_e4m3fn.
        scales: [M] float32.

    All are contiguous. Raises ValueError naming the argument.
    """
    if x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"x: must be [M, K] and contiguous, is {list(x.shape)}")
    if narrow.shape != x.shape or narrow.dtype != torch.float8_e4m3fn or not narrow.is_contiguous():
        raise ValueError(f"narrow: must be {list(x.shape)} float8_e4m3fn and contiguous")
    if scales.shape != x.shape[:1] or scales.dtype != torch.float32 or not scales.is_contiguous():
        raise ValueError(f"scales: must be [{x.shape[0]}] float32 and contiguous")
    if x.numel():
        _quantize_rows[(x.shape[0],)](
            x, narrow, scales, x.shape[1], CHUNK=_CHUNK, num_warps=_WARPS, num_stages=2, enable_fp_fusion=False
        )


def variants() -> list[Variant]:
    """Return `quantize_rows` for each dtype of rows."""
    return [
        Variant(
            name=f"quantize_rows {dtype}",
            kernel=_quantize_rows,
            signature={
                "x": f"*{dtype}",
                "narrow": "*fp8e4nv",
                "scales": "*fp32",
                "columns": "i32",
                "CHUNK": "constexpr",
            },
            constants={"CHUNK": _CHUNK},
            divisible=("x", "narrow", "scales", "columns"),
            num_warps=_WARPS,
            fp_fusion=False,
            archs=(90,),
            no_spills=True,
            quick=dtype == "bf16",
        )
        for dtype in ("bf16", "fp16", "fp32")
    ]
