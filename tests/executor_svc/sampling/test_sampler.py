"""The sampler's rules: known answers, greedy, ties, masks, logprobs, rows that cannot be sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cadenza_common.plan.result import SlotError
from executor_svc.sampling.noise import DrawPurpose, philox4x32, philox_of_one, row_keys
from executor_svc.sampling.row_math import fold_sum
from tests.helpers.executor.cpu_sampling import FUNCTIONS, sample
from tests.helpers.executor.sampling import columns, edits

INF, NAN = float("inf"), float("nan")


def normal(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# ---------------------------------------------------------------- the generator


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    """From kat_vectors of the Random123 library, philox4x32 with 10 rounds."""
    words = philox4x32(np.array([counter] * 3, np.uint64).T, np.array([key] * 3, np.uint64).T)
    assert words.T.tolist() == [expected] * 3
    assert list(philox_of_one((*counter,), (*key,))) == expected  # type: ignore[arg-type]


def test_few_rows_have_the_keys_that_they_have_among_many() -> None:
    generator = np.random.default_rng(3)
    seeds = generator.integers(0, 2**64, 40, np.uint64)
    indexes, positions = generator.integers(0, 2**32, 40), generator.integers(0, 2**31, 40)
    many = row_keys(seeds, indexes, positions, DrawPurpose.SAMPLE)
    few = [
        row_keys(seeds[i : i + 4], indexes[i : i + 4], positions[i : i + 4], DrawPurpose.SAMPLE)
        for i in range(0, 40, 4)
    ]
    assert np.concatenate(few).tolist() == many.tolist()


def splitmix_reference(key: int, token: int) -> int:
    mask = 2**64 - 1
    z = (key + token * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_splitmix_known_answer() -> None:
    """The first outputs of splitmix64 seeded with 1234567, as published with its reference code."""
    state = 1234567
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix_reference(state, i) for i in (1, 2, 3)] == expected


def test_gumbel_matches_its_definition() -> None:
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    ids = torch.arange(1000)
    noise = FUNCTIONS.gumbel(torch.tensor(keys)[:, None], ids)
    for row, key in zip(noise, keys, strict=True):
        v = np.array([((splitmix_reference(key % 2**64, t) >> 12) + 0.5) * 2.0**-52 for t in range(1000)])
        assert v.min() > 0
        assert v.max() < 1
        np.testing.assert_allclose(row.numpy(), -np.log(-np.log1p(-v)), rtol=2e-5, atol=2e-6)


def test_keys_depend_on_everything() -> None:
    def key(seed: int = 1, sample_index: int = 2, position: int = 3) -> int:
        arrays = np.array([seed], np.uint64), np.array([sample_index]), np.array([position])
        return int(row_keys(*arrays, DrawPurpose.SAMPLE)[0])

    keys = {key(), key(seed=2), key(seed=1 + 2**32), key(seed=2**64 - 1), key(sample_index=3), key(position=4)}
    assert len(keys) == 6
    assert key(sample_index=3, position=2) != key(sample_index=2, position=3)


# ---------------------------------------------------------------- greedy and ties


@pytest.mark.parametrize("vocab", [1, 2, 131, 1537, 49152])
def test_greedy_is_argmax(vocab: int) -> None:
    logits = normal(7, vocab)
    result = sample(logits, columns(7, temperature=0))
    assert result.token_ids.tolist() == logits.argmax(dim=1).tolist()
    assert result.valid.all()
    assert result.logprobs is None


@pytest.mark.parametrize("vocab", [5, 64, 1537, 32003])
@pytest.mark.parametrize("threads", [1, 2])
def test_ties_go_to_the_lowest_id(vocab: int, threads: int) -> None:
    logits = torch.zeros(3, vocab)
    logits[1, vocab // 2 :] = 1.0
    logits[2, :] = -0.0
    logits[2, 1] = 0.0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = sample(logits, columns(3, temperature=0, num_logprobs=3))
        limited = sample(logits, columns(3, top_k=1))
    finally:
        torch.set_num_threads(before)
    assert result.token_ids.tolist() == [0, vocab // 2, 0]
    assert limited.token_ids.tolist() == [0, vocab // 2, 0]
    assert result.logprobs is not None
    assert result.logprobs.ranks.tolist() == [1, 1, 1]
    assert result.logprobs.top_ids.tolist() == [[0, 1, 2], [vocab // 2 + i for i in range(3)], [0, 1, 2]]


def test_top_k_keeps_exactly_k_among_ties() -> None:
    result = sample(torch.zeros(4000, 200), columns(4000, top_k=3))
    assert set(result.token_ids.tolist()) == {0, 1, 2}


def test_tiny_temperature_is_greedy() -> None:
    logits = normal(50, 300)
    for temperature in (1e-6, 1e-20, 1e-38):
        result = sample(logits, columns(50, temperature=temperature))
        assert result.token_ids.tolist() == logits.argmax(dim=1).tolist()


def test_filters_always_keep_a_token() -> None:
    logits = normal(20, 300)
    best = logits.argmax(dim=1).tolist()
    for filters in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 5, "top_p": 1e-9, "min_p": 1.0}):
        assert sample(logits, columns(20, **filters)).token_ids.tolist() == best, filters


def test_filters_that_filter_nothing_change_no_token() -> None:
    """The noise belongs to the token id, so a row draws the same token on every path."""
    logits = normal(60, 1537)
    plain = sample(logits, columns(60)).token_ids.tolist()
    for filters in ({"top_k": 1537}, {"top_k": 1536}, {"top_p": 1 - 1e-7}, {"min_p": 1e-30}):
        assert sample(logits, columns(60, **filters)).token_ids.tolist() == plain, filters


def test_wide_nucleus_falls_back_on_more_candidates() -> None:
    """On a flat row a nucleus of 0.95 holds more than any prefix."""
    logits = normal(300, 5000, scale=0.01)
    tokens = sample(logits, columns(300, top_p=0.95)).token_ids
    ranks = [int((logits[i] > logits[i, token]).sum()) for i, token in enumerate(tokens.tolist())]
    assert max(ranks) > 2048
    assert max(ranks) < 0.96 * 5000


# ---------------------------------------------------------------- masks and rows that fail


def test_masked_tokens_are_never_chosen() -> None:
    logits = normal(40, 100)
    best = logits.argmax(dim=1).numpy()
    second = logits.topk(2).indices[:, 1]
    masked = edits(20, forbidden={row: [best[row]] for row in range(20)})
    before = logits.clone()
    greedy = sample(logits, columns(40, temperature=0, num_logprobs=1, edits=masked))
    assert greedy.token_ids.tolist() == [*second[:20].tolist(), *best[20:].tolist()]
    # Logprobs are of the model's own distribution.
    assert greedy.logprobs is not None
    assert greedy.logprobs.ranks.tolist() == [2] * 20 + [1] * 20
    assert greedy.logprobs.top_ids[:, 0].tolist() == best.tolist()
    drawn = sample(logits, columns(40, top_k=2, edits=masked)).token_ids
    assert not (drawn[:20] == best[:20]).any()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.1}, {"num_logprobs": 2}])
def test_rows_that_are_not_finite_fail_alone(temperature: float, filters: dict) -> None:
    logits = normal(6, 90)
    good = [0, 5]
    expected = sample(logits, columns(6, temperature=temperature, **filters)).token_ids[good].tolist()
    logits[1, 7] = NAN
    logits[2, :] = -INF
    logits[3, 89] = INF
    logits[4, :] = NAN
    logits[5, 3:50] = -INF
    logits[5, 60] = 50.0
    result = sample(logits, columns(6, temperature=temperature, **filters))
    assert result.errors.tolist() == [0, *[SlotError.NON_FINITE_LOGITS] * 4, 0]
    assert result.token_ids[good].tolist() == [expected[0], 60]


def test_a_mask_hides_no_nan() -> None:
    logits = normal(1, 90)
    logits[0, 7] = NAN
    result = sample(logits, columns(1, edits=edits(1, forbidden={0: [7]})))
    assert result.errors.tolist() == [SlotError.NON_FINITE_LOGITS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_ruled_out_fails_alone(temperature: float) -> None:
    logits = normal(4, 30)
    logits[1, :5] = -INF
    alone = sample(logits[3:], columns(1, temperature=temperature, seed=3, num_logprobs=1))
    ruled_out = edits(3, forbidden={0: range(30), 2: range(29)}, allowed={1: range(5)})
    result = sample(logits, columns(4, temperature=temperature, edits=ruled_out, num_logprobs=1))
    assert result.errors.tolist() == [SlotError.NO_ALLOWED_TOKEN, SlotError.NO_ALLOWED_TOKEN, 0, 0]
    assert result.token_ids[2:].tolist() == [29, alone.token_ids[0]]
    assert result.logprobs is not None
    assert result.logprobs.rows.tolist() == [2, 3]


# ---------------------------------------------------------------- logprobs


@pytest.mark.parametrize("vocab", [7, 131, 1537, 32003])
def test_logprobs_are_those_of_the_raw_logits(vocab: int) -> None:
    logits = normal(9, vocab)
    wanted = [-1, 0, 1, 5, -1, vocab, 2, 3, 0]
    result = sample(logits, columns(9, temperature=0.7, top_k=6, num_logprobs=wanted))
    reference = logits.double().log_softmax(dim=1)
    logprobs = result.logprobs
    assert logprobs is not None
    assert logprobs.rows.tolist() == [i for i, n in enumerate(wanted) if n >= 0]
    for place, row in enumerate(logprobs.rows.tolist()):
        token = int(result.token_ids[row])
        assert logprobs.chosen[place] == pytest.approx(float(reference[row, token]), rel=1e-6, abs=1e-6)
        assert logprobs.ranks[place] == int((logits[row] > logits[row, token]).sum()) + 1
        n = min(wanted[row], vocab)
        assert logprobs.num_top[place] == n
        order = torch.sort(logits[row], descending=True, stable=True).indices[:n]
        assert logprobs.top_ids[place, :n].tolist() == order.tolist()
        np.testing.assert_allclose(logprobs.top[place, :n], reference[row, order], rtol=1e-6, atol=2e-6)


def test_logprobs_with_tokens_ruled_out() -> None:
    logits = torch.tensor([[1.0, -INF, 0.0]])
    result = sample(logits, columns(1, num_logprobs=3))
    assert result.logprobs is not None
    assert result.logprobs.top_ids.tolist() == [[0, 2, 1]]
    assert result.logprobs.top[0, 2] == -INF


@pytest.mark.parametrize("width", [1, 2, 3, 64, 1537, 49153])
def test_fold_sum(width: int) -> None:
    x = torch.rand(3, width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fold_sum(x), x.double().sum(dim=1, keepdim=True), rtol=2e-7, atol=0)
