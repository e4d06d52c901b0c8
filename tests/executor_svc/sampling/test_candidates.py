"""Candidates for beams: order, ties, what is left out, failures, and that rows and forks do not notice each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cadenza_common.plan.result import SlotError
from executor_svc.sampling import row_math
from executor_svc.sampling.candidates import CandidateColumns
from tests.helpers.executor.cpu_sampling import best_candidates, row_logprobs, sample
from tests.helpers.executor.plans import ints
from tests.helpers.executor.sampling import columns, edits

NONE = float("-inf")


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def candidates_of(
    logits: Tensor, sources: list[int], counts: list[int], **fields: Any
) -> list[tuple[list[int], bytes]]:
    """Token ids and the bits of the logprobs of each row."""
    found = best_candidates(logits, CandidateColumns(ints(*sources), ints(*counts), **fields))
    assert not found.errors.any()
    rows = zip(found.token_ids, found.logprobs, found.counts, strict=True)
    return [(ids[:count].tolist(), logprobs[:count].tobytes()) for ids, logprobs, count in rows]


@pytest.mark.parametrize("vocab", [1, 7, 1000, 9001])
def test_they_are_the_best_by_log_softmax(vocab: int) -> None:
    logits, k = random_logits(5, vocab), min(12, vocab)
    expected = logits.double().log_softmax(dim=1)
    found = best_candidates(logits, CandidateColumns(np.arange(5), np.full(5, k)))
    assert found.token_ids.tolist() == expected.topk(k, dim=1).indices.tolist()
    np.testing.assert_allclose(found.logprobs, expected.topk(k, dim=1).values, rtol=1e-6, atol=1e-6)
    # To the bit what is reported as top logprobs.
    top = row_logprobs(logits, np.zeros(5, np.int64), np.arange(5), np.full(5, k))
    assert found.logprobs.tobytes() == top.top.tobytes()


def test_ties_go_to_the_lowest_id_and_what_is_ruled_out_is_left_out() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, NONE, 2.0]])
    changed = edits(1, forbidden={0: [3]}, biases={0: {2: 0.5, 0: 0.5}})
    assert [ids for ids, _ in candidates_of(logits, [0], [6])] == [[1, 3, 5, 0, 2]]
    assert [ids for ids, _ in candidates_of(logits, [0], [6], edits=changed)] == [[1, 5, 0, 2]]
    assert [ids for ids, _ in candidates_of(logits, [0], [3], edits=changed)] == [[1, 5, 0]]


def test_each_row_fails_alone() -> None:
    logits = random_logits(5, 40)
    logits[1, 7], logits[2, 39], logits[3] = float("nan"), float("inf"), NONE
    nothing_left = edits([4], forbidden={0: range(40)})
    found = best_candidates(logits, CandidateColumns(np.arange(5), np.full(5, 4), nothing_left))
    assert found.errors.tolist() == [0, *[SlotError.NON_FINITE_LOGITS] * 3, SlotError.NO_ALLOWED_TOKEN]
    assert found.counts[0] == 4
    assert (found.token_ids[0].tolist(), found.logprobs[0].tobytes()) == candidates_of(logits, [0], [4])[0]


@pytest.mark.parametrize("chunk_elements", [1, 3000, 1 << 17])
def test_a_row_has_the_same_bits_in_any_company(monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    vocab = 1003
    logits = random_logits(9, vocab, seed=3)
    penalties = {"counts": {0: {5: 2, 9: 0}}, "penalties": (1.3, 0.2, 0.1), "biases": {0: {17: 60.0}}}
    sources, counts = [4, 0, 0, 8, 3, 4], [3, 9, 1, 256, 8, 8]
    alone = [
        candidates_of(logits[source : source + 1], [0], [count], edits=edits(1, **penalties) if row == 2 else None)[0]
        for row, (source, count) in enumerate(zip(sources, counts, strict=True))
    ]
    monkeypatch.setattr(row_math, "_CHUNK_ELEMENTS", chunk_elements)
    assert candidates_of(logits, sources, counts, edits=edits([2], **penalties)) == alone
    assert alone[2][0] == [17] != alone[1][0][:1], "the edits change something"


FORKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 20},
    {"top_p": 0.7, "min_p": 0.01},
    {"top_k": 300, "top_p": 0.99, "temperature": 2.0},
]


@pytest.mark.parametrize("filters", FORKED, ids=str)
@pytest.mark.parametrize("sources", [[0, 0, 0, 1, 2], [2, 1, 0, 2, 1], [1, 1, 1], [0, 0, 2], [2, 1, 2, 0]], ids=str)
def test_rows_that_read_the_same_logits_have_the_tokens_that_they_have_alone(
    filters: dict[str, Any], sources: list[int]
) -> None:
    """By their own seeds, with edits in some; also where the plain ones are as many as the rows of the logits."""
    logits, n = random_logits(3, 700, seed=1), len(sources)
    fields = {"num_logprobs": np.arange(n) - 1, "seed": np.arange(n) + 50} | filters
    bias = {0: {int(logits[sources[1]].argmin()): 30.0}}
    drawn = columns(n, edits=edits([1], biases=bias), **fields)
    found = sample(logits, replace(drawn, sources=ints(*sources)))
    for row, source in enumerate(sources):
        one = {key: value[row] if isinstance(value, np.ndarray) else value for key, value in fields.items()}
        alone = sample(
            logits[source : source + 1], columns(1, edits=edits(1, biases=bias) if row == 1 else None, **one)
        )
        assert found.token_ids[row] == alone.token_ids[0]
        if row > 0:
            assert found.logprobs is not None
            assert alone.logprobs is not None
            assert found.logprobs.rows[row - 1] == row
            assert found.logprobs.chosen[row - 1] == alone.logprobs.chosen[0]
            assert found.logprobs.ranks[row - 1] == alone.logprobs.ranks[0]
            assert found.logprobs.top_ids[row - 1, : row - 1].tolist() == alone.logprobs.top_ids[0].tolist()


def test_rows_that_read_a_broken_row_fail_with_it() -> None:
    logits = random_logits(2, 30)
    logits[1, 4] = float("nan")
    found = sample(logits, replace(columns(4, edits=edits([3], biases={0: {4: 1.0}})), sources=ints(0, 1, 0, 1)))
    assert found.errors.tolist() == [0, SlotError.NON_FINITE_LOGITS, 0, SlotError.NON_FINITE_LOGITS]
