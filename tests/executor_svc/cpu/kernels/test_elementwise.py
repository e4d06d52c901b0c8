"""Norms, activations, rotary embedding and picked rows of the CPU against their float64 meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.device import reference
from executor_svc.device.kernels import AttentionShape, FactorActivation, HeadNorms, PlainActivation
from executor_svc.models.layers.rope import RopeConfig, RotaryTables, inverse_frequencies, make_rotary
from tests.executor_svc.cpu.kernels.layout import as_shaped, plan_for
from tests.executor_svc.driver import flat_batch
from tests.executor_svc.paged import in_pages

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
seeds = st.integers(0, 2**31)
widths = st.sampled_from([1, 3, 15, 16, 17, 33, 40, 64, 65, 100, 127, 128, 193])
"""Few, for each is compiled: whole vectors, parts of one, and both."""

KERNELS = CpuKernels()


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(seed=seeds, rows=st.integers(1, 70), width=widths, dtype=dtypes)
def test_rms_norm(seed: int, rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = randn(seed, rows, width).to(dtype), randn(seed + 1, width).to(dtype)
    found = KERNELS.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@given(seed=seeds, rows=st.integers(1, 20), width=widths, dtype=dtypes, scale=st.sampled_from([1.0, 0.22]))
def test_sums(seed: int, rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    """Alone and before a norm: rounded after the product and after the sum, as transformers does."""
    x, residual, weight = (
        randn(seed + i, *s).to(dtype) for i, s in enumerate([(rows, width), (rows, width), (width,)])
    )
    total = x * scale + residual
    assert torch.equal(KERNELS.add(x.clone(), residual.clone(), scale), total)
    factor = weight[:1].clone()
    assert torch.equal(KERNELS.add(x.clone(), residual.clone(), scale, factor), total * factor)
    found, kept = KERNELS.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, scale)
    assert torch.equal(kept, total)
    expected = reference.rms_norm(total, weight, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@given(seed=seeds, rows=st.integers(1, 70), width=widths, dtype=dtypes, scale=st.sampled_from([1, 30]))
def test_silu_mul(seed: int, rows: int, width: int, dtype: torch.dtype, scale: int) -> None:
    gate_up = (randn(seed, rows, 2 * width) * scale).to(dtype)
    found = KERNELS.silu_mul(gate_up)
    torch.testing.assert_close(found.double(), reference.silu_mul(gate_up), rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("operation", [KERNELS.silu_mul, KERNELS.gelu_tanh_mul])
def test_huge_gates(operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for huge in (1e4, 1e13, 1e20, 3e38):
        found = operation(torch.tensor([[-huge, huge, -200.0, 1.0, 1.0, 3.0]]))
        assert found[0].tolist() == [0.0, torch.tensor(huge).item(), 0.0]
    none = operation(torch.tensor([[float("nan"), 2.0, 1.0, float("nan")]]))
    assert bool(none.isnan().all())


@given(seed=seeds, rows=st.integers(1, 20), width=widths, dtype=dtypes)
def test_rms_norm_with_a_wide_weight(seed: int, rows: int, width: int, dtype: torch.dtype) -> None:
    """A fp32 weight is not rounded: the result is the float64 one, rounded once."""
    x, weight = randn(seed, rows, width).to(dtype), 1 + randn(seed + 1, width) / 8
    expected = reference.rms_norm(x, weight, 1e-5)
    for found in (
        KERNELS.rms_norm(x, weight, 1e-5),
        KERNELS.add_rms_norm(x.clone(), torch.zeros_like(x), weight, 1e-5)[0],
    ):
        assert found.dtype == dtype
        half_ulp = 3e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(found.double(), expected, rtol=half_ulp * 1.001, atol=1e-6)


@given(seed=seeds, rows=st.integers(1, 20), width=widths, dtype=dtypes, scale=st.sampled_from([1.0, 0.22]))
def test_layer_norm(seed: int, rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    """Alone and after a sum; far from 0, so that a mean that is left out shows; rounded once."""
    x, residual = ((3 + randn(seed + i, rows, width)).to(dtype) for i in range(2))
    weight, bias = 1 + randn(seed + 2, width) / 8, randn(seed + 3, width)
    total = x * scale + residual
    found, kept = KERNELS.add_layer_norm(x.clone(), residual.clone(), weight, bias, 1e-5, scale)
    assert torch.equal(kept, total)
    for result, source in ((found, total), (KERNELS.layer_norm(x, weight, bias, 1e-5), x)):
        assert result.dtype == dtype
        expected = reference.layer_norm(source, weight, bias, 1e-5)
        torch.testing.assert_close(result.double(), expected, rtol=TOLERANCE[dtype], atol=2e-5)


@given(seed=seeds, rows=st.integers(1, 20), width=widths, dtype=dtypes, name=st.sampled_from(get_args(PlainActivation)))
def test_activations_without_gate(seed: int, rows: int, width: int, dtype: torch.dtype, name: PlainActivation) -> None:
    x, scalars = (randn(seed, rows, width) * 4).to(dtype), torch.tensor([0.7, 1.2, 0.4, -1e-6])
    found = KERNELS.activate(x, name, scalars if name == "xielu" else None)
    expected = reference.xielu(x, scalars) if name == "xielu" else getattr(reference, name)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=2e-6)


@given(
    seed=seeds,
    rows=st.integers(1, 20),
    width=widths,
    gaps=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    beside=st.integers(0, 40),
    dtype=dtypes,
    name=st.sampled_from(get_args(FactorActivation)),
)
def test_activations_times_factors(
    seed: int, rows: int, width: int, gaps: tuple[int, int], beside: int, dtype: torch.dtype, name: FactorActivation
) -> None:
    """beside: columns between the rows of x."""
    x, factors = torch.full((rows, width + beside), float("nan")), torch.full((rows, sum(gaps) + width), float("nan"))
    x[:, :width] = randn(seed, rows, width) * 4
    x = x.to(dtype)[:, :width]
    factors[:, gaps[0] : gaps[0] + width] = randn(seed + 1, rows, width)
    factors = factors.to(dtype)
    found = KERNELS.activate_times(x, factors, gaps[0], name)
    activated = x.double().sigmoid() if name == "sigmoid" else reference.gelu_tanh(x)
    expected = activated * factors[:, gaps[0] : gaps[0] + width].double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=2 * TOLERANCE[dtype], atol=4e-6)


@given(seed=seeds, rows=st.integers(1, 9), groups=st.integers(1, 5), width=st.integers(1, 70), dtype=dtypes)
def test_sums_with_normed_groups(seed: int, rows: int, groups: int, width: int, dtype: torch.dtype) -> None:
    x, into = (randn(seed + i, rows, groups * width).to(dtype) for i in range(2))
    weight = 1 + randn(seed + 2, width) / 4
    kept = into.clone()
    assert KERNELS.add_normed_groups(x.clone(), kept, weight, 1e-5, 0.3, 0.7) is kept
    scaled = (x * 0.3).unflatten(1, (groups, width))
    normed = reference.rms_norm(scaled, weight, 1e-5).to(dtype).flatten(1)
    torch.testing.assert_close(kept, (normed + into) * 0.7, rtol=2 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
    if dtype == torch.float32:
        wide = reference.add_normed_groups(x, into, weight, 1e-5, 0.3, 0.7)
        torch.testing.assert_close(kept.double(), wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", get_args(PlainActivation))
def test_activations_of_huge_numbers_and_nan(name: PlainActivation) -> None:
    x, scalars = torch.tensor([[float("nan"), 1e30, -1e30, 0.0, -1e-9]]), torch.tensor([0.7, 1.2, 0.4, -1e-6])
    found = KERNELS.activate(x, name, scalars)[0]
    assert found[0].isnan()
    assert not found[1:].isnan().any()
    assert float(found[3:].abs().max()) < 1e-5


@given(seed=seeds, rows=st.integers(1, 40), width=widths, gaps=st.tuples(*[st.integers(0, 40)] * 4), dtype=dtypes)
def test_copied_columns(seed: int, rows: int, width: int, gaps: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Bit by bit, and nothing beside them."""
    source = randn(seed, rows, gaps[0] + width + gaps[1]).to(dtype)
    target = randn(seed + 1, rows, gaps[2] + width + gaps[3]).to(dtype)
    expected = target.clone()
    expected[:, gaps[2] : gaps[2] + width] = source[:, gaps[0] : gaps[0] + width]
    assert KERNELS.copy_columns(source, gaps[0], target, gaps[2], width) is target
    assert torch.equal(target, expected)


