"""Where tokens stand in rows of logits, by kernels, against operations over whole rows, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.sampling.functions import RowFunctions
from executor_svc.sampling.logprobs import row_logprobs
from tests.executor_svc.cpu.kernels.processors import ISAS

FUNCTIONS = {name: CpuKernels(2, level).functions for name, level in ISAS.items()}


class _ByRows:
    """A device's functions, of which logprobs take those of whole rows."""

    def __init__(self, functions: RowFunctions) -> None:
        self.exp, self.log = functions.exp, functions.log

    def standings(self, *_: object) -> None:
        return None


def _logits(num_rows: int, width: int, generator: np.random.Generator) -> torch.Tensor:
    """Rows with equal numbers, masked ones, and one that is flat."""
    x = torch.from_numpy(generator.normal(0, 4, (num_rows, width)).astype(np.float32)).round(decimals=2)
    x[1, ::3] = float("-inf")
    x[2] = 0.25
    x[3, width // 2] = float("nan")
    return x


@pytest.mark.parametrize("isa", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 15, 16, 100, 4097, 8191, 8193, 20_011])
def test_logprobs_are_those_of_whole_rows(isa: str, width: int) -> None:
    generator, functions = np.random.default_rng(width), FUNCTIONS[isa]
    for count, num_top in ((1, 0), (5, 3), (19, 20)):
        logits = _logits(6, width, generator)
        sources, tokens = generator.integers(0, 6, count), generator.integers(0, width, count)
        rows = np.flatnonzero(sources != 3)
        tops = generator.integers(0, num_top + 1, len(rows))
        if not len(rows):
            continue
        found = row_logprobs(logits, tokens, rows, tops, functions, sources)
        expected = row_logprobs(logits, tokens, rows, tops, _ByRows(functions), sources)  # type: ignore[arg-type]
        for name in ("rows", "chosen", "ranks", "num_top", "top_ids", "top"):
            assert getattr(found, name).tobytes() == getattr(expected, name).tobytes(), name
            assert getattr(found, name).dtype == getattr(expected, name).dtype, name


def test_a_row_that_is_not_finite_says_so() -> None:
    functions = next(iter(FUNCTIONS.values()))
    logits = _logits(6, 100, np.random.default_rng(1))
    found = row_logprobs(logits, np.array([7]), np.array([0]), np.array([0]), functions, np.array([3]))
    assert np.isnan(found.chosen).all()


def test_ranks_without_logits_compute_with_anything() -> None:
    """They have memory in place of logits: whatever is there, nothing is raised, and no warning is an error."""
    functions = next(iter(FUNCTIONS.values()))
    bits = np.random.default_rng(2).integers(-(2**31), 2**31, (6, 4097), np.int32)
    logits = torch.from_numpy(bits.view(np.float32).copy())
    logits[0], logits[1, 5], logits[2] = float("inf"), float("-inf"), float("-inf")
    logits[3, 7] = logits[4].nan_to_num().max()
    found = row_logprobs(logits, np.full(6, 7), np.arange(6), np.full(6, 5), functions)
    assert found.chosen.shape == (6,)
    assert found.top.shape == (6, 5)
