"""Floors of draws: which tokens are kept at the limit, by which logits, and that a row's floor is its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.sampling.floors import row_floors
from tests.helpers.executor.cpu_sampling import sample
from tests.helpers.executor.sampling import columns, edits

INF = float("inf")


def floors(logits: torch.Tensor, **fields: Any) -> list[float] | None:
    """The floor of each row of these logits."""
    numbers = columns(len(logits), **fields).numbers
    found = row_floors(logits, np.arange(len(logits)), logits.amax(dim=1, keepdim=True), numbers)
    return None if found is None else found[:, 0].tolist()


def drawn(logits: list[float], num_draws: int = 400, **fields: Any) -> set[int]:
    """The tokens that are ever drawn from these logits."""
    rows = torch.tensor([logits]).expand(num_draws, -1).contiguous()
    return set(sample(rows, columns(num_draws, **fields)).token_ids.tolist())


def test_no_row_with_a_floor_costs_nothing() -> None:
    assert floors(torch.zeros(3, 5)) is None


def test_the_higher_of_two_floors_counts() -> None:
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
    found = floors(logits, top_n_sigma=np.array([1.0, 0.0, 1.0, 0.0]), min_p=np.array([0.0, 0.5, 0.5, 0.0]))
    assert found == pytest.approx([-1.0, np.log(0.5), np.log(0.5), -INF])


def test_a_logit_exactly_n_deviations_below_is_kept() -> None:
    """Of 2 and 0 the deviation is 1: with n = 2 both are kept, with a little less the highest alone."""
    assert drawn([2.0, 0.0], top_n_sigma=2.0) == {0, 1}
    assert drawn([2.0, 0.0], top_n_sigma=1.999) == {0}


@pytest.mark.parametrize("temperature", [0.25, 1.0, 40.0])
def test_temperature_does_not_change_what_is_kept(temperature: float) -> None:
    logits = [3.0, 2.5, 1.0, 0.0, -1.0]
    kept = drawn(logits, temperature=temperature, top_n_sigma=1.0)
    assert kept <= {i for i, x in enumerate(logits) if x >= 3.0 - np.std(logits)}
    assert temperature < 1 or kept == {0, 1}


def test_zero_or_less_is_off() -> None:
    assert drawn([1.0, 1.0, 0.5, 0.0], top_n_sigma=0.0) == {0, 1, 2, 3}
    assert drawn([1.0, 1.0, 0.5, 0.0], top_n_sigma=-3.0) == {0, 1, 2, 3}


def test_equal_logits_are_all_kept() -> None:
    assert drawn([1.5] * 4, top_n_sigma=0.1) == {0, 1, 2, 3}


def test_what_is_ruled_out_has_no_part_in_the_deviation() -> None:
    """Without the last two tokens the deviation of 2 and 0 is 1; with them it would be far larger."""
    rows = torch.tensor([[2.0, 0.0, -80.0, -90.0]]).expand(200, -1).contiguous()
    allowed = edits(200, allowed={row: [0, 1] for row in range(200)})
    assert set(sample(rows, columns(200, allowed, top_n_sigma=1.5)).token_ids.tolist()) == {0}
    assert set(sample(rows, columns(200, top_n_sigma=1.5)).token_ids.tolist()) == {0, 1}


def test_huge_logits_do_not_overflow() -> None:
    large = 3.0e38
    assert floors(torch.tensor([[large, -large]]), top_n_sigma=1.0) == pytest.approx([-large])
    assert drawn([large, large, -large], top_n_sigma=0.5) == {0, 1}


@pytest.mark.parametrize("vocab", [1, 2, 4097, 50_000])
def test_a_rows_floor_has_the_same_bits_in_every_batch(vocab: int) -> None:
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    together = floors(logits, top_n_sigma=1.5, temperature=0.7)
    alone = [floors(logits[row : row + 1], top_n_sigma=1.5, temperature=0.7)[0] for row in range(9)]
    assert together == alone
    wanted = -1.5 * logits.double().std(dim=1, correction=0) / 0.7
    np.testing.assert_allclose(together, wanted.numpy(), rtol=1e-6)
