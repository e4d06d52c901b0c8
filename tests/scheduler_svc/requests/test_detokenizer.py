"""TextStream: cases by hand; tests/property/test_detokenizer.py has the general ones."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from scheduler_svc.plan_loop.ports import StopMatch
from scheduler_svc.requests.detokenizer import StoppedText
from scheduler_svc.requests.tokenizer import Tokenizer
from tests.helpers.models.toy_tokenizers import byte_fallback, byte_level, unigram

TOKENIZER = byte_level()


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def byte_ids(data):
    """One token per byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    table = {}
    for token_id in range(TOKENIZER.vocab_size):
        piece = TOKENIZER._inner.convert_ids_to_tokens(token_id)
        if len(piece) == 1 and piece in ByteLevel.alphabet():
            table[piece] = token_id
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [table[bytes_to_unicode()[byte]] for byte in data]


def test_half_a_character_waits():
    stream = StoppedText(TOKENIZER)
    seen = []
    for token_id in byte_ids("é世😀".encode()):
        stream.push([token_id])
        seen.append(stream.text)
    assert seen == ["", "é", "é", "é", "é世", "é世", "é世", "é世", "é世😀"]
    assert stream.text_ends == [0, 1, 1, 1, 2, 2, 2, 2, 3]


def test_half_a_character_comes_out_at_the_end():
    stream = StoppedText(TOKENIZER)
    stream.push(byte_ids("a世".encode()[:3]))
    assert stream.text == "a"
    stream.finish()
    assert stream.text == "a\ufffd"
    stream.finish()
    assert stream.text == "a\ufffd"


def test_bytes_that_are_no_text_come_out_in_bounded_time():
    stream = StoppedText(TOKENIZER)
    garbage = byte_ids(b"\xff" * 100)
    for index, token_id in enumerate(garbage):
        stream.push([token_id])
        assert len(stream.text) >= index - 8
        assert len(stream._decoder._window) < 32
    stream.push(byte_ids("世".encode()))
    stream.finish()
    assert stream.text == "\ufffd" * 100 + "世"


def test_cost_per_token_does_not_grow():
    lengths = []

    class Counting:
        special_ids = frozenset()

        def decode(self, token_ids, *, skip_special_tokens):
            lengths.append(len(token_ids))
            return TOKENIZER.decode(token_ids)

        def fixed_text(self, token_id):
            return None

    stream = StoppedText(Counting())
    ids = ids_of("Hello, world! 你好，世界。 " * 100)
    stream.push(ids)
    assert max(lengths) <= 16
    assert len(lengths) < 1.5 * len(ids)


def test_most_tokens_need_no_decoding(monkeypatch):
    ids = ids_of("Hello, world! The quick brown fox jumps over the lazy dog. " * 20)
    StoppedText(TOKENIZER).push(ids)  # finds the texts of these tokens
    decoded = []
    monkeypatch.setattr(TOKENIZER, "decode", lambda ids, **options: decoded.append(ids) or "H")
    StoppedText(TOKENIZER).push(ids)
    assert len(decoded) == 1, "the first token's, which may lose a leading space"


def test_tokens_whose_text_depends_on_others_have_none_of_their_own():
    whole, part = ids_of("a")[0], byte_ids("é".encode())[0]
    assert [TOKENIZER.fixed_text(each) for each in (whole, part, 1, 10**6)] == ["a", None, None, None]
    fallback = byte_fallback()
    names = ["\u2581one", "o", "<0x41>", "</s>"]
    ids = [fallback._inner.convert_tokens_to_ids(name) for name in names]
    # Bytes that are no text spoil those beside them.
    assert [fallback.fixed_text(each) for each in ids] == [" one", "o", None, None]
    assert unigram().fixed_text(unigram()._inner.convert_tokens_to_ids("\u2581")) == " "


def test_an_unknown_decoder_has_no_fixed_texts():
    raw = RawTokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw), "toy-wordpiece")
    assert [tokenizer.fixed_text(each) for each in range(3)] == [None] * 3
    stream = StoppedText(tokenizer)
    stream.push([0, 1, 0])
    assert stream.text == "ab a"


