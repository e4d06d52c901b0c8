"""Calls of Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], and the newer [TOOL_CALLS]name[ARGS]{…}."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

from gateway_svc.parsing.call_json import MAX_NAME, ValueEnd
from gateway_svc.parsing.calls import CLOSING, AnswerBuilder, ObjectReader
from gateway_svc.parsing.parts import Mark, Part, Piece, Role

_NAME = re.compile(r"[\w.:/-]+")


class _MistralState(Enum):
    CONTENT = "content"
    OPENED = "behind the marker"
    LIST = "in a list, before or behind an object"
    OBJECT = "in an object of a list"
    NAME = "in a name"
    ID = "behind a name and the marker of an id"
    BEFORE = "behind the marker of arguments"
    ARGUMENTS = "in arguments"
    BEHIND = "behind arguments"


class MistralParser:
    """Reads one answer."""

    def __init__(self) -> None:
        self._answer = AnswerBuilder()
        self._objects = ObjectReader(self._answer, needs_arguments=False)
        self._at = _MistralState.CONTENT
        self._raw = ""
        """What is given back if it is no call."""
        self._name = ""
        self._end = ValueEnd()

    def feed(self, piece: Piece) -> Iterator[Part]:
        """As CallParser."""
        if not isinstance(piece, Mark):
            yield from self._text(piece)
        elif self._objects.is_in_string:
            yield from self._objects.mark(piece)
        elif self._at is _MistralState.ARGUMENTS and self._end.is_in_string:
            yield from self._text(piece.written)
        elif piece.role is Role.CALL:
            self._forget_behind()
            yield from self._give_back()
            self._at, self._raw = _MistralState.OPENED, piece.shown
        elif piece.role in (Role.ARGUMENTS, Role.CALL_ID) and self._at in (_MistralState.NAME, _MistralState.ID):
            self._raw += piece.shown
            self._at = _MistralState.BEFORE if piece.role is Role.ARGUMENTS else _MistralState.ID
        else:
            yield from self._text(piece.shown)

    def finish(self, *, is_cut: bool) -> Iterator[Part]:
        """As CallParser."""
        if is_cut or (self._at is _MistralState.LIST and self._answer.num_calls):
            self._objects.drop()
            self._raw = ""
        self._forget_behind()
        yield from self._give_back()
        yield from self._answer.finish()

    def _text(self, text: str) -> Iterator[Part]:
        index = 0
        while index < len(text):
            if self._at is _MistralState.CONTENT:
                yield from self._answer.text(text[index:])
                return
            if self._at is _MistralState.OBJECT:
                index, parts, is_call = self._objects.feed(text, index)
                yield from parts
                if not self._objects.is_open:
                    self._at = _MistralState.LIST if is_call else _MistralState.CONTENT
                continue
            if self._at is _MistralState.ARGUMENTS:
                end, is_last = self._end.find(text, index)
                yield from self._answer.arguments(text[index:end])
                index = end
                if is_last:
                    self._at = _MistralState.BEHIND
                continue
            if self._at is _MistralState.LIST and text[index] == "{":
                self._objects.before, self._raw = self._raw, ""
                self._objects.open()
                self._at = _MistralState.OBJECT
                continue
            yield from self._take(text[index])
            index += 1

    def _take(self, char: str) -> Iterator[Part]:
        """Take a character outside of content and objects."""
        match self._at:
            case _MistralState.LIST if char == "]":
                is_empty = not self._answer.num_calls
                yield from self._give_back(char) if is_empty else self._end_list()
            case _MistralState.OPENED if char == "[":
                self._raw += char
                self._at = _MistralState.LIST
            case _MistralState.NAME | _MistralState.BEFORE if char == "{" and _NAME.fullmatch(self._name.rstrip()):
                yield from self._begin(char)
            case _MistralState.ID if char.isalnum():
                self._raw += char
            case _MistralState.OPENED | _MistralState.NAME if _NAME.fullmatch(char) and len(self._name) < MAX_NAME:
                self._name = char if self._at is _MistralState.OPENED else self._name + char
                self._raw += char
                self._at = _MistralState.NAME
            case _MistralState.BEHIND if char in CLOSING:
                self._raw += char
            case _MistralState.LIST if char in ",}":
                self._raw += char
            case _ if char.isspace():
                self._name += char if self._at is _MistralState.NAME else ""
                self._raw += char
            case _:
                yield from self._give_back(char)

    def _begin(self, char: str) -> Iterator[Part]:
        yield from self._answer.begin(self._name.rstrip())
        yield from self._answer.arguments(char)
        self._at, self._raw, self._end = _MistralState.ARGUMENTS, "", ValueEnd()
        self._end.find(char, 0)

    def _end_list(self) -> Iterator[Part]:
        self._at, self._raw = _MistralState.CONTENT, ""
        return iter(())

    def _forget_behind(self) -> None:
        if self._at is _MistralState.BEHIND:
            self._raw = ""

    def _give_back(self, more: str = "") -> Iterator[Part]:
        """What was read is no call; text follows."""
        yield from self._objects.give_back()
        raw, self._raw, self._name, self._at = self._raw, "", "", _MistralState.CONTENT
        yield from self._answer.text(raw + more)