@given(
    seed=seeds,
    tokens=st.integers(1, 40),
    sizes=st.sampled_from([(1, 1, 8), (3, 2, 16), (2, 5, 20), (1, 4, 64), (2, 1, 80), (1, 2, 128)]),
    dtype=dtypes,
    wide=st.booleans(),
)
def test_norm_heads(seed: int, tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype, wide: bool) -> None:
    kernels, (kv_heads, group, head_size) = KERNELS, sizes
    padded = kernels.padded_head_size(head_size)
    shape = AttentionShape(kv_heads * group, kv_heads, head_size, padded, 1.0)
    heads = torch.zeros(tokens, shape.num_heads + 2 * kv_heads, padded, dtype=dtype)
    heads[..., :head_size] = randn(seed, tokens, heads.shape[1], head_size).to(dtype)
    weights = [randn(seed + i, head_size).to(torch.float32 if wide else dtype) for i in (1, 2)]
    expected = reference.norm_heads(heads.flatten(1), *weights, 1e-6, shape)
    found = kernels.norm_heads(heads.flatten(1).clone(), HeadNorms(*weights, 1e-6), shape)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)
    found = found.view(heads.shape)
    assert torch.equal(found[:, -kv_heads:], heads[:, -kv_heads:])
    assert not found[..., head_size:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(3, 1, 20), (4, 4, 16), (8, 2, 12)])
