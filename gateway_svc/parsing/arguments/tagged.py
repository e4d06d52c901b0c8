"""Arguments between tags, as Qwen3-Coder, GLM, MiniMax and DeepSeek write them: strings bare, other values as literals.

Where neither the tags nor the tool's schema say what a value is, it is a string. A marker of the format within a value
is its text, unless the value is never closed: then it ended there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from cadenza_common.call_formats.syntax import Tags
from cadenza_common.grammar.schema_kinds import Kinds
from gateway_svc.parsing.argument_kinds import TEXT, fits
from gateway_svc.parsing.literals import FAIL, MORE, Codes
from gateway_svc.parsing.python_call import WORDS, PythonArguments, json_string

ArgumentKinds = Mapping[str, Mapping[str, Kinds]]
"""By the name of a tool and that of its argument."""
_ANY: Kinds = frozenset(("integer", "number", "boolean", "null", "array", "object"))
_VALUE = "value="
_OF_TYPE = re.compile(r' \w+="\{type\}"')


class TagSyntax:
    """The literals of tags, for one output."""

    def __init__(self, tags: Tags, codes: Codes, outer: Collection[str]) -> None:
        """outer: what may stand behind the last argument, in place of its own end."""
        self.codes = codes
        self.types = tags.types
        key_close = tags.key_close.rstrip()
        self.open = codes.literal(tags.key_open)
        self.key_closes = [codes.literal(text) for text in dict.fromkeys((key_close, _OF_TYPE.sub("", key_close)))]
        """With the type of the value, and without."""
        self.close = codes.literal(tags.value_close.lstrip())
        self.end = codes.literal(tags.end) if tags.end else None
        self.is_padded = tags.is_padded
        self.quotes = tags.quotes
        self.quoted_close = codes.literal(tags.quotes[1] + tags.value_close)
        own = self.open.codes | self.key_closes[0].codes | self.close.codes
        self.stops = {code for text in outer for code in codes.literal(text).codes} - own

    def stop(self, text: str, start: int = 0) -> int:
        """Where a marker of the call or the section is first; the text's length: nowhere."""
        found = [at for at in (text.find(code, start) for code in self.stops) if at >= 0]
        return min(found, default=len(text))


class TagArguments:
    """The arguments of one call, from behind the separator on."""

    is_call, is_bad = True, False

    def __init__(self, name: str, syntax: TagSyntax, kinds: Mapping[str, Kinds], *, holds: bool) -> None:
        """kinds: of the tool's arguments; holds: whether a marker within a value may be its text."""
        self.name: str | None = name
        self.is_done = False
        self._syntax = syntax
        self._kinds = kinds
        self._holds = holds
        self._num_arguments = 0
        self._value: _Value | None = None
        self._is_begun = False

    def feed(self, text: str) -> tuple[int, str]:
        """Read a text; returns how much of it is used, and new text of the arguments."""
        at, parts = 0, [] if self._is_begun else ["{"]
        self._is_begun = True
        while not self.is_done:
            before = at, self._value
            at = self._between(text, at, parts) if self._value is None else self._in_value(self._value, text, at, parts)
            if before == (at, self._value):
                break
        return at, "".join(parts)

    def end(self, text: str, *, is_cut: bool) -> tuple[int, str]:
        """The output ends: as `feed`; what is open is complete, unless it is cut."""
        head, self._is_begun = "" if self._is_begun else "{", True
        if is_cut:
            return len(text), head + ("" if self._value is None else self._value.cut(text))
        at = self._syntax.stop(text)
        rest = "" if self._value is None else self._value.ended(text[:at])
        self.is_done, self._value = True, None
        return at, head + rest + "}"

    def _between(self, text: str, at: int, parts: list[str]) -> int:
        """Between arguments, where other text than tags is nothing."""
        syntax = self._syntax
        start, end = syntax.open.find(text, at)
        stop = syntax.stop(text, at)
        place, place_end = (len(text), FAIL) if syntax.end is None else syntax.end.find(text, at)
        if min(stop, place) <= start and (stop < len(text) or place < len(text)):
            if place <= stop and place_end == MORE:
                return place
            self.is_done = True
            parts.append("}")
            return place_end if place <= stop else stop
        if end < 0:
            return start
        holes: dict[str, str] = {}
        close, close_end, key_close = min(
            ((*each.find(text, end), each) for each in syntax.key_closes), key=lambda found: found[0]
        )
        if stop < min(close, len(text)):
            self.is_done = True
            parts.append("}")
            return stop
        if close_end < 0:
            return start
        key_close.match(text, close, holes)
        key = syntax.codes.written(text[end:close]).strip()
        parts.append(f"{', ' if self._num_arguments else ''}{json_string(key)}: ")
        self._num_arguments += 1
        self._value = _Value(self._kind(key, holes), syntax)
        return close_end

    def _kind(self, key: str, holes: Mapping[str, str]) -> Kinds:
        said = holes.get("{type}")
        if said is not None:
            return TEXT if said == self._syntax.types[0] else _ANY
        return self._kinds.get(key, frozenset()) or TEXT

    def _in_value(self, value: _Value, text: str, at: int, parts: list[str]) -> int:
        stop = self._syntax.stop(text, at)
        used, is_closed = value.feed(text, at, parts, stop)
        if is_closed:
            self._value = None
        elif stop < len(text) and not self._holds:
            parts.append(value.ended(text[used:stop]) + "}")
            self.is_done, self._value = True, None
            return stop
        return used


