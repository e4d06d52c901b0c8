"""Grammars of answers whose calls keep to the tools' schemas, in the format of the model.

Written in llguidance's Lark. Each tool's arguments are rules of their own, each in a line of its own: the line of an
error names the tool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cadenza_common.call_formats.syntax import Body
from gateway_svc.parsing.formats import Formats
from gateway_svc.parsing.parts import Role
from gateway_svc.parsing.reasoning import Opening
from gateway_svc.requests.tools import ToolUse
from gateway_svc.tools.call_rules import CallRules
from gateway_svc.tools.lark import ANY_TEXT, MarkedText, compact_json, text_without

_OF_TOOL = re.compile(r"(?:args|VALUE|QUOTED|STRING|TEXT|any)_(\d+)")
"""A rule of a tool's."""
_SPACE = r"SPACE: /\n{0,2}/"
"""Behind a thought, where models break the line."""


def grammar_of(use: ToolUse, formats: Formats, opening: Opening | None, answer: Mapping[str, Any] | None) -> str:
    """The grammar of an answer with these tools.

    opening: how the prompt ends; None: thoughts are not split off. answer: the JSON schema of content; None: any text.
    Raises ApiError for a tool that cannot be written in the format.
    """
    writer = _Writer(use, formats)
    if use.mode == "required":
        start = writer.calls()
    else:
        start = writer.text_or_calls() if answer is None else f"{writer.calls()} | {writer.framed('answer')}"
    rules = [f"start: {_thought(formats, opening)} ({start})", *writer.rules]
    if answer is not None:
        # Compact too: with other whitespace than calls it could not be an alternative to them.
        rules.append(f"answer: {compact_json(answer)}")
    return "\n".join(["%llguidance {}", *rules, *_terminals(formats, opening)])


def thought_then(formats: Formats, opening: Opening, answer: Sequence[str]) -> str:
    """The grammar of an answer behind a thought; answer: rules of which one is called so, perhaps behind a header."""
    has_header = answer[0].startswith("%llguidance")
    header, rules = (answer[0], answer[1:]) if has_header else ("%llguidance {}", answer)
    start = f"start: {_thought(formats, opening)} answer"
    return "\n".join([header, start, *rules, *_terminals(formats, opening)])


def tool_of_line(grammar: str, line: int) -> int | None:
    """The index of the tool whose arguments a line of a grammar describes, counted from 1."""
    lines = grammar.split("\n")
    found = _OF_TOOL.match(lines[line - 1]) if 0 < line <= len(lines) else None
    return None if found is None else int(found[1])


def only_tool(grammar: str) -> int | None:
    """The index of the one tool of a grammar; None: it has several."""
    found = {int(match[1]) for line in grammar.split("\n") if (match := _OF_TOOL.match(line)) is not None}
    return found.pop() if len(found) == 1 else None


def _thought(formats: Formats, opening: Opening | None) -> str:
    syntax = formats.thought_syntax
    if opening is None or opening.is_past or syntax is None:
        return ""
    then = f" {_marked(formats)(syntax.then)}" if syntax.then else ""
    if opening is Opening.OPEN or formats.always_thinks:
        return f"thought SPACE{then}"
    return f"({_marked(formats)(syntax.open)} thought SPACE{then})?"


def _terminals(formats: Formats, opening: Opening | None) -> list[str]:
    if opening is None or opening.is_past:
        return []
    end = formats.marker(Role.THOUGHT_END)
    closing = _marked(formats)
    if not closing.begins_with_token(end.text):
        # Greedy text would take the marker's beginning, and then could not end with it.
        return [f"thought[lazy]: THOUGHT {closing(end.text)}", f"THOUGHT: /{ANY_TEXT}/", _SPACE]
    return [f"thought: THOUGHT {closing(end.text)}", f"THOUGHT: {text_without(closing.first(end.text))}", _SPACE]


def _marked(formats: Formats) -> MarkedText:
    tokens = {each.text: each.token_id for each in formats.markers if each.token_id is not None}
    return MarkedText(tokens, [each.text for each in formats.markers])


class _Writer:
    """Writes the calls of one request."""

    def __init__(self, use: ToolUse, formats: Formats) -> None:
        self._use = use
        self._formats = formats
        self._way = formats.way
        self._marked = _marked(formats)
        self.rules: list[str] = []
        for tool in use.callable:
            index = use.index_of(tool)
            rules = CallRules(tool, index, self._way, self._marked, must_fit=use.mode == "required" or tool.is_strict)
            self.rules += rules.all()
        names = " | ".join(f"call_{use.index_of(tool)}" for tool in use.callable)
        opening = self._marked(self._way.call[0])
        self.rules += [f"named: {names}", f"call: {opening} named".replace(":  ", ": ")]

    def calls(self) -> str:
        """One call or several, and nothing else."""
        way = self._way
        opening, closing = (self._marked(text) for text in self._section())
        if way.section == ("", ""):
            return self._several("call")
        if way.bare == "":  # what begins calls may be left out
            opening = f"({opening})?" if self._marked.begins_with_token(way.section[0]) else ""
        return f"{opening} {self._several('call')} {closing}".strip()

    def text_or_calls(self) -> str:
        """Free text, in which calls keep to the grammar."""
        way = self._way
        if way.bare is not None and way.is_known and way.body in (Body.OBJECT, Body.PYTHON):
            calls = self.calls()
            first = "{" if way.body is Body.OBJECT else r"\["
            self.rules.append(rf"TEXT: /(\s*[^\s{first}]{ANY_TEXT})?/")
            return f"TEXT | {calls}"
        thought = self._formats.thought_syntax
        if thought is not None and thought.content[0]:  # text stands between markers, too
            self.rules.append(f"TEXT: {text_without(*self._marked.tokens)}")
            return f"{self.framed('TEXT')} | {self.calls()}"
        return self._calls_in_text()

    def framed(self, rule: str) -> str:
        """An answer as it stands between the texts of the format."""
        thought = self._formats.thought_syntax
        opening, closing = ("", "") if thought is None else thought.content
        if not opening:
            return rule
        before = self._marked(opening)
        before = f"({before})?" if self._marked.begins_with_token(opening) else before
        return f"{before} {rule} ({self._marked(closing)})?" if closing else f"{before} {rule}"

    def _calls_in_text(self) -> str:
        """Calls between texts in which what begins them does not stand."""
        way = self._way
        opening, closing = self._section()
        first = self._marked.first_of(opening or way.call[0], way.markers)
        rest = self._marked((opening or way.call[0]).partition(first)[2])
        body = f"{self._several('call')} {self._marked(closing)}" if opening else "named"
        self.rules.append(f"body: {rest} {body}".replace(":  ", ": "))
        # What calls without a marker too stands in no text: it would keep to no schema.
        unwanted = [way.bare] if way.bare else []
        if not self._marked.begins_with_token(first):
            free = text_without(*unwanted) if unwanted else f"/{ANY_TEXT}/"
            self.rules += [f"before[lazy]: TEXT {self._marked(first)}", f"TEXT: {free}"]
        else:
            self.rules += [f"before: TEXT {self._marked(first)}", f"TEXT: {text_without(first, *unwanted)}"]
        return f"(before body){'*' if self._use.is_parallel else '?'} TEXT"

    def _section(self) -> tuple[str, str]:
        way = self._way
        return (way.bare, way.section[1][:1]) if way.bare and way.body is Body.PYTHON else way.section  # no markers

    def _several(self, one: str) -> str:
        between = self._marked(self._way.between)
        return f"{one} ({between} {one})*" if self._use.is_parallel else one
