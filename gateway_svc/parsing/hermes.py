"""Calls of Hermes and Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>, several one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from gateway_svc.parsing.calls import CLOSING, AnswerBuilder, ObjectReader, shown_of
from gateway_svc.parsing.parts import Mark, Part, Piece, Role


class _HermesState(Enum):
    CONTENT = "content"
    OPENED = "behind the marker, before the object"
    OBJECT = "in the object"
    BEHIND = "behind the object"


class HermesParser:
    """Reads one answer."""

    def __init__(self) -> None:
        self._answer = AnswerBuilder()
        self._objects = ObjectReader(self._answer, needs_arguments=False)
        self._at = _HermesState.CONTENT
        self._behind = ""
        """What stands behind the object of a call."""
        self._is_closed = True
        """Whether the last call has had its closing marker."""

    def feed(self, piece: Piece) -> Iterator[Part]:
        """As CallParser."""
        if isinstance(piece, Mark) and self._objects.is_in_string:
            yield from self._objects.mark(piece)
        elif isinstance(piece, Mark) and piece.role in (Role.CALL, Role.CALL_END):
            yield from self._mark(piece)
        else:
            yield from self._text(shown_of(piece))

    def finish(self, *, is_cut: bool) -> Iterator[Part]:
        """As CallParser."""
        if is_cut:
            self._objects.drop()
        yield from self._objects.give_back()
        yield from self._answer.finish()

    def _mark(self, mark: Mark) -> Iterator[Part]:
        is_known = self._objects.is_known or not self._is_closed
        yield from self._objects.give_back()
        if mark.role is Role.CALL:
            self._at, self._objects.before = _HermesState.OPENED, mark.shown
        else:
            self._at = _HermesState.CONTENT
            if not is_known:
                yield from self._answer.text(mark.shown)
        self._is_closed = True

    def _text(self, text: str) -> Iterator[Part]:
        index = 0
        while index < len(text):
            match self._at:
                case _HermesState.CONTENT:
                    yield from self._answer.text(text[index:])
                    return
                case _HermesState.OPENED if text[index].isspace():
                    self._objects.before += text[index]
                    index += 1
                case _HermesState.OPENED if text[index] == "{":
                    self._objects.open()
                    self._at = _HermesState.OBJECT
                case _HermesState.OPENED:
                    yield from self._objects.give_back()
                    self._at = _HermesState.CONTENT
                case _HermesState.OBJECT:
                    index, parts, is_call = self._objects.feed(text, index)
                    yield from parts
                    if not self._objects.is_open:
                        self._at = _HermesState.BEHIND if is_call else _HermesState.CONTENT
                        self._behind, self._is_closed = "", not is_call
                case _HermesState.BEHIND if text[index].isspace() or text[index] in CLOSING:
                    self._behind += text[index]
                    index += 1
                case _HermesState.BEHIND:
                    yield from self._answer.text(self._behind)
                    self._at = _HermesState.CONTENT