class _Value:
    """One value, as it comes."""

    def __init__(self, kinds: Kinds, syntax: TagSyntax) -> None:
        self._kinds = kinds
        self._syntax = syntax
        self._close = syntax.close
        self._is_begun = False
        self._is_open = False
        """Whether the quote of a string has been given on."""
        self._read: list[str] = []
        """Of a value that is given on at its end."""
        self._literal = _begun_literal()
        self._is_literal = "string" not in kinds

    def feed(self, text: str, at: int, parts: list[str], stop: int) -> tuple[int, bool]:
        """Read from `at`; returns what is used, and whether the value has ended. Nothing is certain behind `stop`."""
        if not self._is_begun:
            at = self._begin(text, at)
            if not self._is_begun:
                return at, False
        return (self._text if self._kinds == TEXT else self._others)(text, at, parts, stop)

    def _text(self, text: str, at: int, parts: list[str], stop: int) -> tuple[int, bool]:
        """A string is given on as it comes."""
        close, end = self._close.find(text, at)
        if end >= 0:
            parts.append(self.ended(text[at:close]))
            return end, True
        limit = min(close, stop)
        if self._syntax.is_padded and limit > at and text[limit - 1] == "\n":
            limit -= 1
        parts.append(self._opened() + self._escaped(text[at:limit]))
        return limit, False

    def _others(self, text: str, at: int, parts: list[str], stop: int) -> tuple[int, bool]:
        """What may be no string is given on at its end, which is text within a string of a literal."""
        while True:
            close, end = self._close.find(text, at)
            limit = close if end >= 0 else min(close, stop)
            self._collect(text[at:limit])
            if end < 0:
                return limit, False
            if not (self._is_literal and self._literal.is_in_string):
                parts.append(self.ended(""))
                return end, True
            self._collect(text[close])
            at = close + 1

    def _begin(self, text: str, at: int) -> int:
        """Take the line break off that stands before a value, or its quote."""
        quote = self._syntax.quotes[0]
        if at == len(text) or (quote and quote != text[at:] and quote.startswith(text[at:])):
            return at
        self._is_begun = True
        if quote and text.startswith(quote, at):
            self._close, self._kinds, self._is_literal = self._syntax.quoted_close, TEXT, False
            return at + len(quote)
        return at + 1 if self._syntax.is_padded and text[at] == "\n" else at

    def _collect(self, text: str) -> None:
        self._read.append(text)
        if self._is_literal:
            self._literal.feed(self._syntax.codes.written(text), 0)
            self._is_literal = not (self._literal.is_bad or self._literal.is_done)  # done: by a bracket too many

    def _opened(self) -> str:
        quote, self._is_open = "" if self._is_open else '"', True
        return quote

    def _escaped(self, text: str) -> str:
        return json_string(self._syntax.codes.written(text))[1:-1]

    def cut(self, text: str) -> str:
        """The rest of a value that is cut; a literal is given on whole, or not at all."""
        return self._opened() + self._escaped(text) if self._kinds == TEXT and (text or self._is_begun) else ""

    def ended(self, rest: str) -> str:
        """The rest of the value as JSON; of several types, it is the one that JSON says."""
        if not self._is_begun and rest:
            rest = rest[self._begin(rest, 0) :]
        if self._kinds == TEXT:
            rest = rest.removesuffix("\n") if self._syntax.is_padded else rest
            return self._opened() + self._escaped(rest) + '"'
        text = self._syntax.codes.written("".join(self._read) + rest)
        text = text.removesuffix("\n") if self._syntax.is_padded else text
        found = WORDS.get(text, text) if "string" in self._kinds else _literal_json(text)
        return _json_of(found, text, self._kinds)


def _begun_literal() -> PythonArguments:
    literal = PythonArguments()
    literal.feed(_VALUE, 0)
    return literal


def _literal_json(text: str) -> str:
    """A literal as JSON; nothing: it is none."""
    literal = _begun_literal()
    literal.feed(text, 0)
    if literal.is_bad or literal.is_done:
        return ""
    literal.feed(")", 0)
    return literal.json[len('{"value": ') : -1]


def _json_of(found: str, text: str, kinds: Kinds) -> str:
    """What is found as JSON, if it is of one of these types; else the text as a string."""
    try:
        value = json.loads(found)
    except (ValueError, RecursionError):
        return json_string(text)
    return found.strip() if fits(value, kinds - TEXT) else json_string(text)
