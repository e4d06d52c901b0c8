"""Normalization and activation on the CPU.

ATen runs vector code over most of a tensor and scalar code over the tails of each thread's share. Where the two
differ in bits (measured on AVX512: silu, sigmoid and exp2 in fp32, rsqrt in bf16) a value would depend on its place
in the flat tensor, thus on its batch. So only operations are used that do not: those that IEEE 754 rounds exactly
(+ - * / sqrt and conversions), exp in fp32 and tanh, which `kernels.cpu.probe` checks at start, and sums over a
contiguous last dimension of at least two rows, whose order depends on its length only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from executor_svc.kernels.interface import AttentionShape

_GELU_SCALE = 2 * math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [T, hidden] over its root mean square, times weight; the sum in fp32, rounded as transformers rounds."""
    return _times(_normalized(x, eps), weight, x.dtype)


def norm_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, shape: AttentionShape) -> Tensor:
    """Normalize the query and key heads of qkv [T, (H + 2 KVH) * DP] in place, each over its first D columns."""
    heads = qkv.view(qkv.shape[0], -1, shape.padded_head_size)[..., : shape.head_size]
    keys_end = shape.num_heads + shape.num_kv_heads
    normed = _normalized(heads[:, :keys_end], eps)
    heads[:, : shape.num_heads] = _times(normed[:, : shape.num_heads], q_weight, qkv.dtype)
    heads[:, shape.num_heads : keys_end] = _times(normed[:, shape.num_heads :], k_weight, qkv.dtype)
    return qkv


def _normalized(x: Tensor, eps: float) -> Tensor:
    """Return x over the root mean square of its last dimension, in fp32."""
    wide = x.float()
    variance = wide.square().mean(-1, keepdim=True)
    return torch.mul(wide, variance.add_(eps).sqrt_().reciprocal_())


def _times(normed: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp32 normed times weight, in dtype: rounded to it before the product, unless the weight is wider."""
    return normed.to(torch.promote_types(dtype, weight.dtype)).mul_(weight).to(dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of gate_up [T, 2 * intermediate]; silu in fp32, rounded before the product."""
    gate, up = gate_up.chunk(2, -1)
    wide = gate.float() if gate.dtype != torch.float32 else gate
    denominator = torch.neg(wide).exp_().add_(1.0)
    return torch.div(wide, denominator, out=denominator).to(gate.dtype).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up of gate_up [T, 2 * intermediate]; gelu in fp32, rounded before the product.

    The tanh form of gelu (Hendrycks and Gimpel, 2016), x / 2 * (1 + tanh(u)), is x / (1 + exp(-2u)).
    """
    gate, up = gate_up.chunk(2, -1)
    wide = gate.float()
    exponent = wide.square().mul_(-_GELU_SCALE * _GELU_CUBE).sub_(_GELU_SCALE).mul_(wide)
    denominator = exponent.exp_().add_(1.0)
    return torch.div(wide, denominator, out=denominator).to(gate.dtype).mul_(up)


def softcap(x: Tensor, cap: float) -> Tensor:
    """Write cap * tanh(x / cap) into contiguous x and return it; each step is rounded to the dtype of x."""
    return x.div_(cap).tanh_().mul_(cap)
