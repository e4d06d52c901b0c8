"""RMS norms and sums of the GPU against their float64 meaning, and rounded where transformers rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor_svc.device import reference
from executor_svc.device.kernels import HeadNorms
from executor_svc.gpu.kernels import norm

UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""The largest relative error of rounding to nearest."""
SUMMED = 2**-20
"""Relative error of an fp32 sum of at most 16384 squares, added in pairs, and of the root and quotient after it."""

dtypes = st.sampled_from(list(UNIT))
seeds = st.integers(0, 2**31)
widths = st.sampled_from([1, 3, 8, 33, 64, 127, 128, 129, 511, 512, 513, 576, 896, 1023, 1024, 1025, 2048])
"""Around where several rows share a program, and around powers of two."""


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def guarded(x: Tensor, device: torch.device) -> Tensor:
    """A copy of x [rows, hidden] with NaN right before and after it."""
    around = torch.full((x.shape[0] + 2, x.shape[1]), float("nan"), dtype=x.dtype, device=device)
    around[1:-1] = x.to(device)
    return around[1:-1]


def close(found: Tensor, expected: Tensor, relative: float) -> None:
    smallest = 2**-24 if found.dtype == torch.float16 else 0.0  # half of it is a subnormal's rounding
    torch.testing.assert_close(found.cpu().double(), expected, rtol=relative, atol=smallest)


@settings(max_examples=25)
@given(seed=seeds, rows=st.integers(1, 9), width=widths, dtype=dtypes, wide=st.booleans())
def test_rms_norm(seed: int, rows: int, width: int, dtype: torch.dtype, wide: bool, device: torch.device) -> None:
    x = randn(seed, rows, width).to(dtype)
    weight = randn(seed + 1, width).to(torch.float32 if wide else dtype)
    out = guarded(torch.zeros_like(x), device)
    around = out._base
    assert around is not None
    norm.rms_norm(guarded(x, device), weight.to(device), 1e-5, out)
    roundings = 1 if wide or dtype == torch.float32 else 2
    close(out, reference.rms_norm(x, weight, 1e-5), 1.01 * roundings * UNIT[dtype] + SUMMED)
    assert bool(around[[0, -1]].isnan().all()), "rows that are not there are not written"


@settings(max_examples=20)
@given(seed=seeds, rows=st.integers(1, 9), width=widths, dtype=dtypes, scale=st.sampled_from([1.0, 0.22]))
def test_sums(seed: int, rows: int, width: int, dtype: torch.dtype, scale: float, device: torch.device) -> None:
    """Alone and before a norm: rounded after the product and after the sum, as transformers does."""
    x, residual = randn(seed, rows, width).to(dtype), randn(seed + 1, rows, width).to(dtype)
    weight = randn(seed + 2, width).to(dtype)
    alone, before, out = (guarded(tensor, device) for tensor in (residual, residual, torch.zeros_like(x)))
    norm.add(guarded(x, device), alone, scale)
    norm.add_rms_norm(guarded(x, device), before, weight.to(device), 1e-5, scale, out)
    assert torch.equal(alone, before)
    assert torch.equal(alone.cpu(), x * scale + residual)
    multiplied, factor = guarded(residual, device), weight[:1].clone()
    norm.add(guarded(x, device), multiplied, scale, factor.to(device))
    assert torch.equal(multiplied.cpu(), (x * scale + residual) * factor)
    close(out, reference.rms_norm(before.cpu(), weight, 1e-5), 2.02 * UNIT[dtype] + SUMMED)


@settings(max_examples=10)
@given(seed=seeds, rows=st.integers(1, 4), groups=st.integers(1, 4), width=st.integers(1, 70), dtype=dtypes)
def test_sums_with_normed_groups(
    seed: int, rows: int, groups: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, into = (randn(seed + i, rows, groups * width).to(dtype) for i in range(2))
    weight = 1 + randn(seed + 2, width) / 4
    kept = guarded(into, device)
    norm.add_normed_groups(guarded(x, device), kept, weight.to(device), 1e-5, 0.3, 0.7)
    scaled = (x * 0.3).unflatten(1, (groups, width))
    normed = reference.rms_norm(scaled, weight, 1e-5).to(dtype).flatten(1)
    expected = (normed + into) * 0.7
    torch.testing.assert_close(kept.cpu(), expected, rtol=4 * UNIT[dtype] + SUMMED, atol=4 * UNIT[dtype] + SUMMED)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_where_it_rounds(dtype: torch.dtype, device: torch.device) -> None:
    """A narrow weight multiplies rounded rows, a wide one rows in fp32; equal but for ties of the sum's last bit."""
    x, weight = randn(0, 40, 130).to(dtype), randn(1, 130).to(dtype)
    wide = x.float() / torch.sqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    for given_weight, expected in (
        (weight, wide.to(dtype) * weight),
        (weight.float() / 3, (wide * (weight.float() / 3)).to(dtype)),
    ):
        out = torch.empty_like(x, device=device)
        norm.rms_norm(x.to(device), given_weight.to(device), 1e-6, out)
        assert float((out.cpu() == expected).float().mean()) > 0.9995
        close(out, expected.double(), 2 * UNIT[dtype] + SUMMED / 2)


@pytest.mark.parametrize("width", [48, 1025])
def test_in_place(width: int, device: torch.device) -> None:
    x, residual, weight = (randn(i, 5, width).to(device) for i in range(3))
    weight = weight[0]
    out = torch.empty_like(x)
    norm.rms_norm(x, weight, 1e-5, out)
    same = x.clone()
    norm.rms_norm(same, weight, 1e-5, same)
    assert torch.equal(same, out)
    norm.add_rms_norm(x, residual.clone(), weight, 1e-5, 0.5, out)
    same, kept = x.clone(), residual.clone()
    norm.add_rms_norm(same, kept, weight, 1e-5, 0.5, same)
    assert torch.equal(same, out)
    assert torch.equal(kept, x * 0.5 + residual)


@pytest.mark.parametrize("width", [24, 600])
def test_a_row_of_nan_stays_alone(width: int, device: torch.device) -> None:
    x, weight = randn(0, 6, width).to(device), randn(1, width).to(device)
    expected, found = torch.empty_like(x), torch.empty_like(x)
    norm.rms_norm(x, weight, 1e-5, expected)
    x[2] = float("nan")
    norm.rms_norm(x, weight, 1e-5, found)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], expected[others])
    assert bool(found[2].isnan().all())


