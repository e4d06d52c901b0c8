"""Arguments as elements within elements, each tag behind a marker, as MiniMax M3 writes them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from cadenza_common.grammar.schema_kinds import Kinds
from gateway_svc.parsing.argument_kinds import TEXT, fits
from gateway_svc.parsing.arguments.tagged import ArgumentKinds
from gateway_svc.parsing.literals import Codes

_TAG = re.compile(r"<(/?)([^<>\s/][^<>]*)>")
ITEM = "item"
"""The name of the elements of a list."""
MAX_CHARS = 1 << 20
"""Of one call: nothing of it is given on before its end."""


@dataclass(slots=True)
class _Element:
    """One that has begun."""

    name: str
    path: str
    text: str = ""
    children: list[tuple[str, Any]] = field(default_factory=list)


class TreeArguments:
    """The arguments of one call, from behind the separator on; they are given on at its end, and no call before."""

    def __init__(self, name: str, end: str, codes: Codes, kinds: ArgumentKinds) -> None:
        """end: what ends the call, of which the first character is the marker before each tag."""
        self.name: str | None = name
        self.is_call = self.is_done = self.is_bad = False
        self._end, self._codes = end, codes
        self._kinds = kinds.get(name, {})
        self._text = ""

    def feed(self, text: str) -> tuple[int, str]:
        """As CallArgumentsReader."""
        before = len(self._text)
        self._text += text
        at = self._text.find(self._end, max(0, before - len(self._end)))
        if at < 0:
            self.is_bad = len(self._text) > MAX_CHARS
            return len(text), ""
        try:
            found = self._read(self._text[:at])
        except ValueError:
            self.is_bad = True
            return len(text), ""
        self.is_call = self.is_done = True
        return at + len(self._end) - before, json.dumps(found, ensure_ascii=False)

    def end(self, text: str, *, is_cut: bool) -> tuple[int, str]:
        """As CallArgumentsReader."""
        return 0, ""

    def _read(self, text: str) -> dict[str, Any]:
        """The arguments; raises ValueError for elements that do not fit into each other."""
        first, *parts = text.split(self._end[0])
        stack = [_Element("", "", first)]
        for part in parts:
            found = _TAG.match(part)
            if found is None:
                stack[-1].text += self._codes.written(self._end[0] + part)
                continue
            closing, name = found.groups()
            rest = part[found.end() :]
            if not closing:
                above = stack[-1]
                path = f"{above.path}/{name}" if above.path else name
                stack.append(_Element(name, path, rest))
                continue
            if name != stack[-1].name or len(stack) == 1:
                raise ValueError("a tag closes nothing")
            element = stack.pop()
            stack[-1].children.append((name, self._value(element)))
            stack[-1].text += rest
        (whole,) = stack
        if whole.text.strip():
            raise ValueError("text stands between arguments")
        return _named(whole.children)

    def _value(self, element: _Element) -> Any:
        kinds = self._kinds.get(element.path, frozenset())
        if element.children:
            is_list = all(name == ITEM for name, _ in element.children) and ("object" not in kinds or "array" in kinds)
            return [value for _, value in element.children] if is_list else _named(element.children)
        return _of_text(self._codes.written(element.text), kinds)


def _named(children: list[tuple[str, Any]]) -> dict[str, Any]:
    """Elements by their names; raises ValueError for two with one name, of which one would be lost."""
    found = dict(children)
    if len(found) < len(children):
        raise ValueError("two arguments have one name")
    return found


def _of_text(text: str, kinds: Kinds) -> Any:
    """What the text of an element is: as its schema says, or else as it looks within others."""
    if not text and kinds and not kinds & TEXT:
        return [] if "array" in kinds else {} if "object" in kinds else None
    if kinds == TEXT:
        return text
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    return value if not kinds or fits(value, kinds - TEXT) else text
