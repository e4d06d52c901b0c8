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


@given(seed=seeds, rows=st.integers(2, 20), width=st.integers(1, 200), dtype=dtypes)
def test_rms_norm_with_a_wide_weight(seed: int, rows: int, width: int, dtype: torch.dtype) -> None:
    """A fp32 weight is not rounded: the result is the float64 one, rounded once."""
    x, weight = randn(seed, rows, width).to(dtype), 1 + randn(seed + 1, width) / 8
    expected = reference.rms_norm(x, weight, 1e-5)
    for found in (
        CpuKernels().rms_norm(x, weight, 1e-5),
        CpuKernels().add_rms_norm(x.clone(), torch.zeros_like(x), weight, 1e-5)[0],
    ):
        assert found.dtype == dtype
        half_ulp = 3e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(found.double(), expected, rtol=half_ulp * 1.001, atol=1e-6)


@given(
    seed=seeds,
    tokens=st.integers(2, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_size=st.sampled_from([8, 16, 20, 64, 80, 128]),
    dtype=dtypes,
    wide=st.booleans(),
)
def test_norm_heads(
    seed: int, tokens: int, kv_heads: int, group: int, head_size: int, dtype: torch.dtype, wide: bool
) -> None:
    kernels = CpuKernels()
    padded = kernels.padded_head_size(head_size)
    shape = AttentionShape(kv_heads * group, kv_heads, head_size, padded, 1.0)
    heads = torch.zeros(tokens, shape.num_heads + 2 * kv_heads, padded, dtype=dtype)
    heads[..., :head_size] = randn(seed, tokens, heads.shape[1], head_size).to(dtype)
    weights = [randn(seed + i, head_size).to(torch.float32 if wide else dtype) for i in (1, 2)]
    expected = reference.norm_heads(heads.flatten(1), *weights, 1e-6, shape)
    found = kernels.norm_heads(heads.flatten(1).clone(), *weights, 1e-6, shape)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)
    found = found.view(heads.shape)
    assert torch.equal(found[:, -kv_heads:], heads[:, -kv_heads:])
    assert not found[..., head_size:].any()


@given(
    seed=seeds, rows=st.integers(1, 70), width=st.integers(1, 200), dtype=dtypes, scale=st.sampled_from([0.01, 1, 9])
)
def test_gelu_tanh_mul(seed: int, rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    gate_up = (randn(seed, rows, 2 * width) * scale).to(dtype)
    found = CpuKernels().gelu_tanh_mul(gate_up)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), reference.gelu_tanh_mul(gate_up), rtol=TOLERANCE[dtype], atol=1e-6)


def test_gelu_tanh_mul_of_huge_gates_is_finite() -> None:
    for huge in (1e4, 1e13, 1e20, 3e38):
        gate_up = torch.tensor([[-huge, huge, -20.0, 1.0, 1.0, 3.0]]).repeat(2, 1)
        assert CpuKernels().gelu_tanh_mul(gate_up)[0].tolist() == [0.0, torch.tensor(huge).item(), 0.0]


@pytest.mark.parametrize("cap", [30.0, 50.0, 0.7])
def test_softcap(cap: float) -> None:
    """Small values keep their relative precision: tanh must not be a difference of nearly equal numbers."""
    magnitudes = torch.logspace(-8, 4, 4001)
    x = torch.stack([magnitudes, -magnitudes])
    found = CpuKernels().softcap(x.clone(), cap)
    torch.testing.assert_close(found.double(), reference.softcap(x, cap), rtol=5e-7, atol=0.0)
    narrow = x.bfloat16()
    found = CpuKernels().softcap(narrow.clone(), cap)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), reference.softcap(narrow, cap), rtol=2e-2, atol=0.0)


@given(
    seed=seeds,
    tokens=st.integers(2, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_and_rotary=st.sampled_from([(2, 2), (10, 10), (16, 16), (16, 4), (20, 20), (20, 14), (36, 36), (64, 48)]),
    block_size=st.sampled_from([8, 16, 32, 64]),
    dtype=dtypes,
)
def test_rope_and_cache_write(
    seed: int,
    tokens: int,
    kv_heads: int,
    group: int,
    head_and_rotary: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
) -> None:
    head_size, rotary = head_and_rotary
    kernels = CpuKernels()
    padded = kernels.padded_head_size(head_size)
    shape = AttentionShape(kv_heads * group, kv_heads, head_size, padded, 1.0)
    config = RopeConfig(100.0, rotary)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 300, (tokens,), generator=generator)
    slots = torch.randperm(6 * block_size * 2, generator=generator)[:tokens]
    heads = torch.zeros(tokens, shape.num_heads + 2 * kv_heads, padded, dtype=dtype)
    heads[..., :head_size] = randn(seed, tokens, heads.shape[1], head_size).to(dtype)
    before = heads.clone()
    cache = torch.zeros(12, 2, kv_heads, block_size, padded, dtype=dtype)
    cos, sin = RotaryTables(config, 300, dtype, torch.device("cpu")).at(positions, positions + 1)
    one = torch.tensor([1], dtype=torch.int32)
    plan = PlanBuilder(shape, block_size, (1,)).build(
        slots, torch.tensor([0, 1], dtype=torch.int32), one, torch.zeros(1, 1, dtype=torch.int32)
    )
    q = kernels.rope_write_kv(heads.view(tokens, -1), cos, sin, cache, shape, plan)

    angles = positions[:, None].double() * inverse_frequencies(config, 300)
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
