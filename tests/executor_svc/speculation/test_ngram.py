"""Drafts by n-grams against a search of the whole text."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.speculation import ngram_table
from executor_svc.speculation.ngram import NgramSource
from tests.executor_svc.speculation.draft_model import Driver, limits, ngram_drafts


def driver_of(num_slots=4, max_model_len=1024, **options):
    bounds = limits(num_slots, max_model_len)
    return Driver(NgramSource(bounds, **options), bounds)


@st.composite
def loads(draw):
    """Parameters of a source; the prompts of some slots; the tokens of each step for each of them."""
    vocab = draw(st.sampled_from([2, 3, 10, 256_000]))
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    shortest = draw(st.integers(1, 4))
    longest = draw(st.integers(shortest, 6))
    words = [[rng.randrange(vocab) for _ in range(rng.randint(1, 8))] for _ in range(6)]

    def text(size):
        tokens = []
        while len(tokens) < size:
            tokens += rng.choice(words) if rng.random() < 0.7 else [rng.randrange(vocab)]
        return tokens[:size]

    num_slots = draw(st.integers(1, 3))
    prompts = [text(draw(st.sampled_from([0, 1, 2, 5, 30, 250, 300]))) for _ in range(num_slots)]
    grows = st.sampled_from([0, 1, 1, 2, 5, 40, 200])
    steps = [[text(draw(grows)) for _ in range(num_slots)] for _ in range(draw(st.integers(1, 5)))]
    return shortest, longest, prompts, steps


@given(loads(), st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_drafts_are_those_of_the_definition(load, most):
    shortest, longest, prompts, steps = load
    driver = driver_of(max_model_len=2048, min_match=shortest, max_match=longest)
    rows = range(len(prompts))
    for slot, prompt in enumerate(prompts):
        driver.admit(slot, prompt)
    for step in [[[] for _ in rows], *steps]:
        for slot, tokens in enumerate(step):
            driver.append(slot, tokens)
        expected = [ngram_drafts(driver.text(slot), most, shortest, longest, 1 << 30) for slot in rows]
        assert driver.drafts(rows, most) == expected
        assert driver.drafts(rows, most) == expected


def test_a_period_is_drafted_to_the_full_number():
    driver = driver_of()
    driver.admit(0, [1, 2, 3, 1, 2, 3, 1])
    assert driver.drafts([0], 8) == [[2, 3, 1, 2, 3, 1, 2, 3]]


def test_the_longest_match_wins_then_the_most_recent():
    driver = driver_of(min_match=1, max_match=3)
    driver.admit(0, [1, 2, 3, 7, 9, 2, 3, 8, 9, 2, 3, 6, 5, 1, 2, 3])
    driver.admit(1, [2, 3, 7, 9, 2, 3, 8, 9, 2, 3, 6, 5, 0, 2, 3])
    assert driver.drafts([0, 1], 1) == [[7], [6]]


def test_long_prompts_are_indexed_over_several_steps():
    rng = random.Random(3)
    driver = driver_of(num_slots=3, max_model_len=6000, max_indexed=500)
    driver.admit(0, [rng.randrange(30) for _ in range(5000)])
    driver.admit(1, [rng.randrange(30) for _ in range(900)])
    driver.admit(2, [rng.randrange(30) for _ in range(40)])
    indexed = np.zeros(3, int)
    for step in range(14):
        drafts = driver.drafts([0, 1, 2], 4)
        now = np.array([table.num_indexed for table in driver.source._tables])
        assert 0 < (now - indexed).sum() <= 500 + 3 * 6 or step > 12
        for slot in range(3):
            assert drafts[slot] == ngram_drafts(driver.text(slot), 4, 2, 4, now[slot])
            driver.append(slot, [rng.randrange(30)])
        indexed = now
    assert [driver.slots.num_tokens[slot] - indexed[slot] for slot in range(3)] == [2, 2, 2]


def test_a_table_that_is_full_is_made_anew_in_slices():
    rng = random.Random(4)
    driver = driver_of(max_model_len=4096, max_indexed=300)
    driver.admit(0, [rng.randrange(9) for _ in range(200)])
    least = []
    for _ in range(500):
        (drafts,) = driver.drafts([0], 3)
        table = driver.source._tables[0]
        assert drafts == ngram_drafts(driver.text(0), 3, 2, 4, table.num_indexed)
        least.append(driver.slots.num_tokens[0] - table.num_indexed)
        driver.append(0, [rng.randrange(9) for _ in range(3)])
    # After each new table the text was behind, and it caught up.
    assert max(least) > 100
    assert least[-1] == 1


def test_released_and_admitted_again():
    driver = driver_of()
    driver.admit(0, [5, 6, 7, 8, 5, 6])
    driver.admit(1, [5, 6, 7, 8, 5, 6])
    assert driver.drafts([0, 1], 2) == [[7, 8], [7, 8]]
    driver.release(0)
    driver.admit(0, [1, 2, 3, 4, 5, 6])
    assert driver.drafts([0, 1], 2) == [[], [7, 8]]
    # A sequence in the place of another, whose release was not reported.
    driver.admit(1, [9, 5, 6])
    assert driver.drafts([0, 1], 2) == [[], []]
    driver.append(1, [9, 5])
    assert driver.drafts([1], 2) == [[6, 9]]
    driver.source.clear()
    assert driver.drafts([1], 2) == [[]]
    assert driver.source.num_bytes == 0


def test_no_drafts_where_none_are_allowed_or_known():
    driver = driver_of()
    driver.admit(0, [])
    driver.admit(1, [4])
    driver.admit(2, [4, 4, 4])
    assert driver.drafts([]) == []
    assert driver.drafts([0, 1, 2, 3], [3, 3, 0, 3]) == [[], [], [], []]
    assert driver.drafts([0, 1, 2, 3], [3, 3, 1, 3]) == [[], [], [4], []]


@pytest.mark.slow
@given(st.integers(0, 1 << 30), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_n_grams_lost_in_a_crowded_table_give_no_wrong_matches(seed, max_probes):
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_table, "_MAX_PROBES", max_probes)
        driver = driver_of(max_model_len=2048)
        driver.admit(0, [rng.randrange(20) for _ in range(400)])
        found = 0
        for _ in range(30):
            text = driver.text(0)
            (drafts,) = driver.drafts([0], 1)
            if drafts:
                found += 1
                # After a match of two tokens at least.
                joined = [text[i : i + 3] for i in range(len(text) - 2)]
                assert [*text[-2:], *drafts] in joined
            driver.append(0, [rng.randrange(20) for _ in range(rng.choice([1, 30]))])
        assert found


def test_lengths_out_of_order_are_refused():
    for shortest, longest in ((0, 3), (4, 3)):
        with pytest.raises(ValueError, match="min_match"):
            NgramSource(limits(), min_match=shortest, max_match=longest)