def test_rows_of_zeros(device: torch.device) -> None:
    out = torch.full((3, 40), 9.0, device=device)
    norm.rms_norm(torch.zeros(3, 40, device=device), torch.ones(40, device=device), 1e-6, out)
    assert not out.any()


def test_no_rows(device: torch.device) -> None:
    none, weight = torch.empty(0, 32, device=device), torch.ones(32, device=device)
    norm.rms_norm(none, weight, 1e-5, none)
    norm.add_rms_norm(none, none, weight, 1e-5, 1.0, none)
    norm.add(none, none)


X = torch.zeros(4, 32)
WEIGHT = torch.ones(32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norm.rms_norm(X[:, ::2], WEIGHT[::2], 1e-5, X), "x must be contiguous"),
        (lambda: norm.rms_norm(X.double(), WEIGHT, 1e-5, X), "x must be .*float64"),
        (lambda: norm.rms_norm(X[0], WEIGHT, 1e-5, X), r"x must be \[rows"),
        (lambda: norm.rms_norm(torch.zeros(1, 16385), WEIGHT, 1e-5, X), "1 to 16384"),
        (lambda: norm.rms_norm(X, WEIGHT[:31], 1e-5, X), "weight must be"),
        (lambda: norm.rms_norm(X, WEIGHT.half(), 1e-5, X), "weight must be"),
        (lambda: norm.rms_norm(X, WEIGHT, 1e-5, X[:3]), "out must be"),
        (lambda: norm.rms_norm(X, WEIGHT, 1e-5, X.half()), "out must be"),
        (lambda: norm.add_rms_norm(X, X[:2], WEIGHT, 1e-5, 1.0, X), "residual must be"),
        (lambda: norm.add(X, X.half()), "residual must be"),
    ],
)
def test_what_is_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@settings(max_examples=20)
@given(seed=seeds, rows=st.integers(1, 9), width=widths, dtype=dtypes, scale=st.sampled_from([1.0, 0.22]))
def test_layer_norm(seed: int, rows: int, width: int, dtype: torch.dtype, scale: float, device: torch.device) -> None:
    """Alone and after a sum; far from 0, so that a mean that is left out shows."""
    x, residual = ((3 + randn(seed + i, rows, width)).to(dtype) for i in range(2))
    weight, bias = 1 + randn(seed + 2, width) / 8, randn(seed + 3, width)
    total, out, alone = x * scale + residual, torch.empty_like(x).to(device), torch.empty_like(x).to(device)
    kept = residual.to(device)
    norm.add_layer_norm(guarded(x, device), kept, weight.to(device), bias.to(device), 1e-5, scale, out)
    norm.layer_norm(guarded(x, device), weight.to(device), bias.to(device), 1e-5, alone)
    assert torch.equal(kept.cpu(), total)
    for found, source in ((out, total), (alone, x)):
        expected = reference.layer_norm(source, weight, bias, 1e-5)
        torch.testing.assert_close(found.cpu().double(), expected, rtol=2 * UNIT[dtype], atol=3e-5)


@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 1, 20), (4, 4, 16), (8, 2, 12)])
def test_norm_of_all_heads_together(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    qkv = torch.zeros(9, heads + 2 * kv_heads, 24, dtype=dtype)
    qkv[..., :size] = randn(1, 9, heads + 2 * kv_heads, size).to(dtype)
    weights = [torch.zeros(count, 24) for count in (heads, kv_heads)]
    expected = qkv.double()
    for index, (weight, first) in enumerate(zip(weights, (0, heads), strict=True)):
        weight[:, :size] = 1 + randn(index + 2, len(weight), size) / 4
        part = qkv[:, first : first + len(weight), :size].flatten(1)
        normed = reference.rms_norm(part, weight[:, :size].flatten(), 1e-6)
        expected[:, first : first + len(weight), :size] = normed.view(9, len(weight), size)
    found = guarded(qkv.flatten(1), device)
    norms = HeadNorms(weights[0].flatten().to(device), weights[1].flatten().to(device), 1e-6, "all heads")
    norm.norm_all_heads(found, norms, heads, kv_heads, size)
    close(found, expected.flatten(1), 1.01 * UNIT[dtype] + SUMMED)