def test_special_tokens():
    ids = [*ids_of("a"), 1, *ids_of("b")]
    for skip, text in ((True, "ab"), (False, "a<|im_start|>b")):
        stream = StoppedText(TOKENIZER, skip_special_tokens=skip)
        stream.push(ids)
        assert stream.text == text
        assert len(stream.text_ends) == 3


def test_leading_space_goes_on_from_the_prompt():
    for tokenizer in (unigram(), byte_fallback()):
        prompt, ids = (
            tokenizer.encode("one", add_special_tokens=False),
            tokenizer.encode("one", add_special_tokens=False),
        )
        alone, after = StoppedText(tokenizer), StoppedText(tokenizer, context=prompt)
        alone.push(ids)
        after.push(ids)
        assert (alone.text, after.text) == ("one", " one")


def test_byte_fallback_characters():
    tokenizer = byte_fallback()
    text = "Hi 你好世界 one 😀"
    stream = StoppedText(tokenizer)
    seen = []
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        stream.push([token_id])
        seen.append(stream.text)
    assert stream.text == text
    assert not any("\ufffd" in one for one in seen)


@pytest.mark.parametrize(
    ("stop", "include", "text", "match"),
    [
        (["END"], False, "one ", "END"),
        (["END"], True, "one END", "END"),
        (["D two", "END"], False, "one ", "END"),  # the one that starts first
        (["EN", "END"], False, "one ", "EN"),  # then the one listed first
        (["ENDE"], False, "one END two", None),
        (["o one"], False, "one END two", None),
    ],
)
def test_stop_strings(stop, include, text, match):
    stream = StoppedText(TOKENIZER, stop=stop, include_stop=include)
    found = stream.push(ids_of("one END two"))
    stream.finish()
    assert stream.text == text
    assert (found.stop_string if found else None) == match


def test_the_start_of_a_stop_string_is_held_back():
    stream = StoppedText(TOKENIZER, stop=["\n\nQ:"])
    seen = []
    for char in "a\n\nQ.\n":
        stream.push(byte_ids(char.encode()))
        seen.append(stream.text)
    assert seen == ["a", "a", "a", "a", "a\n\nQ.", "a\n\nQ."]
    stream.finish()
    assert stream.text == "a\n\nQ.\n"


def test_cost_of_stop_strings_does_not_grow_with_what_is_held_back():
    """A thousand characters may be the start of one stop string; the others are not compared with all of them."""
    compared = []

    class Counting(str):
        def __getitem__(self, key):
            compared.append(key)
            return super().__getitem__(key)

    endless = "a" * 1000 + "!"
    stream = StoppedText(TOKENIZER, stop=[endless, Counting("ab" + "c" * 1000), Counting("a" * 300 + "b")])
    for token_id in byte_ids(b"a" * 600):
        assert stream.push([token_id]) is None
    assert stream.text == ""
    assert len(compared) < 6 * 600
    assert stream.push(byte_ids(b"b")) == StopMatch("a" * 300 + "b", 601)
    stream.finish()
    assert stream.text == "a" * 300


def test_tokens_after_the_match_are_not_taken():
    stream = StoppedText(TOKENIZER, stop=["b"])
    assert stream.push(byte_ids(b"abcd")) == StopMatch("b", 2)
    stream.finish()
    assert stream.text == "a"
    assert stream.text_ends == [1, 1]


def test_where_tokens_end_counts_what_is_held_back():
    stream = StoppedText(TOKENIZER, stop=["bcd"])
    stream.push([*byte_ids(b"ab"), 1, *byte_ids(b"c")])
    assert (stream.text, stream.text_ends) == ("a", [1, 1, 1, 1])
    assert stream.token_ends == [1, 2, 2, 3], "the special token stands behind the b"
    assert stream.push(byte_ids(b"d")) == StopMatch("bcd", 5)
    assert (stream.text, stream.token_ends) == ("a", [1] * 5)
    plain = StoppedText(TOKENIZER)
    plain.push(byte_ids("aé".encode()))
    assert plain.token_ends == plain.text_ends == [1, 1, 2]


