"""Norm, activation, rotary embedding and linears of the CPU against their float64 meaning."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.kernels import reference
from executor_svc.kernels.cpu import CpuKernels, CpuLinear
from executor_svc.kernels.cpu.attention_plan import PlanBuilder
from executor_svc.kernels.interface import AttentionShape
from executor_svc.layers.rope import RopeConfig, RotaryTables, inverse_frequencies

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
seeds = st.integers(0, 2**31)


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(seed=seeds, rows=st.integers(2, 70), width=st.integers(1, 200), dtype=dtypes)
def test_rms_norm(seed: int, rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = randn(seed, rows, width).to(dtype), randn(seed + 1, width).to(dtype)
    found = CpuKernels().rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@given(seed=seeds, rows=st.integers(2, 20), width=st.integers(1, 100), dtype=dtypes)
def test_add_rms_norm(seed: int, rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (
        randn(seed + i, *s).to(dtype) for i, s in enumerate([(rows, width), (rows, width), (width,)])
    )
    total = x + residual
    found, kept = CpuKernels().add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(kept, total)
    expected = reference.rms_norm(total, weight, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@given(seed=seeds, rows=st.integers(1, 70), width=st.integers(1, 200), dtype=dtypes, scale=st.sampled_from([1, 30]))
def test_silu_mul(seed: int, rows: int, width: int, dtype: torch.dtype, scale: int) -> None:
    gate_up = (randn(seed, rows, 2 * width) * scale).to(dtype)
    found = CpuKernels().silu_mul(gate_up)
    torch.testing.assert_close(found.double(), reference.silu_mul(gate_up), rtol=TOLERANCE[dtype], atol=1e-6)


def test_silu_mul_of_huge_gates_is_finite() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -200.0, 1.0, 2.0, 3.0]]).repeat(2, 1)
    assert CpuKernels().silu_mul(gate_up)[0].tolist() == [0.0, 2e4, 0.0]


@given(
    seed=seeds,
    tokens=st.integers(2, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_size=st.sampled_from([2, 10, 16, 20, 36, 64]),
    block_size=st.sampled_from([8, 16, 32, 64]),
    dtype=dtypes,
)
def test_rope_and_cache_write(
    seed: int, tokens: int, kv_heads: int, group: int, head_size: int, block_size: int, dtype: torch.dtype
) -> None:
    kernels = CpuKernels()
    padded = kernels.padded_head_size(head_size)
    shape = AttentionShape(kv_heads * group, kv_heads, head_size, padded, 1.0)
    config = RopeConfig("default", 100.0)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 300, (tokens,), generator=generator)
    slots = torch.randperm(6 * block_size * 2, generator=generator)[:tokens]
    heads = torch.zeros(tokens, shape.num_heads + 2 * kv_heads, padded, dtype=dtype)
    heads[..., :head_size] = randn(seed, tokens, heads.shape[1], head_size).to(dtype)
    before = heads.clone()
    cache = torch.zeros(12, 2, kv_heads, block_size, padded, dtype=dtype)
    cos, sin = RotaryTables(config, head_size, 300, dtype, torch.device("cpu")).at(positions)
    one = torch.tensor([1], dtype=torch.int32)
    plan = PlanBuilder(shape, block_size, (1,)).build(
        slots, torch.tensor([0, 1], dtype=torch.int32), one, torch.zeros(1, 1, dtype=torch.int32)
    )
    q = kernels.rope_write_kv(heads.view(tokens, -1), cos, sin, cache, shape, plan)

    angles = positions[:, None].double() * inverse_frequencies(config, head_size)
    expected = reference.rope(before[:, : shape.num_heads + kv_heads, :head_size], angles)
    close = {"rtol": 0.0, "atol": 5e-2 if dtype == torch.bfloat16 else 2e-4}  # angles in fp32 are 1e-5 off at 300
    torch.testing.assert_close(q[..., :head_size].double(), expected[:, : shape.num_heads], **close)
    assert not q[..., head_size:].any()
    wanted = torch.zeros_like(cache)
    k = torch.zeros(tokens, kv_heads, padded, dtype=torch.float64)
    k[..., :head_size] = expected[:, shape.num_heads :]
    reference.write_kv(wanted, k, before[:, shape.num_heads + kv_heads :], slots)
    torch.testing.assert_close(cache[:, 0], wanted[:, 0], **close)
    assert torch.equal(cache[:, 1], wanted[:, 1])


def test_llama3_frequencies_equal_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **fields},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert torch.equal(inverse_frequencies(RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192), 128), expected)


@pytest.mark.parametrize("packed", [True, False])
@given(seed=seeds, rows=st.integers(2, 40), inner=st.integers(1, 90), outer=st.integers(1, 90), bias=st.booleans())
def test_linear(packed: bool, seed: int, rows: int, inner: int, outer: int, bias: bool) -> None:
    x, weight = randn(seed, rows, inner), randn(seed + 1, outer, inner)
    offset = randn(seed + 2, outer) if bias else None
    found = CpuLinear(weight, offset, packed)(x)
    expected = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_linear_in_row_tiles() -> None:
    linear = CpuLinear(randn(0, 12, 8), None, True)
    x = randn(1, 205, 8)
    whole = linear(x)
    linear.row_tile = 17
    assert torch.equal(linear(x), whole)
