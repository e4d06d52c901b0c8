"""Drafts by frequency against occurrences counted in all texts; scopes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.cpu.kernels.suffixes.growth import SuffixKernels
from executor_svc.speculation.suffix import SuffixSource
from executor_svc.speculation.suffix_texts import NUM_INDEXED
from tests.executor_svc.speculation.draft_model import (
    Corpus,
    Driver,
    continued,
    drafts_after,
    limits,
    num_own_bytes,
    num_shared_bytes,
    produce,
    random_text,
)

CONTEXT = 16
NUM_SLOTS = 4


def driver_of(num_slots=NUM_SLOTS, max_model_len=512, **options):
    bounds = limits(num_slots, max_model_len)
    return Driver(SuffixSource(bounds, SuffixKernels(), **options), bounds)


class Model:
    """What `SuffixSource` promises while nothing is dropped and every text is wholly indexed."""

    def __init__(self, driver, min_match=2):
        self._driver = driver
        self._min_match = min_match
        self._scopes = {}
        self._sequences = {}

    def admit(self, slot, scope):
        self._sequences[slot] = (Corpus(), scope, None, 0, 0)

    def release(self, slot):
        self._sequences.pop(slot)

    def drafts(self, rows, most):
        for slot in rows:
            own, scope, number, num_own, num_shared = self._sequences[slot]
            text = self._driver.text(slot)
            if not own.texts:
                own.new_text()
                num_shared = max(int(self._driver.slots.num_prompt_tokens[slot]) - CONTEXT, 0)
            own.append(0, text[num_own:])
            if scope:
                corpus = self._scopes.setdefault(scope, Corpus())
                number = corpus.new_text() if number is None else number
                corpus.append(number, text[num_shared:])
            self._sequences[slot] = own, scope, number, len(text), len(text)
        return [self._of(slot, most) for slot in rows]

    def _of(self, slot, most):
        own, scope, number, _, _ = self._sequences[slot]
        text = own.texts[0]
        found = [continued(own, own.shorter(text), most, self._min_match)]
        if scope:
            corpus = self._scopes[scope]
            found.append(continued(corpus, corpus.texts[number], most, self._min_match))
        best, drafts = (0.0, 0), []
        for score, length, tokens in found:
            if (score, length) > best:
                best, drafts = (score, length), tokens
        return drafts


@st.composite
def histories(draw):
    """Steps of ("admit", slot, prompt, scope), ("release", slot), ("grow", {slot: tokens}) and ("draft", rows)."""
    vocab = draw(st.integers(2, 5))
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    words = [[rng.randrange(vocab) for _ in range(rng.randint(2, 6))] for _ in range(4)]

    def text(size):
        tokens = []
        while len(tokens) < size:
            tokens += rng.choice(words) if rng.random() < 0.8 else [rng.randrange(vocab)]
        return tokens[:size]

    steps, used = [], set()
    for _ in range(draw(st.integers(1, 14))):
        free = sorted(set(range(NUM_SLOTS)) - used)
        if free and (not used or rng.random() < 0.5):
            slot = rng.choice(free)
            used.add(slot)
            steps.append(("admit", slot, text(rng.choice([0, 1, 3, 12, 30])), rng.choice([0, 1, 1, 2])))
        elif rng.random() < 0.15:
            slot = rng.choice(sorted(used))
            used.remove(slot)
            steps.append(("release", slot))
        if used:
            steps.append(("grow", {slot: text(rng.choice([0, 1, 1, 2, 5])) for slot in sorted(used)}))
            steps.append(("draft", [slot for slot in sorted(used) if rng.random() < 0.9]))
    return steps


def play(steps, driver, most=5):
    """Return the drafts of every step and row."""
    drafts = []
    for kind, *values in steps:
        if kind == "admit":
            driver.admit(*values)
        elif kind == "release":
            driver.release(*values)
        elif kind == "grow":
            for slot, tokens in values[0].items():
                driver.append(slot, tokens)
        else:
            drafts.append(driver.drafts(values[0], most))
    return drafts


@pytest.mark.slow
@given(histories(), st.integers(1, 3), st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_drafts_are_those_of_the_definition(steps, min_match, most):
    driver = driver_of(min_match=min_match)
    model = Model(driver, min_match)
    for step in steps:
        drafts = play([step], driver, most)
        if step[0] == "admit":
            model.admit(step[1], step[3])
        elif step[0] == "release":
            model.release(step[1])
        elif step[0] == "draft":
            assert drafts == [model.drafts(step[1], most)]


@given(histories())
@settings(max_examples=60, deadline=None)
def test_the_same_history_gives_the_same_drafts(steps):
    # The hashes of the two differ.
    assert play(steps, driver_of()) == play(steps, driver_of())


@given(histories())
@settings(max_examples=60, deadline=None)
def test_scopes_do_not_see_each_other(steps):
    """Without the sequences of all other scopes a sequence gets the drafts that it gets with them."""
    together = play(steps, driver_of())
    scopes = {}
    rows_of = []
    for step in steps:
        if step[0] == "admit":
            scopes[step[1]] = step[3]
        elif step[0] == "draft":
            rows_of.append([scopes[slot] for slot in step[1]])
    for scope in (0, 1, 2):
        alone, now = [], {}
        for step in steps:
            if step[0] == "admit":
                now[step[1]] = step[3]
            if step[0] in ("admit", "release"):
                if now[step[1]] == scope:
                    alone.append(step)
            elif step[0] == "grow":
                alone.append(("grow", {slot: tokens for slot, tokens in step[1].items() if now[slot] == scope}))
            else:
                alone.append(("draft", [slot for slot in step[1] if now[slot] == scope]))
        expected = [
            [drafts for drafts, of in zip(step, scopes_of, strict=True) if of == scope]
            for step, scopes_of in zip(together, rows_of, strict=True)
        ]
        assert play(alone, driver_of()) == expected


def test_outputs_are_drafts_for_others_of_their_scope_only():
    driver = driver_of(factor=1.0)
    produce(driver, 1, [1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16], 7)
    assert drafts_after(driver, [1, 2, 3, 4, 5], 7) == [11, 12, 13, 14, 15]
    assert drafts_after(driver, [9, 4, 5], 7) == [11, 12]
    for other in (0, 8, 7 + (1 << 32), (1 << 64) - 1):
        assert drafts_after(driver, [1, 2, 3, 4, 5], other) == []
    driver.source.clear()
    assert drafts_after(driver, [1, 2, 3, 4, 5], 7) == []


def test_a_text_is_continued_by_one_of_a_later_row_of_the_same_step():
    driver = driver_of()
    driver.admit(0, [], 1)
    driver.append(0, [0, 1, 2, 3, 2])
    assert driver.drafts([0]) == [[]]
    driver.admit(1, [0, 1, 2, 3, 2, 7, 8], 1)
    assert driver.drafts([0, 1])[0][:2] == [7, 8]


def test_outputs_are_shared_while_they_grow():
    driver = driver_of()
    for slot in (0, 1):
        driver.admit(slot, [1, 2, 3, 4, 5], 7)
    driver.append(0, [6, 7, 8])
    driver.append(1, [6])
    assert driver.drafts([0, 1]) == [[], [7, 8]]


def test_prompts_are_not_shared_but_for_their_last_tokens():
    driver = driver_of()
    prompt = list(range(100, 140))
    produce(driver, 1, prompt, [1], 7)
    assert drafts_after(driver, prompt[:20], 7) == []
    assert drafts_after(driver, prompt[:-4], 7) == [*prompt[-4:], 1]


def test_nothing_is_shared_without_bytes():
    driver = driver_of(max_bytes=0, factor=1.0)
    produce(driver, 1, [1, 2, 3], [4, 5, 6], 7)
    assert drafts_after(driver, [1, 2, 3], 7) == []
    assert drafts_after(driver, [1, 2, 3, 1, 2], 7) == [3, 1]
    assert num_shared_bytes(driver.source) == 0


def test_short_matches_and_improbable_followers_are_not_drafted():
    driver = driver_of(min_match=3, factor=1.0)
    driver.admit(0, [1, 2, 3, 4, 0, 2, 3])
    driver.admit(1, [1, 2, 3, 4, 0, 1, 2, 3])
    assert driver.drafts([0, 1]) == [[], [4, 0, 1]]
    often = [token for follower in range(10, 30) for token in (1, 2, 3, follower)]
    driver.admit(2, [*often, 1, 2, 3])
    # 10 follows 4 times of 23, and behind it each token once of 4 times.
    driver.admit(3, [1, 2, 3, 10, 90, 1, 2, 3, 10, 91, 1, 2, 3, 10, 92, *often, 1, 2, 3])
    assert driver.drafts([2, 3]) == [[], [10]]


def test_long_prompts_are_indexed_over_several_steps():
    rng = random.Random(11)
    driver = driver_of(num_slots=3, max_model_len=4096, max_indexed=100)
    prompt = [rng.randrange(30) for _ in range(1500)]
    driver.admit(0, prompt)
    driver.admit(1, prompt[:90])

    def num_indexed():
        return driver.source._texts.table[:, NUM_INDEXED].copy()

    indexed = num_indexed()
    for _ in range(12):
        (drafts, _) = driver.drafts([0, 1])
        now = num_indexed()
        assert (now - indexed).sum() <= 100 + 2 * 6
        text = driver.text(0)
        if now[0] < len(text):
            corpus = Corpus()
            corpus.append(corpus.new_text(), text[: now[0]])
            _, _, expected = continued(corpus, corpus.longest_suffix(text[-16:]), 5, 2)
            assert drafts == expected
        indexed = now
        driver.append(0, [rng.randrange(30)])
        driver.append(1, [rng.randrange(30)])
    while indexed[0] < driver.slots.num_tokens[0]:
        before = indexed[0]
        driver.drafts([0])
        indexed = num_indexed()
        assert 0 < indexed[0] - before <= 106
    driver.append(0, prompt[800:810])
    assert driver.drafts([0]) == [prompt[810:815]]


def test_released_and_admitted_again():
    driver = driver_of(factor=1.0)
    driver.admit(0, [5, 6, 7, 8, 5, 6])
    driver.admit(1, [5, 6, 7, 8, 5, 6])
    assert driver.drafts([0, 1]) == [[7, 8], [7, 8]]
    driver.release(0, 3)
    driver.admit(0, [1, 2, 3, 4, 5, 6])
    assert driver.drafts([0, 1]) == [[], [7, 8]]
    driver.admit(1, [9, 5, 6])
    assert driver.drafts([0, 1]) == [[], []]
    assert num_own_bytes(driver.source) > 0
    driver.source.clear()
    assert driver.drafts([0, 1]) == [[], []]
    assert num_own_bytes(driver.source) == 0


def test_a_sequence_that_is_admitted_again_adds_no_states():
    """As after preemption: its outputs are behind the same prompt."""
    driver = driver_of()
    rng = random.Random(12)
    prompt, output = random_text(rng, 30), random_text(rng, 100)
    produce(driver, 0, prompt, output, 5)
    before = num_shared_bytes(driver.source)
    driver.admit(2, [*prompt, *output], 5)
    driver.slots.num_prompt_tokens[2] = len(prompt)
    driver.drafts([2])
    assert num_shared_bytes(driver.source) == before


def test_no_drafts_where_none_are_allowed_or_known():
    driver = driver_of()
    driver.admit(0, [], 3)
    driver.admit(1, [4], 3)
    driver.admit(2, [4, 4, 4, 4])
    assert driver.drafts([]) == []
    assert driver.drafts([3]) == [[]]
    assert driver.drafts([0, 1, 2, 3], [3, 3, 0, 3]) == [[], [], [], []]
    assert driver.drafts([0, 1, 2, 3], [3, 3, 1, 3]) == [[], [], [4], []]
    # A period goes on behind the end of the text.
    assert driver.drafts([2], [3]) == [[4, 4, 4]]


def test_values_out_of_range_are_refused():
    for options in ({"min_match": 0}, {"factor": 0}, {"min_probability": 1.5}, {"max_bytes": 1000}):
        with pytest.raises(ValueError, match=next(iter(options))):
            SuffixSource(limits(), SuffixKernels(), **options)