def test_norm_of_all_heads_together(heads: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
    padded = KERNELS.padded_head_size(head_size)
    shape = AttentionShape(heads, kv_heads, head_size, padded, 1.0)
    qkv = torch.zeros(9, heads + 2 * kv_heads, padded, dtype=dtype)
    qkv[..., :head_size] = randn(1, 9, heads + 2 * kv_heads, head_size).to(dtype)
    weights = [torch.zeros(count, padded) for count in (heads, kv_heads)]
    expected = qkv.double()
    for index, (weight, first) in enumerate(zip(weights, (0, heads), strict=True)):
        weight[:, :head_size] = 1 + randn(index + 2, len(weight), head_size) / 4
        part = qkv[:, first : first + len(weight), :head_size].flatten(1)
        normed = reference.rms_norm(part, weight[:, :head_size].flatten(), 1e-6)
        expected[:, first : first + len(weight), :head_size] = normed.view(9, len(weight), head_size)
    norms = HeadNorms(weights[0].flatten(), weights[1].flatten(), 1e-6, "all heads")
    found = KERNELS.norm_heads(qkv.flatten(1).clone(), norms, shape).view(qkv.shape)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@given(seed=seeds, rows=st.integers(1, 70), width=widths, dtype=dtypes, scale=st.sampled_from([0.01, 1, 9]))
def test_gelu_tanh_mul(seed: int, rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    gate_up = (randn(seed, rows, 2 * width) * scale).to(dtype)
    found = KERNELS.gelu_tanh_mul(gate_up)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), reference.gelu_tanh_mul(gate_up), rtol=TOLERANCE[dtype], atol=1e-6)