def test_min_tokens():
    ids = byte_ids(b"xaxaxa")
    assert StoppedText(TOKENIZER, stop=["a"], min_tokens=1).push(ids) == StopMatch("a", 2)
    assert StoppedText(TOKENIZER, stop=["a"], min_tokens=2).push(ids) == StopMatch("a", 4)
    # A match may begin within the first tokens, but must be completed after them.
    assert StoppedText(TOKENIZER, stop=["xa"], min_tokens=3).push(ids) == StopMatch("xa", 4)
    assert StoppedText(TOKENIZER, stop=["xa"], min_tokens=6).push(ids) is None


def test_stop_token_adds_no_text_unless_requested():
    ids = ids_of("one two")
    for include, text in ((False, TOKENIZER.decode(ids[:-1])), (True, "one two")):
        stream = StoppedText(TOKENIZER, include_stop=include)
        stream.push(ids, ends_with_stop_token=True)
        stream.finish()
        assert stream.text == text
        assert len(stream.text_ends) == len(ids)


def test_token_text_keeps_leading_spaces():
    assert StoppedText(TOKENIZER).token_text(1) == "<|im_start|>"
    tokenizer = byte_fallback()
    (token_id,) = tokenizer.encode("one", add_special_tokens=False)
    assert StoppedText(tokenizer).token_text(token_id) == " one"


FAMILY = "👨‍👩‍👧"
"""One picture, five code points, three of them emoji and two joiners."""


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("before", "stop"),
    [
        ("今天天气", "很好"),
        ("好好", "好，"),
        ("cafe", "\u0301"),  # a combining mark alone
        ("👍 ", "👍🏽"),  # begins like the text before it
        (f"{FAMILY[:2]} x", FAMILY[2:]),
        ("a\ud7ff", "\ue000"),
        ("é世😀", "😀é"),
    ],
)
def test_stop_strings_in_characters_of_several_tokens(before, stop, include):
    """One token per byte: a match is found with the last byte of its last character, and no half of it is shown."""
    data, rest = (before + stop).encode(), "后面".encode()
    stream = StoppedText(TOKENIZER, stop=[stop], include_stop=include)
    for token_id in byte_ids(data[:-1]):
        assert stream.push([token_id]) is None
        assert before.startswith(stream.text)
    match = stream.push(byte_ids(data[-1:] + rest))
    assert match == StopMatch(stop, len(data))
    stream.finish()
    assert stream.text == (before + stop if include else before)


@pytest.mark.parametrize("text", ["你好世界", FAMILY, "éö", "🏳️‍🌈", "한국어", "नमस्ते"])
@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback])
def test_min_tokens_within_a_character(text, tokenizer):
    """A match that the first tokens begin and a later one completes counts; one that they complete does not."""
    ids = byte_ids(text.encode()) if tokenizer is byte_level else tokenizer().encode(text, add_special_tokens=False)
    stop = text[-1]
    for least, found in ((len(ids) - 1, True), (len(ids), False)):
        stream = StoppedText(tokenizer(), stop=[stop], min_tokens=least)
        match = stream.push(ids)
        stream.finish()
        assert (match is not None) == found
        assert stream.text == text[: text.index(stop)] if found else stream.text == text


def test_special_tokens_and_stop_strings():
    """A special token is matched where it is shown, and joins what stands around it where it is not."""
    ids = [*ids_of("on"), 1, *ids_of("e two")]
    for skip, stop, text in ((False, "<|im_start|>", "on"), (True, "<|im_start|>", "one two"), (True, "one", "")):
        stream = StoppedText(TOKENIZER, stop=[stop], skip_special_tokens=skip)
        stream.push(ids)
        stream.finish()
        assert stream.text == text


def test_a_stop_token_may_complete_a_stop_string_if_its_text_counts():
    ids = ids_of("Hello")
    for include, match in ((True, StopMatch("Hello", len(ids))), (False, None)):
        stream = StoppedText(TOKENIZER, stop=["Hello"], include_stop=include)
        assert stream.push(ids, ends_with_stop_token=True) == match
