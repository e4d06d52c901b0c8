"""Streamed text against the tokenizer's own decoding of all tokens, over any ids, text, cuts and stop strings."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_svc.requests.detokenizer import StoppedText
from tests.helpers.models.toy_tokenizers import byte_fallback, byte_level, unigram

ALPHABET = "aHhel lo.\n你好世界🏳️‍🌈👨‍👩‍👧😀e\u0301é€\ufffd"
TEXT = st.text(alphabet=ALPHABET, max_size=60) | st.text(max_size=30)
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=60)


def in_pieces(ids, cuts):
    start, turn = 0, 0
    while start < len(ids):
        size = cuts[turn % len(cuts)]
        yield ids[start : start + size]
        start, turn = start + size, turn + 1


def stream(tokenizer, ids, cuts=(1,), **options):
    """Push ids in pieces; checks what holds after each push. Returns the stream and the match."""
    text = StoppedText(tokenizer, **options)
    before = ""
    for piece in in_pieces(list(ids), cuts):
        match = text.push(piece)
        assert text.text.startswith(before), "text that was out has changed"
        before = text.text
        if match is not None:
            text.finish()
            assert text.text == before
            return text, match
    text.finish()
    assert text.text.startswith(before)
    assert len(text.text_ends) == len(ids)
    assert text.text_ends == sorted(text.text_ends)
    return text, None


@given(st.lists(st.integers(0, 399), max_size=120), CUTS, st.booleans())
@example([3 + b for b in range(200)], [1], True)
def test_random_byte_level_ids(ids, cuts, skip):
    tokenizer = byte_level()
    text, _ = stream(tokenizer, ids, cuts, skip_special_tokens=skip)
    assert text.text == tokenizer.decode(ids, skip_special_tokens=skip)


@given(TEXT, CUTS)
@pytest.mark.parametrize("make", [byte_level, unigram, byte_fallback])
def test_encoded_text(make, text, cuts):
    tokenizer = make()
    if make is byte_fallback:
        # Told apart from spoiled bytes by nothing but what comes later, which no stream can wait for.
        text = text.replace("\ufffd", "?")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert stream(tokenizer, ids, cuts)[0].text == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 199), max_size=80))
def test_random_unigram_ids(ids):
    tokenizer = unigram()
    ids = [i for i in ids if i < tokenizer.vocab_size]
    assert stream(tokenizer, ids)[0].text == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 269), max_size=80))
def test_random_byte_fallback_ids_never_fail_and_never_take_text_back(ids):
    stream(byte_fallback(), ids)


class Decoding:
    """The same tokenizer without fixed texts: each token is decoded with its neighbours."""

    def __init__(self, inner):
        self.special_ids = inner.special_ids
        self.decode = inner.decode

    def fixed_text(self, token_id):
        return None


@given(st.lists(st.integers(0, 399), max_size=120), st.lists(st.integers(0, 399), max_size=4), st.booleans())
@pytest.mark.parametrize("make", [byte_level, unigram])
def test_fixed_texts_are_those_that_decoding_gives(make, ids, context, skip):
    tokenizer = make()
    ids, context = ([i % tokenizer.vocab_size for i in each] for each in (ids, context))
    options = {"skip_special_tokens": skip, "context": context}
    fast, _ = stream(tokenizer, ids, **options)
    slow, _ = stream(Decoding(tokenizer), ids, **options)
    # When bytes that are no text come out depends on the length of the window, so `text_ends` may differ.
    assert fast.text == slow.text


@given(TEXT, TEXT)
@pytest.mark.parametrize("make", [byte_level, unigram, byte_fallback])
def test_fixed_texts_of_encoded_text(make, prompt, text):
    tokenizer = make()
    context, ids = (tokenizer.encode(each, add_special_tokens=False) for each in (prompt, text))
    fast, _ = stream(tokenizer, ids, context=context[-6:])
    slow, _ = stream(Decoding(tokenizer), ids, context=context[-6:])
    assert (fast.text, fast.text_ends) == (slow.text, slow.text_ends)


@given(TEXT, TEXT)
@pytest.mark.parametrize("make", [byte_level, unigram, byte_fallback])
def test_text_goes_on_from_the_prompt(make, prompt, text):
    tokenizer = make()
    ids = tokenizer.encode(prompt, add_special_tokens=False) + tokenizer.encode(text, add_special_tokens=False)
    cut = len(tokenizer.encode(prompt, add_special_tokens=False))
    whole, before = tokenizer.decode(ids), tokenizer.decode(ids[:cut])
    # Half a character at the border, or a prompt that is all leading space, says nothing about the join.
    if whole.startswith(before) and before.strip() and not before.endswith("\ufffd"):
        out = stream(tokenizer, ids[cut:], context=ids[max(0, cut - 6) : cut])[0].text
        assert out == whole[len(before) :] or make is not byte_level


@given(TEXT, CUTS, st.lists(st.text(alphabet=ALPHABET[:12], min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings(text, cuts, stop):
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    out, match = stream(tokenizer, ids, cuts, stop=stop)
    once, match_once = stream(tokenizer, ids, [len(ids) or 1], stop=stop)
    assert (out.text, match) == (once.text, match_once), "the result depends on how many tokens come at once"
    full = tokenizer.decode(ids)
    if match is None:
        assert out.text == full
        assert not any(string in full for string in stop)
    else:
        kept = tokenizer.decode(ids[: match.num_tokens])
        assert full.startswith(out.text + match.stop_string)
        assert match.stop_string in kept
        before = tokenizer.decode(ids[: match.num_tokens - 1])
        assert not any(string in before for string in stop), "an earlier token had completed a match"
        assert not any(string in out.text for string in stop)


@given(TEXT, st.text(alphabet=ALPHABET[:12], min_size=1, max_size=3), st.integers(0, 12))
def test_min_tokens_and_included_stop_strings(text, stop, min_tokens):
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    out, match = stream(tokenizer, ids, stop=[stop], min_tokens=min_tokens, include_stop=True)
    if match is not None:
        assert match.num_tokens > min_tokens
        assert out.text.endswith(stop)
        assert tokenizer.decode(ids).startswith(out.text)
