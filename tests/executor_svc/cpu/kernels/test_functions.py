"""exp, expm1, log, softplus and tanh of the kernels against float64, over all of their range."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.functions import exp, expm1, log, softplus, tanh
from tests.executor_svc.cpu.kernels.emitted import mapped
from tests.helpers.marks import short_and_long

_PIECE = 1 << 20


@pytest.fixture(params=short_and_long([31, 211], [211]))
def stride(request: pytest.FixtureRequest) -> int:
    """One float in so many is tried, of all signs and exponents."""
    return int(request.param)


def floats(lowest: float, highest: float, stride: int) -> Iterator[Tensor]:
    """Floats of one sign from lowest to highest by size, borders included, some at a time."""
    first, last = (int(torch.tensor(size).view(torch.int32)) for size in (lowest, highest))
    for start in range(first, last + 1, stride * _PIECE):
        yield torch.arange(start, min(last + 1, start + stride * _PIECE), stride, dtype=torch.int32).view(torch.float32)
    yield torch.tensor([last], dtype=torch.int32).view(torch.float32)


def worst_ulps(found: Tensor, exact: Tensor) -> float:
    """The largest distance in units of the last place of the exact value [n] float64."""
    exponent = torch.frexp(exact).exponent - 24
    return float(((found.double() - exact).abs() / torch.ldexp(torch.ones_like(exact), exponent)).max())


def test_exp(stride: int) -> None:
    apply = mapped(exp)
    worst = 0.0
    for sign, end in ((1.0, 88.0), (-1.0, 87.0)):
        for size in floats(0.0, end, stride):
            x = sign * size
            worst = max(worst, worst_ulps(apply(x), x.double().exp()))
    assert worst < 1.1


def test_exp_beyond_its_range(stride: int) -> None:
    apply = mapped(exp)
    for size in floats(math.nextafter(88.0, 89.0) + 1e-5, float("inf"), stride):
        assert bool((apply(size) == float("inf")).all())
        assert not bool(apply(-size).any())
    special = apply(torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0]))
    assert special[:2].tolist() == [float("inf"), 0.0]
    assert bool(special[2].isnan())
    assert special[3:].tolist() == [1.0, 1.0]


def test_expm1(stride: int) -> None:
    """Small values keep all their digits."""
    apply = mapped(expm1)
    worst = 0.0
    for sign, end in ((1.0, 88.0), (-1.0, 1e30)):
        for size in floats(float(torch.finfo(torch.float32).tiny), end, stride):
            x = sign * size
            worst = max(worst, worst_ulps(apply(x), x.double().expm1()))
    assert worst < 1.6
    special = apply(torch.tensor([float("-inf"), float("nan"), 0.0, 1e-42]))
    assert special[0] == -1.0
    assert bool(special[1].isnan())
    assert special[2:].tolist() == [0.0, pytest.approx(1e-42, rel=0.01)]


def test_log(stride: int) -> None:
    apply = mapped(log)
    tiny, most = float(torch.finfo(torch.float32).tiny), float(torch.finfo(torch.float32).max)
    worst = max(worst_ulps(apply(x), x.double().log()) for x in floats(tiny, most, stride))
    assert worst < 1
    assert apply(torch.tensor([1.0])).tolist() == [0.0]


def test_softplus(stride: int) -> None:
    apply = mapped(softplus)
    worst = 0.0
    for sign, end in ((1.0, 20.0), (-1.0, 80.0)):
        for size in floats(0.0, end, stride):
            x = sign * size
            worst = max(worst, worst_ulps(apply(x), torch.log1p(x.double().exp())))
    assert worst < 4
    special = torch.tensor([20.5, 89.0, float("inf"), float("-inf"), float("nan")])
    assert apply(special)[:4].tolist() == [20.5, 89.0, float("inf"), 0.0]
    assert bool(apply(special)[4].isnan())


def test_tanh(stride: int) -> None:
    """Small values keep all their digits: it is no difference of nearly equal numbers. And it is odd, to the bit."""
    apply = mapped(tanh)
    worst = 0.0
    for x in floats(float(torch.finfo(torch.float32).tiny), 1e30, stride):
        found = apply(x)
        worst = max(worst, worst_ulps(found, x.double().tanh()))
        assert torch.equal(apply(-x), -found)
        assert bool((found <= 1).all())
    assert worst < 1.6
    special = apply(torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-42]))
    assert special[:2].tolist() == [1.0, -1.0]
    assert bool(special[2].isnan())
    assert special[3:].tolist() == [0.0, 0.0, pytest.approx(1e-42, rel=0.01)]


def test_every_lane_is_the_same() -> None:
    for function in (exp, expm1, tanh, log):
        apply = mapped(function)
        for number in (0.3, 5.0) if function is log else (0.3, -0.7, 5.0, -40.0):
            assert len(set(apply(torch.full((16,), number)).tolist())) == 1
            alone = torch.zeros(16)
            alone[5] = number
            assert apply(alone)[5] == apply(torch.full((1,), number))[0]
