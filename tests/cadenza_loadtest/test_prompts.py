"""Prompts: the same for the same seed and shape, within the vocabulary, with shared prefixes and histories in front."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cadenza_loadtest.requests import LoadTestError, RequestShape
from cadenza_loadtest.workloads.prompts import VOCABULARY, Prompts, id_range


def shape(index: int, length: int, **fields: object) -> RequestShape:
    return RequestShape(index, length, 1, **fields)


@given(seed=st.integers(0, 2**80), order=st.permutations(range(6)))
def test_a_prompt_follows_from_seed_and_index_alone(seed: int, order: list[int]) -> None:
    shapes = [shape(index, 10 + index) for index in range(6)]
    one, other = Prompts(seed, 32000), Prompts(seed, 32000)
    expected = [one.token_ids(each) for each in shapes]
    found = {index: other.token_ids(shapes[index]) for index in order}
    assert [found[index] for index in range(6)] == expected
    assert [len(ids) for ids in expected] == [10, 11, 12, 13, 14, 15]
    assert all(isinstance(token_id, int) for token_id in expected[0])
    assert Prompts(seed + 1, 32000).token_ids(shapes[5]) != expected[5]


def test_no_two_requests_begin_alike() -> None:
    prompts = Prompts(0, 32000)
    assert len({tuple(prompts.token_ids(shape(index, 16))) for index in range(5000)}) == 5000


@pytest.mark.parametrize(
    ("vocab_size", "first", "end"),
    [(None, 300, 8000), (128_256, 300, 8000), (8000, 300, 8000), (2048, 300, 2048), (364, 300, 364), (363, 181, 363),
     (64, 32, 64), (1, 0, 1)],
)  # fmt: skip
def test_ids_stay_off_special_ones(vocab_size: int | None, first: int, end: int) -> None:
    assert id_range(vocab_size) == (first, end)
    ids = np.array(Prompts(3, vocab_size).token_ids(shape(0, 20_000)))
    assert ids.min() >= first
    assert ids.max() < end
    counts = np.bincount(ids - first, minlength=end - first)
    assert end - first == 1 or stats.chisquare(counts).pvalue > 0.001, "every id as often"


def test_ids_may_be_given() -> None:
    assert set(Prompts(0, 100, first_id=5, end_id=8).token_ids(shape(0, 200))) == {5, 6, 7}


def test_a_shared_prefix_is_the_same_for_all_requests_that_have_it() -> None:
    prompts = Prompts(9, 32000)
    first, second, other, none = (
        prompts.token_ids(shape(index, 40, prefix=prefix, num_prefix_tokens=32 if prefix >= 0 else 0))
        for index, prefix in enumerate([4, 4, 5, -1])
    )
    assert len(first) == len(second) == 40
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]
    assert other[:32] != first[:32]
    assert none[:32] not in (first[:32], other[:32])
    # Independently of earlier calls, and also if a prompt was truncated within its prefix.
    again = Prompts(9, 32000)
    assert again.token_ids(shape(7, 20, prefix=4, num_prefix_tokens=20)) == first[:20]
    assert again.token_ids(shape(1, 40, prefix=4, num_prefix_tokens=32)) == second


def test_a_prefix_is_no_requests_own_beginning() -> None:
    prompts = Prompts(9, 32000)
    prefixes = [prompts.token_ids(shape(99, 8, prefix=prefix, num_prefix_tokens=8)) for prefix in range(50)]
    assert not [index for index in range(50) if prompts.token_ids(shape(index, 8)) in prefixes]


def test_history_stands_in_front() -> None:
    prompts = Prompts(1, 32000)
    own = prompts.token_ids(shape(3, 5))
    assert prompts.token_ids(shape(3, 5), [1, 2, 3]) == [1, 2, 3, *own]
    assert prompts.token_ids(shape(3, 5), (1,)) == [1, *own]
    assert prompts.text(shape(3, 5), "said before") == f"said before {prompts.text(shape(3, 5))}"


def test_a_files_own_prompts_are_kept() -> None:
    prompts = Prompts(1, 100)
    given_ids = shape(2, 3, prompt_token_ids=(99, 0, 7))
    assert prompts.token_ids(given_ids, [5]) == [5, 99, 0, 7]
    given_text = shape(2, 3, prompt_text="Once upon")
    assert prompts.text(given_text) == "Once upon"
    assert prompts.text(given_text, "Well,") == "Well, Once upon"
    with pytest.raises(LoadTestError, match="request 2: its prompt is a text, but token ids are needed"):
        prompts.token_ids(given_text)
    with pytest.raises(LoadTestError, match="request 2: its prompt is token ids, but a text is needed"):
        prompts.text(given_ids)
    with pytest.raises(LoadTestError, match=r"request 5: prompt: token id 100 is not in the vocabulary.*last is 99"):
        prompts.token_ids(shape(5, 2, prompt_token_ids=(1, 100)))
    assert Prompts(1).token_ids(shape(5, 2, prompt_token_ids=(1, 10**6))) == [1, 10**6], "vocabulary not known"


def test_texts_have_a_word_for_each_token() -> None:
    prompts = Prompts(4)
    text = prompts.text(shape(0, 300))
    assert len(text.split(" ")) == 300
    assert set(text.split(" ")) <= set(VOCABULARY)
    assert prompts.text(shape(1, 300)) != text
    assert Prompts(4).text(shape(0, 300)) == text
    assert Prompts(5).text(shape(0, 300)) != text


def test_texts_share_prefixes() -> None:
    prompts = Prompts(4)
    one, two = (prompts.text(shape(index, 30, prefix=2, num_prefix_tokens=20)).split(" ") for index in range(2))
    assert len(one) == 30
    assert one[:20] == two[:20]
    assert one[20:] != two[20:]


def test_words_are_common_and_not_there_twice() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY) > 500
    assert all(word.isascii() and word.islower() and word.isalpha() and len(word) <= 8 for word in VOCABULARY)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 0), "at least one token, not 0"),
        ((0, 100, 50, 50), "from 50 to 50"),
        ((0, 100, 50, 101), "from 50 to 101 are not in a vocabulary of 100"),
        ((0, 100, -1, 5), "from -1 to 5"),
        ((-3, 100), "--seed -3"),
    ],
)
def test_bad_ranges_are_refused(arguments: tuple[int, ...], words: str) -> None:
    with pytest.raises(LoadTestError, match=words):
        Prompts(*arguments)
