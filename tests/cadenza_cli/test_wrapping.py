"""Answers at a terminal's right edge: words stay whole, nothing is lost, and only the current word is held back."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cadenza_cli.wrapping import Wrapper, wrap

TEXTS = st.text(st.sampled_from('abc,.(" \n\t你好，。（😀e\u0301'), max_size=60)
WIDTHS = st.integers(2, 20)


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("The quick brown fox", 10, ["The quick", "brown fox"]),
        ("The quick brown fox", 9, ["The quick", "brown fox"]),
        ("exactly ten chars", 7, ["exactly", "ten", "chars"]),
        ("a verylongwordindeed b", 6, ["a", "verylo", "ngword", "indeed", "b"]),
        ("  indented\n\n    more", 12, ["  indented", "", "    more"]),
        ("a\tb", 12, ["a       b"]),
        ("你好世界", 5, ["你好", "世界"]),
        ("你好 hello 世界", 8, ["你好", "hello 世", "界"]),
        ("你好，世界。", 5, ["你", "好，", "世", "界。"]),
        ("（你好", 5, ["（你", "好"]),
        ("version你好", 8, ["version", "你好"]),
        ("cafe\u0301 cafe\u0301", 4, ["cafe\u0301", "cafe\u0301"]),
        ("a 👨\u200d👩\u200d👧", 7, ["a", "👨\u200d👩\u200d👧"]),
    ],
)
def test_lines(text, width, lines):
    assert wrap(text, width).split("\n") == lines


@given(TEXTS, WIDTHS)
def test_no_line_is_too_long_and_no_word_is_broken_that_fits(text, width):
    lines = wrap(text, width).split("\n")
    assert all(sum(map(cell_len, line)) <= width for line in lines)
    assert re.sub(r"\s", "", text) == re.sub(r"\s", "", "".join(lines)), "nothing is lost"
    words = re.findall(r"(?<![^\s])[abc]+(?![^\s])", text)
    shown = [word for line in lines for word in line.split()]
    assert all(word in shown for word in words if len(word) <= width)


@given(TEXTS, WIDTHS, st.lists(st.integers(0, 60)))
def test_a_stream_looks_as_the_whole_text(text, width, cuts):
    marks = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    wrapper, shown = Wrapper(width), ""
    for start, end in itertools.pairwise(marks):
        shown += wrapper.feed(text[start:end])
        held = re.sub(r"\s", "", text[:end])[len(re.sub(r"\s", "", shown)) :]
        assert len(held) <= width + text.count("\u0301")
        assert text[:end].rstrip().endswith(held), "only the end is held back"
        if text[:end].endswith((" ", "\n", "\t")):
            assert not held, "a word that has ended is shown"
    assert shown + wrapper.flush() == wrap(text, width)


def test_a_resized_window_counts_from_the_next_word():
    wrapper = Wrapper(20)
    shown = wrapper.feed("one two three ")
    wrapper.width = 10
    assert shown + wrapper.feed("four five six ") == "one two three\nfour five\nsix"
