"""Pieces of llguidance's Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cadenza_common.grammar.json_schema import OPTIONS, whole_sizes
from cadenza_common.grammar.readable import readable

ANY_TEXT = "(?s:.*)"
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it."""
_OF_HOLES = {"{id}": "/[A-Za-z0-9]{9}/", "{name}": "/[A-Za-z0-9_.:-]{1,64}/", "{index}": "/[0-9]{1,3}/"}


def literal(text: str) -> str:
    """A text as it is."""
    return json.dumps(text, ensure_ascii=False)


def compact_json(schema: Mapping[str, Any]) -> str:
    """The JSON of a schema, compact."""
    text = json.dumps({**readable(schema), OPTIONS: _COMPACT}, ensure_ascii=False)
    if ".0" in text:
        text = json.dumps(json.loads(text, object_hook=whole_sizes), ensure_ascii=False)
    return f"%json {text}"


def text_without(*texts: str) -> str:
    """Any text in which these do not stand."""
    return " & ".join([f"/{ANY_TEXT}/", *(f"~/{ANY_TEXT}{expression(text)}{ANY_TEXT}/" for text in texts)])


def expression(text: str) -> str:
    """A text as it is, within an expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


class MarkedText:
    """Writes texts in which markers may be tokens."""

    def __init__(self, tokens: Mapping[str, int], markers: Sequence[str] = ()) -> None:
        """tokens: ids by their texts; markers: texts that stand apart without being tokens."""
        self.tokens = tokens
        composed = {each for each in markers if each not in tokens and any(token in each for token in tokens)}
        texts = sorted({*tokens, *markers} - composed, key=len, reverse=True)
        # Line breaks apart: what begins with one may stand where another text begins with one.
        self._pattern = re.compile(f"({'|'.join(map(re.escape, [*texts, *_OF_HOLES]))}|\n)")

    def __call__(self, text: str) -> str:
        """A text as a rule; nothing for none."""
        parts = [part for part in self._pattern.split(text) if part]
        return " ".join(self._part(part) for part in parts)

    def _part(self, part: str) -> str:
        if part in self.tokens:
            return f"<[{self.tokens[part]}]>"
        return _OF_HOLES.get(part) or literal(part)

    def first(self, text: str) -> str:
        """The first token of a text, or all of it."""
        return next((part for part in self._pattern.split(text) if part in self.tokens), text)

    def first_of(self, text: str, markers: Sequence[str]) -> str:
        """The marker that begins a text."""
        return min((each for each in markers if each in text), key=text.index)

    def begins_with_token(self, text: str) -> bool:
        """Whether a text begins with a token."""
        return any(text.startswith(token) for token in self.tokens)
