"""Gated activations and finished logits of the GPU against their float64 meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from executor_svc.device import reference
from executor_svc.device.kernels import FactorActivation, PlainActivation
from executor_svc.gpu.kernels import activation

UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""The largest relative error of rounding to nearest."""
EXP = 2**-19
"""Relative error of exp in fp32 for arguments below 20, and of the quotient after it."""

dtypes = st.sampled_from(list(UNIT))
seeds = st.integers(0, 2**31)
widths = st.sampled_from([1, 3, 16, 33, 64, 127, 576, 1023, 1024, 1025, 1536, 2049])


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30)
@given(
    seed=seeds,
    rows=st.integers(1, 5),
    width=widths,
    dtype=dtypes,
    scale=st.sampled_from([0.01, 1, 4]),
    gelu=st.booleans(),
)
def test_gated(
    seed: int, rows: int, width: int, dtype: torch.dtype, scale: float, gelu: bool, device: torch.device
) -> None:
    """NaN lies right before and after the input: it is not read."""
    around = torch.full((rows + 2, 2 * width), float("nan"), dtype=dtype)
    gate_up = around[1:-1]
    gate_up.copy_(randn(seed, rows, 2 * width) * scale)
    out = torch.full((rows + 1, width), float("nan"), dtype=dtype, device=device)
    run, meaning = (
        (activation.gelu_tanh_mul, reference.gelu_tanh_mul) if gelu else (activation.silu_mul, reference.silu_mul)
    )
    run(around.to(device)[1:-1], out[:rows])
    # Far below zero the exponent of gelu is large, and with it the error of its exp. An fp16 may be subnormal.
    atol = 2**-24 * (1.0 + float(gate_up[:, width:].abs().max())) if dtype == torch.float16 else 1e-9
    rtol = 2.02 * UNIT[dtype] + EXP * (16 if gelu else 1)
    torch.testing.assert_close(out[:rows].cpu().double(), meaning(gate_up), rtol=rtol, atol=atol)
    assert bool(out[rows:].isnan().all()), "rows that are not there are not written"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gelu", [False, True])
def test_where_it_rounds(dtype: torch.dtype, gelu: bool, device: torch.device) -> None:
    """After the activation and after the product; equal but for ties of the last fp32 bit."""
    gate_up = (randn(0, 40, 256) * 2).to(dtype)
    gate, up = gate_up.chunk(2, -1)
    activated = functional.gelu(gate.double(), approximate="tanh") if gelu else functional.silu(gate.double())
    out = torch.empty(40, 128, dtype=dtype, device=device)
    (activation.gelu_tanh_mul if gelu else activation.silu_mul)(gate_up.to(device), out)
    assert float((out.cpu() == activated.to(dtype) * up).float().mean()) > 0.999


@pytest.mark.parametrize("operation", [activation.silu_mul, activation.gelu_tanh_mul])
def test_huge_gates(operation: Callable[[Tensor, Tensor], None], device: torch.device) -> None:
    with np.errstate(over="ignore"):
        for huge in (1e4, 1e13, 1e20, 3e38):
            out = torch.empty(1, 3, device=device)
            operation(torch.tensor([[-huge, huge, -200.0, 1.0, 1.0, 3.0]], device=device), out)
            assert out[0].tolist() == [0.0, torch.tensor(huge).item(), 0.0]
    out = torch.empty(1, 2, device=device)
    operation(torch.tensor([[float("nan"), 2.0, 1.0, float("nan")]], device=device), out)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("cap", [30.0, 50.0, 0.7, None])