def test_gelu_everywhere() -> None:
    """Its relative error is that of fp32 where its value is no tiny number, and that of an exponent below."""
    x = torch.linspace(-12.5, 12.5, 250_001)[None]
    found, expected = KERNELS.activate(x, "gelu").double(), reference.gelu(x)
    error = ((found - expected) / expected).abs()
    assert float(error[x > -1].nan_to_num(0.0).max()) < 4e-7
    assert float(error[x <= -1].max()) < 3e-5
    huge = torch.tensor([[-1e30, -14.0, 0.0, 1e30, float("inf"), float("nan")]])
    assert KERNELS.activate(huge, "gelu")[0].nan_to_num(7.0, posinf=8.0).tolist() == [0, 0, 0, float(huge[0, 3]), 8, 7]


@pytest.mark.parametrize("cap", [30.0, 50.0, 0.7, None])
@pytest.mark.parametrize("divisor", [1.0, 2.5])
def test_finish_logits(cap: float | None, divisor: float) -> None:
    """Small values keep their relative precision: tanh must not be a difference of nearly equal numbers."""
    magnitudes = torch.logspace(-8, 4, 4001)
    x = torch.stack([magnitudes, -magnitudes])
    for dtype, tolerance in ((torch.float32, 5e-7), (torch.bfloat16, 2e-2)):
        rounded = x.to(dtype).float()
        found = KERNELS.finish_logits(rounded.clone(), dtype, divisor, cap)
        assert found.dtype == torch.float32
        assert torch.equal(found, found.to(dtype).float()), "rounded"
        torch.testing.assert_close(
            found.double(), reference.finish_logits(rounded, divisor, cap), rtol=tolerance, atol=0.0
        )


