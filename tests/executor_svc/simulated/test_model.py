"""The simulated model: hashes, rankings, and the tokens that follow; in plain integers and in arrays alike."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cadenza_common.plan.result import SlotError
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.sampling import splitmix64
from executor_svc.sampling.logits_edits import LogitsEdits, RowTokens
from executor_svc.simulated import hashing
from executor_svc.simulated.expected_tokens import expected_candidates, expected_logprobs, expected_tokens
from executor_svc.simulated.model import fingerprint
from executor_svc.simulated.ranking import Ranking, strides
from executor_svc.simulated.token_choice import best_ranks, choose
from tests.helpers.executor.plans import ints

NO_FLOATS = np.zeros(0, np.float32)


def hashes(count: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 2**64, count, np.uint64)


def test_the_mixer_is_splitmix64s() -> None:
    """The first two numbers of the reference implementation from seed 0."""
    states = np.array([splitmix64.GAMMA, 2 * splitmix64.GAMMA % 2**64], np.uint64)
    assert hashing.mix(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert splitmix64.mix(splitmix64.GAMMA) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("size", [2, 3, 6, 50, 64, 257, 1000])
def test_every_token_has_its_one_rank(size: int) -> None:
    ranking = Ranking(hashes(20), size)
    rows, ranks = np.repeat(np.arange(20), size), np.tile(np.arange(size), 20)
    found = ranking.tokens(rows, ranks)
    assert (np.sort(found.reshape(20, size)) == np.arange(size)).all()
    assert ranking.ranks(rows, found).tolist() == ranks.tolist()


def test_large_vocabularies() -> None:
    for size in (151_936, 2**21):
        ranking = Ranking(hashes(50), size)
        rows, ranks = np.arange(50), np.random.default_rng(1).integers(0, size, 50)
        assert ranking.ranks(rows, ranking.tokens(rows, ranks)).tolist() == ranks.tolist()
        assert len(strides(size)[0]) == 16


@pytest.mark.parametrize("size", [2, 3, 50, 32_768])
def test_probabilities_fall_and_sum_to_one(size: int) -> None:
    ranking = Ranking(np.append(hashes(20), np.array([0, 2**64 - 1], np.uint64)), size)
    rows, ranks = np.repeat(np.arange(22), size), np.tile(np.arange(size), 22)
    logprobs = ranking.logprobs(rows, ranks).reshape(22, size)
    assert np.allclose(np.exp(logprobs).sum(axis=1), 1)
    assert (np.diff(logprobs) < 0).all()
    assert (np.exp(logprobs[:, 0]) > 0.5).all()
    # What is sent are 32 bits; neighbours at the front stay apart there too.
    assert (np.diff(logprobs[:, :500].astype(np.float32)) < 0).all()


def edits_of(rows: list[int], allowed: list[tuple[int, int]], forbidden: list[tuple[int, int]]) -> LogitsEdits:
    def pairs(of: list[tuple[int, int]]) -> RowTokens:
        return RowTokens(ints(*(row for row, _ in of)), ints(*(token for _, token in of)))

    none = RowTokens.none()
    return LogitsEdits(
        ints(*rows), pairs(allowed), pairs(forbidden), none, NO_FLOATS, none, NO_FLOATS, NO_FLOATS, NO_FLOATS, NO_FLOATS
    )


def test_masks_leave_the_best_that_may_be_chosen() -> None:
    """Against a walk down each ranking; rows 1 and 3 of five have masks of all kinds at random."""
    rng, size = np.random.default_rng(3), 12
    for _ in range(200):
        ranking = Ranking(rng.integers(0, 2**64, 5, np.uint64), size)
        allowed = [(1, int(token)) for token in rng.choice(size, rng.integers(0, 5))]
        forbidden = [(int(rng.integers(2)), int(token)) for token in rng.choice(size, rng.integers(0, 13))]
        edits = edits_of([1, 3], allowed, forbidden)
        wanted = rng.integers(1, size + 1, 5)
        found, ranks = best_ranks(ranking, wanted, edits)
        chosen, errors = choose(ranking, edits)
        for row in range(5):
            pair = {1: 0, 3: 1}.get(row)
            only = {token for at, token in allowed if at == pair} or set(range(size))
            out = {token for at, token in forbidden if at == pair}
            order = ranking.tokens(np.full(size, row), np.arange(size)).tolist()
            left = [token for token in order if token in only - out]
            mine = found == row
            assert ranking.tokens(found[mine], ranks[mine]).tolist() == left[: wanted[row]]
            assert errors[row] == (0 if left else SlotError.NO_ALLOWED_TOKEN)
            assert not left or chosen[row] == left[0]


def test_tokens_are_what_they_were() -> None:
    """Recorded with version 1. Another answer needs another hashing.VERSION: executors would not agree."""
    assert hashing.VERSION == 1
    greedy, drawn = SequenceSampling(), SequenceSampling(temperature=1.0, seed=2**63 + 5)
    assert expected_tokens([1, 2, 3], greedy, 5, 32_768) == [14665, 32591, 18410, 16352, 21342]
    assert expected_tokens([1, 2, 3], drawn, 5, 32_768, sample_index=2) == [12324, 21843, 17993, 31540, 21887]
    assert fingerprint(32_768).digest.hex()[:16] == "de1a2209490e5317"


def test_fingerprints_differ_by_vocabulary_and_mode_alone() -> None:
    assert fingerprint(50) == fingerprint(50)
    assert (fingerprint(50).mode, fingerprint(50, fast=True).mode) == ("exact", "fast")
    assert fingerprint(50).digest != fingerprint(50, fast=True).digest
    assert fingerprint(50).digest != fingerprint(51).digest
    assert fingerprint(50).weights_digest == fingerprint(50, fast=True).weights_digest
    assert fingerprint(50).weights_digest != fingerprint(51).weights_digest


def test_a_sequence_depends_on_all_its_parts() -> None:
    def first(prompt: list[int], **fields: object) -> int:
        index = fields.pop("sample_index", 0)
        return expected_tokens(prompt, SequenceSampling(**fields), 1, 2**21, sample_index=index)[0]

    prompt = [5, 6, 7, 8]
    others = [[4, 6, 7, 8], [5, 6, 7, 9], [6, 5, 7, 8], [5, 6, 7], [5, 6, 7, 8, 8], [0, 5, 6, 7, 8]]
    greedy = {first(tokens_) for tokens_ in [prompt, *others]}
    assert len(greedy) == 1 + len(others)
    drawn = {first(prompt, temperature=1.0, seed=seed, sample_index=i) for seed in (0, 1, 2**63) for i in (0, 1)}
    assert len(drawn) == 6
    assert first(prompt, seed=9) == first(prompt)


def test_stop_tokens_end_after_min_tokens() -> None:
    free = expected_tokens([1, 2], SequenceSampling(), 6, 50)
    stop = free[2]
    assert expected_tokens([1, 2], SequenceSampling(stop_token_ids=ints(stop)), 6, 50) == free[: free.index(stop) + 1]
    late = expected_tokens([1, 2], SequenceSampling(stop_token_ids=ints(stop), min_tokens=5), 9, 50)
    assert stop not in late[:4]
    assert late[: free.index(stop)] == free[: free.index(stop)]


def test_output_given_before_goes_on() -> None:
    whole = expected_tokens([1, 2], SequenceSampling(temperature=1.0, seed=3), 8, 50)
    for cut in range(8):
        sampling = SequenceSampling(temperature=1.0, seed=3)
        assert expected_tokens([1, 2], sampling, 8 - cut, 50, output=whole[:cut]) == whole[cut:]


def test_nothing_allowed_is_the_end() -> None:
    sampling = SequenceSampling(allowed_token_ids=ints(4), bad_words=(ints(4, 4),))
    assert expected_tokens([1], sampling, 5, 50) == [4]


def test_candidates_are_the_ranking_under_masks() -> None:
    free = expected_candidates([1, 2], [3], SequenceSampling(), 4, 50)
    masked = expected_candidates([1, 2], [3], SequenceSampling(bad_words=(ints(free[1][0]),)), 3, 50)
    assert masked == [free[0], *free[2:]]
    assert [logprob for _, logprob in free] == sorted((logprob for _, logprob in free), reverse=True)
    logprob, rank, best, logprobs = expected_logprobs([1, 2, 3, free[2][0]], 3, 4, 50)
    assert (logprob, rank) == (free[2][1], 3)
    assert list(zip(best, logprobs, strict=True)) == free
    assert len(expected_candidates([1], [], SequenceSampling(), 9, 3)) == 3
    total = sum(math.exp(logprob) for _, logprob in expected_candidates([1], [], SequenceSampling(), 50, 50))
    assert math.isclose(total, 1)
