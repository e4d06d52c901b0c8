"""The kernel that draws from a whole vocabulary, against the sampler's operations over whole rows, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.row_functions import CpuRowFunctions
from executor_svc.sampling.functions import WholeDraws
from tests.executor_svc.cpu.kernels.processors import ISAS

FUNCTIONS = {name: CpuKernels(2, level).functions for name, level in ISAS.items()}


def drawn_by_rows(functions: CpuRowFunctions, logits: torch.Tensor, draws: WholeDraws) -> list[int]:
    """What the kernel does, as operations over whole rows."""
    x = logits[torch.from_numpy(draws.rows)]
    scaled = (x - x.amax(dim=1, keepdim=True)).div_(torch.from_numpy(draws.temperature[:, None]))
    if draws.floor is not None:
        scaled.masked_fill_(scaled < torch.from_numpy(draws.floor[:, None]), float("-inf"))
    score = scaled + functions.gumbel(torch.from_numpy(draws.keys[:, None]), torch.arange(x.shape[1]))
    return [int((each == each.max()).nonzero()[0, 0]) for each in score]


@pytest.mark.parametrize("isa", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 15, 16, 100, 8191, 8192, 8193, 20_011])
def test_a_draw_is_that_of_whole_rows(isa: str, width: int) -> None:
    generator = np.random.default_rng(width)
    functions = FUNCTIONS[isa]
    for count in (1, 5, 2):
        logits = torch.from_numpy(generator.normal(0, 4, (6, width)).astype(np.float32))
        logits[1, ::3] = float("-inf")
        logits[1, width // 2] = 1.0
        rows = generator.integers(0, 6, count)
        temperature = generator.uniform(0.1, 2, count).astype(np.float32)
        keys = generator.integers(-(2**62), 2**62, count)
        peak = logits.numpy()[rows].max(axis=1)
        for floor in (None, np.log(generator.uniform(0.01, 0.9, count)).astype(np.float32)):
            draws = WholeDraws(rows, peak, temperature, floor, keys)
            found = functions.draw(logits, draws)
            assert found is not None
            assert found.tolist() == drawn_by_rows(functions, logits, draws)


def test_a_floor_of_0_leaves_the_most_likely_tokens() -> None:
    """In whichever pieces they are; noise decides among them."""
    logits = torch.zeros(1, 20_000)
    logits[0, [7, 9000, 16_500]] = 3.0
    one, count = np.ones(60, np.float32), 60
    draws = WholeDraws(np.zeros(count, np.int64), 3 * one, one, 0 * one, np.arange(count))
    found = next(iter(FUNCTIONS.values())).draw(logits, draws)
    assert found is not None
    assert set(found.tolist()) == {7, 9000, 16_500}
