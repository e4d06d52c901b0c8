"""Calls of Llama 3: an answer that is {"name": …, "parameters": {…}}, several with ";" between, or after its marker."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum

from gateway_svc.parsing.calls import CLOSING, AnswerBuilder, ObjectReader, shown_of
from gateway_svc.parsing.parts import Mark, Part, Piece, Role


class _BareJsonState(Enum):
    START = "the beginning, or behind the marker"
    CONTENT = "content"
    OBJECT = "in an object"
    BETWEEN = "behind a call"


class BareJsonParser:
    """Reads one answer. Without a marker, a call is known by the name of a tool alone."""

    def __init__(self, names: Collection[str]) -> None:
        self._answer = AnswerBuilder()
        self._objects = ObjectReader(self._answer, needs_arguments=True, names=names)
        self._at = _BareJsonState.START
        self._is_marked = False

    def feed(self, piece: Piece) -> Iterator[Part]:
        """As CallParser."""
        if isinstance(piece, Mark) and self._objects.is_in_string:
            yield from self._objects.mark(piece)
            return
        is_mark = isinstance(piece, Mark) and piece.role is Role.CALL
        if not is_mark or self._at is _BareJsonState.OBJECT:
            yield from self._text(shown_of(piece))
            return
        if self._at is _BareJsonState.BETWEEN:
            self._objects.drop()
        yield from self._objects.give_back()
        self._at, self._is_marked, self._objects.before = _BareJsonState.START, True, shown_of(piece)

    def finish(self, *, is_cut: bool) -> Iterator[Part]:
        """As CallParser."""
        if self._at is _BareJsonState.BETWEEN or (is_cut and (self._is_marked or self._answer.num_calls)):
            self._objects.drop()
        yield from self._objects.give_back()
        yield from self._answer.finish()

    def _text(self, text: str) -> Iterator[Part]:
        index = 0
        while index < len(text):
            match self._at:
                case _BareJsonState.CONTENT:
                    yield from self._answer.text(text[index:])
                    return
                case _BareJsonState.OBJECT:
                    index, parts, is_call = self._objects.feed(text, index)
                    yield from parts
                    if not self._objects.is_open:
                        self._at = _BareJsonState.BETWEEN if is_call else _BareJsonState.CONTENT
                case _ if text[index] == "{":
                    self._objects.open()
                    self._at = _BareJsonState.OBJECT
                case _ if text[index].isspace() or (
                    self._at is _BareJsonState.BETWEEN and text[index] in f";{CLOSING}"
                ):
                    self._objects.before += text[index]
                    index += 1
                case _:
                    yield from self._objects.give_back()
                    self._at = _BareJsonState.CONTENT