@pytest.mark.parametrize("divisor", [1.0, 2.5])
def test_finish_logits(cap: float | None, divisor: float, device: torch.device) -> None:
    """Small values keep their relative precision: tanh must not be a difference of nearly equal numbers."""
    magnitudes = torch.logspace(-4 if cap == 50.0 else -8, 4, 1501)
    x = torch.stack([magnitudes, -magnitudes])
    for dtype, unit in UNIT.items():
        rounded = x.to(dtype).float()
        found = rounded.clone().to(device)
        with np.errstate(over="ignore"):  # of the series for small numbers, in numbers that are not
            activation.finish_logits(found, dtype, divisor, cap)
        assert torch.equal(found, found.to(dtype).float()), "rounded"
        smallest = 2**-24 * (2 + (cap or 0.0)) if dtype == torch.float16 else 0.0
        expected = reference.finish_logits(rounded, divisor, cap)
        torch.testing.assert_close(found.cpu().double(), expected, rtol=4.04 * unit + 2**-21, atol=smallest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_where_logits_are_rounded(dtype: torch.dtype, device: torch.device) -> None:
    """Divided as Granite does, then capped as Gemma 2 does, in the model's dtype."""
    x = (randn(0, 30, 100) * 40).to(dtype)
    found = x.float().to(device)
    activation.finish_logits(found, dtype, 2.5, 30.0)
    expected = torch.tanh(x / 2.5 / 30.0) * 30.0
    assert float((found.cpu().to(dtype) == expected).float().mean()) > 0.999


@pytest.mark.parametrize("vocab", [1023, 1024, 1025])
def test_logits_whose_rows_lie_apart(vocab: int, device: torch.device) -> None:
    memory = torch.full((3, vocab + 5), float("nan"), device=device)
    memory[:, :vocab] = 1.5
    activation.finish_logits(memory[:, :vocab], torch.float32, 3.0, None)
    assert bool((memory[:, :vocab] == 0.5).all())
    assert bool(memory[:, vocab:].isnan().all())


def test_logits_that_stay(device: torch.device) -> None:
    x = torch.tensor([[1.0001, float("nan"), float("-inf")]], device=device)
    activation.finish_logits(x, torch.bfloat16, 1.0, None)
    assert torch.equal(x.nan_to_num(7.0), torch.tensor([[1.0001, 7.0, torch.finfo(torch.float32).min]], device=device))


def test_no_rows(device: torch.device) -> None:
    activation.silu_mul(torch.empty(0, 8, device=device), torch.empty(0, 4, device=device))
    activation.finish_logits(torch.empty(0, 8, device=device), torch.float32, 2.0, None)


X = torch.zeros(4, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: activation.silu_mul(X[:, :31], X), "gate_up must be"),
        (lambda: activation.silu_mul(X[:, ::2], X), "gate_up must be contiguous"),
        (lambda: activation.silu_mul(X.double(), X), "gate_up must be"),
        (lambda: activation.gelu_tanh_mul(X, X), "out must be"),
        (lambda: activation.gelu_tanh_mul(X, X[:, :16].half()), "out must be"),
        (lambda: activation.finish_logits(X.half(), torch.float16, 2.0, None), "logits must be"),
        (lambda: activation.finish_logits(X.t(), torch.float16, 2.0, None), "logits must be"),
        (lambda: activation.finish_logits(X, torch.float64, 2.0, None), "dtype must be"),
    ],
)
def test_what_is_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@settings(max_examples=15)
@given(seed=seeds, rows=st.integers(1, 5), width=widths, dtype=dtypes, name=st.sampled_from(get_args(FactorActivation)))
def test_activations_times_factors(
    seed: int, rows: int, width: int, dtype: torch.dtype, name: FactorActivation, device: torch.device
) -> None:
    beside, wide = (randn(seed, rows, width + 3) * 4).to(dtype).to(device), randn(seed + 1, rows, width + 9).to(dtype)
    x = beside[:, :width].cpu()
    out = torch.full((rows + 1, width), float("nan"), dtype=dtype, device=device)
    activation.activate_times(beside[:, :width], wide.to(device)[:, 4 : width + 4], name, out[:rows])
    activated = x.double().sigmoid() if name == "sigmoid" else reference.gelu_tanh(x)
    expected = activated * wide[:, 4 : width + 4].double()
    torch.testing.assert_close(out[:rows].cpu().double(), expected, rtol=3 * UNIT[dtype] + 16 * EXP, atol=1e-5)
    assert bool(out[rows:].isnan().all()), "rows that are not there are not written"


@settings(max_examples=20)
@given(seed=seeds, rows=st.integers(1, 5), width=widths, dtype=dtypes, name=st.sampled_from(get_args(PlainActivation)))
def test_activations_without_gate(
    seed: int, rows: int, width: int, dtype: torch.dtype, name: PlainActivation, device: torch.device
) -> None:
    x, scalars = (randn(seed, rows, width) * 4).to(dtype), torch.tensor([0.7, 1.2, 0.4, -1e-6])
    out = torch.full((rows + 1, width), float("nan"), dtype=dtype, device=device)
    used = scalars.to(device) if name == "xielu" else None
    activation.activate(x.to(device), name, used, out[:rows])
    expected = reference.xielu(x, scalars) if name == "xielu" else getattr(reference, name)(x)
    torch.testing.assert_close(out[:rows].cpu().double(), expected, rtol=2 * UNIT[dtype] + 16 * EXP, atol=1e-5)
    assert bool(out[rows:].isnan().all()), "rows that are not there are not written"
