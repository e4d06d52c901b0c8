"""Logits processors: their definitions in float64, their order, numbers too large, rows that nothing is done to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_svc.sampling.logits_processors import process
from tests.helpers.executor.cpu_sampling import sample
from tests.helpers.executor.sampling import columns, edited_exactly, edits

INF = float("inf")
LARGEST = torch.finfo(torch.float32).max


def normal(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


PARTS = [
    {"counts": {0: {3: 0, 4: 2, 9: 5}}, "penalties": (1.7, 0.0, 0.0)},
    {"counts": {0: {3: 0, 4: 2, 9: 5}}, "penalties": (1.0, 0.4, 0.0)},
    {"counts": {0: {3: 0, 4: 2, 9: 5}}, "penalties": (1.0, 0.0, -1.1)},
    {"biases": {0: {4: 2.5, 7: -1.5}}},
    {"allowed": {0: [4, 5, 6, 9]}},
    {"forbidden": {0: [4, 5, 5]}},
    {
        "counts": {0: {3: 0, 4: 2, 9: 5}},
        "penalties": (0.7, 0.3, 0.9),
        "biases": {0: {4: 2.5, 7: -1.5, 9: 8.0}},
        "allowed": {0: [3, 4, 5, 6, 9]},
        "forbidden": {0: [5]},
    },
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_definitions(part: dict) -> None:
    logits = normal(1, 12)
    found = process(logits, edits(1, **part))
    np.testing.assert_allclose(found[0].double().numpy(), edited_exactly(logits[0].numpy(), **part), rtol=1e-6)


def test_the_bias_comes_before_the_penalties() -> None:
    logits = torch.tensor([[-1.0, 0.0]])
    found = process(logits, edits(1, biases={0: {0: 3.0}}, counts={0: {0: 2}}, penalties=(4.0, 0.25, 1.0)))
    # (-1 + 3) / 4 - 0.25 * 2 - 1; the penalty first would have made it -4 + 3 - 1.5.
    assert found.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("penalties", [(1e-38, 3e38, 3e38), (1e38, -3e38, -3e38), (1e-38, -3e38, 3e38)], ids=str)
def test_numbers_too_large_stay_finite(sign: float, penalties: tuple[float, float, float]) -> None:
    """Neither NaN nor infinity: the row can be sampled, and what the model or a list rules out stays ruled out."""
    logits = torch.tensor([[5.0, -5.0, 1.0, -INF, 2.0]])
    huge = {0: dict.fromkeys(range(5), sign * LARGEST)}
    found = process(
        logits, edits(1, biases=huge, counts={0: dict.fromkeys(range(5), 9)}, penalties=penalties, forbidden={0: [4]})
    )
    assert found[0, :3].isfinite().all()
    assert found[0, 3:].tolist() == [-INF, -INF]
    for temperature in (0.0, 0.01, 1.0):
        result = sample(logits, columns(1, temperature=temperature, edits=edits(1, biases=huge, forbidden={0: [4]})))
        assert result.errors.tolist() == [0]
        assert result.token_ids[0] in (0, 1, 2)


def test_a_bias_cannot_bring_back_what_is_ruled_out() -> None:
    logits = normal(2, 20)
    both = edits(2, biases={0: {3: 100.0}, 1: {3: 100.0}}, forbidden={0: [3]}, allowed={1: [4, 5]})
    assert sample(logits, columns(2, temperature=0, edits=both)).token_ids.tolist() == [
        logits[0].where(torch.arange(20) != 3, -INF).argmax(),
        4 + logits[1, 4:6].argmax(),
    ]


def test_logits_and_logprobs_stay_the_model_s_own() -> None:
    logits = normal(5, 200)
    before = logits.clone()
    plain = sample(logits, columns(5, temperature=0, num_logprobs=4))
    changed = edits(5, biases={row: {11: 50.0} for row in (1, 3)}, allowed={2: [7]}, forbidden={0: [0], 4: [0]})
    result = sample(logits, columns(5, temperature=0, num_logprobs=4, edits=changed))
    assert torch.equal(logits, before)
    assert result.token_ids[1:4].tolist() == [11, 7, 11]
    assert plain.logprobs is not None
    assert result.logprobs is not None
    assert result.logprobs.top_ids.tolist() == plain.logprobs.top_ids.tolist()
    assert result.logprobs.top.tobytes() == plain.logprobs.top.tobytes()
    exact = logits.double().log_softmax(dim=1)[torch.arange(5), torch.from_numpy(result.token_ids)]
    np.testing.assert_allclose(result.logprobs.chosen, exact, rtol=1e-6)


def test_only_rows_with_edits_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row's bias must not cost a copy of the batch: no index_select takes the whole width of the other rows."""
    logits = normal(64, 4000)
    copied: list[int] = []
    index_select = torch.Tensor.index_select

    def watched(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        copied.append(len(index) * self.shape[1])
        return index_select(self, dim, index)

    one = edits(1, biases={0: {5: 1.0}})
    monkeypatch.setattr(torch.Tensor, "index_select", watched)
    for temperature in (0.0, 1.0):
        sample(logits, columns(64, temperature=temperature, edits=one))
        assert max(copied) < 32 * 4000
