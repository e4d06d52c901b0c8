"""In bf16 the operations round where transformers' layers round: equal but for rare ties of the last fp32 bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.device.kernels import AttentionShape, HeadNorms, Rope
from tests.executor_svc.cpu.kernels.layout import as_shaped, plan_for
from tests.executor_svc.driver import flat_batch

BF16 = torch.bfloat16
KERNELS = CpuKernels()

Norm = Callable[[Tensor], tuple[torch.nn.Module, Tensor]]


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def share_equal(found: Tensor, expected: Tensor) -> float:
    assert found.dtype == expected.dtype
    return float((found == expected).float().mean())


def llama_norm(weight: Tensor) -> tuple[torch.nn.Module, Tensor]:
    """Return transformers' module with this weight, and the weight that our kernels take for it."""
    norm = Qwen3RMSNorm(weight.shape[0], 1e-6).to(BF16)
    norm.weight.data.copy_(weight)
    return norm, weight


def gemma_norm(weight: Tensor) -> tuple[torch.nn.Module, Tensor]:
    """Do the same for the norm that adds 1 to its weight and rounds last."""
    norm = Gemma2RMSNorm(weight.shape[0], 1e-6).to(BF16)
    norm.weight.data.copy_(weight)
    return norm, 1.0 + weight.float()


@pytest.mark.parametrize("norm", [llama_norm, gemma_norm])
@torch.inference_mode()
def test_norms(norm: Norm) -> None:
    module, weight = norm(randn(0, 128))
    x = randn(1, 400, 128)
    assert share_equal(KERNELS.rms_norm(x, weight, 1e-6), module(x)) > 0.9995
    other_dtype = weight.to(torch.float32 if weight.dtype == BF16 else BF16)
    assert share_equal(KERNELS.rms_norm(x, other_dtype, 1e-6), module(x)) < 0.95, "the weight's dtype must matter"


@pytest.mark.parametrize("norm", [llama_norm, gemma_norm])
@torch.inference_mode()
def test_norms_of_heads(norm: Norm) -> None:
    (q_norm, q_weight), (k_norm, k_weight) = (norm(randn(seed, 20)) for seed in (0, 1))
    shape = AttentionShape(4, 2, 20, 32, 1.0)
    qkv = torch.zeros(300, 8, 32, dtype=BF16)
    qkv[..., :20] = randn(2, 300, 8, 20)
    expected = qkv.clone()
    expected[:, :4, :20] = q_norm(qkv[:, :4, :20])
    expected[:, 4:6, :20] = k_norm(qkv[:, 4:6, :20])
    found = KERNELS.norm_heads(qkv.flatten(1), HeadNorms(q_weight, k_weight, 1e-6), shape).view(300, 8, 32)
    assert share_equal(found[:, :6, :20], expected[:, :6, :20]) > 0.9995
    assert torch.equal(found[:, 6:], expected[:, 6:])


def test_gelu_tanh_mul() -> None:
    gate_up = randn(0, 300, 256) * 2
    gate, up = gate_up.chunk(2, -1)
    expected = ACT2FN["gelu_pytorch_tanh"](gate) * up
    visible = gate > -2  # below it, transformers' own gelu loses its digits to cancellation
    found = KERNELS.gelu_tanh_mul(gate_up)
    assert share_equal(found[visible], expected[visible]) > 0.999
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-5)


def test_silu_mul() -> None:
    gate_up = randn(0, 300, 256) * 2
    gate, up = gate_up.chunk(2, -1)
    assert share_equal(KERNELS.silu_mul(gate_up), ACT2FN["silu"](gate) * up) > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_finish_logits(dtype: torch.dtype) -> None:
    """Divided as Granite does, then capped as Gemma 2 does, in the model's dtype."""
    x = (randn(0, 300, 100) * 40).to(dtype)
    expected = torch.tanh(x / 2.5 / 30.0) * 30.0
    found = KERNELS.finish_logits(x.float(), dtype, 2.5, 30.0).to(dtype)
    if dtype == BF16:
        assert share_equal(found, expected) > 0.999
    torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == BF16 else 5e-7, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("size", [20, 12])
def test_rope(dtype: torch.dtype, size: int) -> None:
    """All or part of each head, bit by bit."""
    shape = AttentionShape(3, 1, 20, 32, 1.0)
    qkv = torch.zeros(50, 5, 32, dtype=dtype)
    qkv[..., :20] = randn(0, 50, 5, 20).to(dtype)
    angles = randn(1, 50, size // 2).float()
    cos, sin = angles.cos().repeat(1, 2).to(dtype), angles.sin().repeat(1, 2).to(dtype)
    by_head = qkv[None, :, :4, :20].transpose(1, 2)
    expected = torch.cat(apply_rotary_pos_emb(by_head[:, :3], by_head[:, 3:], cos[None], sin[None]), 1)[0].transpose(
        0, 1
    )

    cache = torch.zeros(4, 2, 1, 16, 32, dtype=dtype)
    plan = plan_for(KERNELS, shape, flat_batch([(0, 50)], [[0, 1, 2, 3]], 16, [0] * 50))
    half = sin[:, : size // 2]
    q = KERNELS.rope_write_kv(
        qkv.flatten(1), Rope(cos, torch.cat([-half, half], -1), torch.arange(50)), cache, shape, plan
    )
    assert torch.equal(q[..., :20], expected[:, :3])
    assert torch.equal(as_shaped(cache)[:, 0, 0].flatten(0, 1)[:50, :20], expected[:, 3])