@given(seed=seeds, rows=st.integers(1, 40), width=widths, dtype=dtypes, scale=st.sampled_from([1.0, 6.3]))
def test_picked_rows(seed: int, rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    table = randn(seed, 50, width).to(dtype)
    ids = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(KERNELS.take_rows(table, ids), table[ids])
    assert torch.equal(KERNELS.embed(table, ids, scale), table[ids] * scale)


@given(
    seed=seeds,
    tokens=st.integers(1, 40),
    sizes=st.sampled_from(
        [(1, 2, 2, 2), (2, 1, 10, 10), (1, 3, 16, 16), (2, 2, 16, 4), (1, 4, 20, 20), (3, 1, 20, 14), (1, 5, 64, 48)]
    ),
    block_size=st.sampled_from([8, 16, 32, 64]),
    gates=st.integers(0, 2),
    dtype=dtypes,
    narrow=st.booleans(),
)
def test_rope_and_cache_write(
    seed: int,
    tokens: int,
    sizes: tuple[int, int, int, int],
    block_size: int,
    gates: int,
    dtype: torch.dtype,
    narrow: bool,
) -> None:
    """gates: heads before the queries of each row, which stay as they are; narrow: the cache is in bf16."""
    kv_dtype = torch.bfloat16 if narrow else dtype
    kv_heads, group, head_size, rotary = sizes
    padded = KERNELS.padded_head_size(head_size)
    shape = AttentionShape(kv_heads * group, kv_heads, head_size, padded, 1.0)
    config = RopeConfig(100.0, rotary)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 300, (tokens,), generator=generator)
    slots = torch.randperm(6 * block_size * 2, generator=generator)[:tokens]
    heads = torch.zeros(tokens, shape.num_heads + 2 * kv_heads, padded, dtype=dtype)
    heads[..., :head_size] = randn(seed, tokens, heads.shape[1], head_size).to(dtype)
    before = heads.clone()
    cache = in_pages(torch.zeros(12, 2, kv_heads, block_size, padded, dtype=kv_dtype))
    tables = RotaryTables(config, 300, dtype, torch.device("cpu"))
    batch = flat_batch([(0, tokens)], [list(range(40 // block_size + 1))], block_size, [0] * tokens)
    plan = plan_for(KERNELS, shape, replace(batch, slot_mapping=slots))
    row = torch.full((tokens, gates + heads.shape[1], padded), float("nan"), dtype=dtype)
    row[:, gates:] = heads
    q = KERNELS.rope_write_kv(row.flatten(1)[:, gates * padded :], tables.new(positions), cache, shape, plan)
    assert row[:, :gates].isnan().all()

    angles = positions[:, None].double() * inverse_frequencies(config, 300)
    expected = reference.rope(before[:, : shape.num_heads + kv_heads, :head_size], angles)
    close = {"rtol": 0.0, "atol": 5e-2 if dtype == torch.bfloat16 else 2e-4}  # angles in fp32 are 1e-5 off at 300
    torch.testing.assert_close(q[..., :head_size].double(), expected[:, : shape.num_heads], **close)
    assert not q[..., head_size:].any()
    wanted = torch.zeros(cache.shape, dtype=kv_dtype)
    close["atol"] = 5e-2 if narrow else close["atol"]
    k = torch.zeros(tokens, kv_heads, padded, dtype=torch.float64)
    k[..., :head_size] = expected[:, shape.num_heads :]
    reference.write_kv(wanted, k, before[:, shape.num_heads + kv_heads :], slots)
    kept = as_shaped(cache)
    torch.testing.assert_close(kept[:, 0], wanted[:, 0], **close)
    assert torch.equal(kept[:, 1], wanted[:, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 2, 20, 20), (1, 4, 64, 16), (3, 1, 12, 0)])
def test_norms_of_values_and_keys_as_values(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Queries and keys are those of a step with values; the values are normalized, of whatever linear they are.

    Queries alone, of a layer that reads another one's keys and values, write nothing.
    """
    kv_heads, group, head_size, rotary = sizes
    padded = KERNELS.padded_head_size(head_size)
    shape = AttentionShape(kv_heads * group, kv_heads, head_size, padded, 1.0)
    heads = torch.zeros(9, shape.num_heads + 2 * kv_heads, padded, dtype=dtype)
    heads[..., :head_size] = randn(0, 9, heads.shape[1], head_size).to(dtype)
    weights = [1 + randn(i, head_size) / 4 for i in (1, 2)]
    of_values = torch.zeros(padded)
    of_values[:head_size] = 1.0
    positions, slots = torch.arange(9), torch.arange(9) + 3
    rope = make_rotary(RopeConfig(100.0, rotary) if rotary else None, 300, dtype, torch.device("cpu")).new(positions)
    batch = flat_batch([(0, 9)], [list(range(3))], 8, [0] * 9)
    plan = plan_for(KERNELS, shape, replace(batch, slot_mapping=slots))

    def run(count: int, norms: HeadNorms) -> tuple[torch.Tensor, torch.Tensor]:
        cache = in_pages(torch.zeros(3, 2, kv_heads, 8, padded, dtype=dtype))
        qkv = heads[:, :count].clone().flatten(1)
        q = KERNELS.rope_write_kv(qkv, rope, cache, shape, plan, norms)
        return q.clone(), as_shaped(cache)

    with_values, without = shape.num_heads + 2 * kv_heads, shape.num_heads + kv_heads
    q, cache = run(with_values, HeadNorms(*weights, 1e-6))
    for count, first in ((with_values, without), (without, shape.num_heads)):
        found, kept = run(count, HeadNorms(*weights, 1e-6, v=of_values))
        assert torch.equal(found, q)
        assert torch.equal(kept[:, 0], cache[:, 0])
        values = torch.zeros(kept.shape, dtype=torch.float64)
        normed = torch.zeros(9, kv_heads, padded, dtype=torch.float64)
        plain = heads[:, first : first + kv_heads, :head_size]
        normed[..., :head_size] = reference.rms_norm(plain, torch.ones(head_size), 1e-6)
        reference.write_kv(values, normed, normed, slots)
        torch.testing.assert_close(kept[:, 1].double(), values[:, 1], rtol=TOLERANCE[dtype], atol=1e-6)
    alone, kept = run(shape.num_heads, HeadNorms(weights[0], weights[0], 1e-6))
    assert torch.equal(alone, q)
    assert not kept.any()
