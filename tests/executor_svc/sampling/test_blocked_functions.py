"""Functions of sampling for the host of a GPU in exact mode: a value's bits at any place, beside any others."""

from __future__ import annotations

import pytest
import torch

from executor_svc.sampling.functions import BlockedFunctions, TorchFunctions

SIZES = (1, 7, 64, 1_001, 40_000)


@pytest.mark.parametrize("size", SIZES)
def test_bits_do_not_depend_on_the_place(size: int) -> None:
    functions, generator = BlockedFunctions(), torch.Generator().manual_seed(size)
    x = torch.randn(3, size, generator=generator) * 9
    shift = torch.randn(3, 1, generator=generator)
    totals = torch.rand(3, 1, generator=generator, dtype=torch.float64) + 0.1
    keys, ids = torch.tensor([[3], [5], [-9]]), torch.arange(size)
    exp, log, noise = functions.exp(x, shift), functions.log(totals), functions.gumbel(keys, ids)
    for row in range(3):
        one = slice(row, row + 1)
        assert torch.equal(functions.exp(x[one], shift[one]), exp[one])
        assert torch.equal(functions.log(totals[one]), log[one])
        assert torch.equal(functions.gumbel(keys[one], ids), noise[one])
    last = functions.exp(x[:, -1:].contiguous(), shift)
    assert torch.equal(last, exp[:, -1:])
    plain = TorchFunctions()
    torch.testing.assert_close(exp, plain.exp(x, shift), rtol=1e-6, atol=0)
    torch.testing.assert_close(log, plain.log(totals), rtol=1e-12, atol=0)
    torch.testing.assert_close(noise, plain.gumbel(keys, ids), rtol=1e-5, atol=1e-5)


def test_nothing_stays_nothing() -> None:
    assert BlockedFunctions().log(torch.empty(0, 1, dtype=torch.float64)).shape == (0, 1)
