"""The most likely token of each row, as the CPU's kernel finds it."""

from __future__ import annotations

import pytest
import torch

from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.sampling import row_math

KERNELS = CpuKernels()
INF, NAN = float("inf"), float("nan")


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 33, 1000, 16383, 16384, 16400, 16401, 49152, 49160])
def test_argmax_is_numpys(vocab: int) -> None:
    logits = randn(vocab, 7, vocab)
    assert KERNELS.argmax(logits).tolist() == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("vocab", [100, 16390])
def test_ties_go_to_the_lowest_id(vocab: int) -> None:
    logits = torch.zeros(5, vocab)
    logits[0, [98, 40, 41, 99]] = 3.0
    logits[1, 1:] = -0.0
    logits[2] = -5.0
    logits[3, 97] = 1e-45
    logits[4, [vocab - 1, vocab - 20]] = 1.0
    assert KERNELS.argmax(logits).tolist() == [40, 0, 0, 97, vocab - 20]


@pytest.mark.parametrize(
    ("vocab", "place"),
    [*((100, place) for place in (0, 15, 16, 95, 96, 99)), *((16390, place) for place in (0, 1039, 1040, 9000, 16389))],
)
def test_rows_that_cannot_be_sampled(vocab: int, place: int) -> None:
    logits = randn(place, 6, vocab)
    logits[0, place] = NAN
    logits[1, place] = INF
    logits[2] = -INF
    logits[3] = -INF
    logits[3, place] = NAN
    logits[4] = -INF
    logits[4, place] = -3.0e38
    logits[5, place] = -INF
    best = KERNELS.argmax(logits)
    assert best.tolist() == [-1, -1, -1, -1, place, int(logits[5].argmax())]
    assert best.tolist() == row_math.argmax(logits).tolist()
