"""The suffix automaton against occurrences found by looking everywhere."""

import itertools
import random
import tracemalloc
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.cpu.kernels.suffixes.growth import SuffixKernels
from executor_svc.speculation.suffix_automaton import NO_STATE, ROOT, SuffixAutomaton
from tests.executor_svc.speculation.draft_model import Corpus

# Which of up to three sequences grows, by which token.
GROWTH = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=24)


def followers_of(automaton, state):
    """(token, the state after it) of every edge of a state, in the order in which they were added."""
    if automaton.token[state] >= 0:
        yield automaton.token[state], automaton.target[state]
    last = edge = automaton.ring[state]
    while edge:
        edge = automaton.edge_next[edge]
        yield automaton.edge_token[edge], automaton.edge_target[edge]
        if edge == last:
            return


KERNELS = SuffixKernels()


def extended(automaton, state, *tokens):
    return KERNELS.extend(automaton, state, array("i", tokens))


def grown(growth, max_counted=1000):
    automaton, corpus = SuffixAutomaton(max_counted), Corpus()
    states = [ROOT] * 3
    for _ in states:
        corpus.new_text()
    for number, token in growth:
        states[number] = extended(automaton, states[number], token)
        corpus.append(number, [token])
    return automaton, corpus, states


def state_of(automaton, substring):
    state = ROOT
    for token in substring:
        state = automaton.follow(state, token)
        if state == NO_STATE:
            break
    return state


def substrings(corpus):
    return {tuple(text[i:j]) for text in corpus.texts for i, j in itertools.combinations(range(len(text) + 1), 2)}


@given(GROWTH)
def test_recognises_exactly_the_substrings(growth):
    automaton, corpus, _ = grown(growth)
    known = substrings(corpus)
    for substring in known:
        assert state_of(automaton, substring) != NO_STATE
    for size in range(1, 5):
        for string in itertools.product(range(3), repeat=size):
            assert (state_of(automaton, string) != NO_STATE) == (string in known)
    for substring in known:
        for token in range(3):
            assert (automaton.follow(state_of(automaton, substring), token) != NO_STATE) == (
                (*substring, token) in known
            )


@given(GROWTH)
def test_counts_are_occurrences(growth):
    automaton, corpus, _ = grown(growth)
    for substring in substrings(corpus):
        assert automaton.count[state_of(automaton, substring)] == len(corpus.ends(substring))


@given(GROWTH)
def test_states_are_those_of_the_smallest_automaton(growth):
    automaton, corpus, states = grown(growth)
    known = substrings(corpus)
    longest = {}
    for substring in known:
        state = state_of(automaton, substring)
        longest[state] = max(longest.get(state, ()), substring, key=len)
        same = state_of(automaton, substring[1:]) == state
        assert same == (len(substring) > 1 and corpus.ends(substring) == corpus.ends(substring[1:]))
    assert automaton.num_states == len(longest) + 1 <= max(2 * len(growth), 1)
    for state, substring in longest.items():
        assert automaton.length[state] == len(substring)
        assert automaton.link[state] == state_of(automaton, corpus.shorter(substring))
    assert states == [state_of(automaton, text) for text in corpus.texts]


@given(GROWTH, st.integers(1, 6))
def test_capped_counts_are_too_low_only_for_substrings_with_many_longer_ones(growth, cap):
    automaton, corpus, _ = grown(growth, cap)
    exact, _, _ = grown(growth)
    # The number of states between a state and the longest that ends at the same place.
    above = dict.fromkeys(range(automaton.num_states), 0)
    for text in corpus.texts:
        for end in range(1, len(text) + 1):
            state, depth = state_of(automaton, text[:end]), 0
            while state != ROOT:
                above[state] = max(above[state], depth)
                state, depth = automaton.link[state], depth + 1
    for state in range(1, automaton.num_states):
        assert 1 <= automaton.count[state] <= exact.count[state]
        if above[state] < cap:
            assert automaton.count[state] == exact.count[state]


@given(GROWTH)
def test_best_follower_is_the_most_frequent_one_and_of_these_the_newest(growth):
    automaton, corpus, _ = grown(growth)
    for substring in substrings(corpus):
        state = state_of(automaton, substring)
        followers = corpus.followers(substring)
        assert [token for token, _ in followers_of(automaton, state)] == sorted(
            followers, key=lambda t: followers[t][1]
        )
        token, following, share = automaton.best(state)
        if not followers:
            assert token == -1
            continue
        assert token == max(followers, key=followers.__getitem__)
        assert following == state_of(automaton, (*substring, token))
        assert share == followers[token][0] / sum(count for count, _ in followers.values())


@given(GROWTH, st.lists(st.integers(0, 3), max_size=12))
def test_match_is_the_longest_suffix_that_is_a_substring(growth, text):
    automaton, corpus, _ = grown(growth)
    state, length = automaton.match(text)
    suffix = corpus.longest_suffix(text)
    assert length == len(suffix)
    assert state == state_of(automaton, suffix)


@given(GROWTH.filter(bool))
def test_link_of_a_single_sequence_is_its_longest_suffix_that_was_there_before(growth):
    text = [token for _, token in growth]
    automaton, corpus, states = grown([(0, token) for token in text])
    before = next((i for i in range(1, len(text)) if len(corpus.ends(text[i:])) > 1), len(text))
    assert automaton.length[automaton.link[states[0]]] == len(text) - before


def test_best_of_very_many_followers_compares_the_oldest():
    automaton, state = SuffixAutomaton(), ROOT
    for token in [*range(1, 200), 40, 150, 150, 150]:
        state = extended(automaton, state, 0, token)
    token, _, share = automaton.best(automaton.follow(ROOT, 0))
    assert (token, share) == (40, 2 / 203)


@pytest.mark.slow
def test_large_vocabularies_and_memory():
    rng = random.Random(5)
    tokens = [rng.randrange(256_000) if rng.random() < 0.5 else rng.randrange(40) for _ in range(20_000)]
    tracemalloc.start()
    automaton, state = SuffixAutomaton(), ROOT
    held_before = tracemalloc.get_traced_memory()[0]
    for token in tokens:
        state = extended(automaton, state, token)
    held = tracemalloc.get_traced_memory()[0] - held_before
    tracemalloc.stop()
    assert automaton.num_bytes == pytest.approx(held, rel=0.02)
    assert automaton.num_bytes < 70 * len(tokens)
    for start in range(0, len(tokens) - 50, 37):
        assert state_of(automaton, tokens[start : start + 50]) != NO_STATE
    assert {token for token, _ in followers_of(automaton, ROOT)} == set(tokens)
    assert automaton.follow(ROOT, 256_001) == NO_STATE
