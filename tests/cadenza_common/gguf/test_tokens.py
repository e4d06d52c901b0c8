"""Tokens that llama.cpp knows by their texts: its own answers for a normal token with each, from record.py."""

from __future__ import annotations

from cadenza_common.gguf.metadata import END_TEXTS, type_of
from tests.helpers.models.gguf_vocabularies import recorded

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6


def test_texts_are_known_as_by_llama_cpp() -> None:
    known = recorded("known_texts")
    assert {text for text, (control, _) in known.items() if control} == {
        text for text in known if type_of(text, _NORMAL) == _CONTROL
    }
    assert {text for text, (_, ends) in known.items() if ends} == END_TEXTS


def test_other_texts_have_the_type_of_the_file() -> None:
    for kind in (_NORMAL, _CONTROL, _USER_DEFINED, _BYTE):
        assert type_of("ordinary", kind) == kind
    assert type_of("<|channel|>", _CONTROL) == _USER_DEFINED
