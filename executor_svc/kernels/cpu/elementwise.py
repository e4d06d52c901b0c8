"""Normalization and activation on the CPU.

ATen runs vector code over most of a tensor and scalar code over the tails of each thread's share. Where the two
differ in bits (measured on AVX512: silu, sigmoid and exp2 in fp32, rsqrt in bf16) a value would depend on its place
in the flat tensor, thus on its batch. So only operations are used that do not: those that IEEE 754 rounds exactly
(+ - * / sqrt and conversions), exp in fp32, which `numerics.probe` checks at start, and sums over a
contiguous last dimension of at least two rows, whose order depends on its length only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [T, hidden] over its root mean square, times weight; the sum in fp32, rounded as transformers rounds."""
    wide = x.float()
    variance = wide.square().mean(-1, keepdim=True)
    normed = torch.mul(wide, variance.add_(eps).sqrt_().reciprocal_())
    return normed.to(x.dtype).mul_(weight)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of gate_up [T, 2 * intermediate]; silu in fp32, rounded before the product."""
    gate, up = gate_up.chunk(2, -1)
    wide = gate.float() if gate.dtype != torch.float32 else gate
    denominator = torch.neg(wide).exp_().add_(1.0)
    return torch.div(wide, denominator, out=denominator).to(gate.dtype).mul_(up)
