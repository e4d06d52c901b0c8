"""What parsers of all formats of tool calls have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from gateway_svc.parsing.call_json import CallObject
from gateway_svc.parsing.parts import CallArguments, CallBegin, Content, Mark, Part, Piece

CLOSING = "]}"
"""Brackets too many behind a call are no content."""


class CallParser(Protocol):
    """Reads the answer of one output, piece by piece."""

    def feed(self, piece: Piece) -> Iterator[Part]:
        """Take one piece; gives the parts that are certain now."""

    def finish(self, *, is_cut: bool) -> Iterator[Part]:
        """Give the rest; is_cut: the output has ended for its length, so that what has begun is no error."""


class AnswerBuilder:
    """Makes content and calls of what a parser has found. Whitespace next to a call is no content."""

    def __init__(self) -> None:
        self._space = ""
        """Whitespace that may be next to a call."""
        self.num_calls = 0

    def text(self, text: str) -> Iterator[Part]:
        """Content, some of which may come later."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            yield Content(kept)

    def begin(self, name: str) -> Iterator[Part]:
        """A call."""
        self._space = ""
        yield CallBegin(self.num_calls, name)
        self.num_calls += 1

    def arguments(self, text: str) -> Iterator[Part]:
        """More of the arguments of the newest call."""
        if text:
            yield CallArguments(self.num_calls - 1, text)

    def finish(self) -> Iterator[Part]:
        """Give the rest."""
        if self._space and not self.num_calls:
            yield Content(self._space)
        self._space = ""


class ObjectReader:
    """Reads JSON objects that may be calls, each with what stands before it and belongs to it."""

    def __init__(self, answer: AnswerBuilder, *, needs_arguments: bool, names: Collection[str] | None = None) -> None:
        """needs_arguments, names: see CallObject."""
        self._answer = answer
        self._needs_arguments = needs_arguments
        self._names = names
        self._object: CallObject | None = None
        self._is_begun = False
        self.before = ""
        """What is given back with an object that is no call."""

    @property
    def is_open(self) -> bool:
        """Whether there is an object that has not ended."""
        return self._object is not None

    @property
    def is_known(self) -> bool:
        """Whether this object is a call."""
        return self._object is not None and self._object.is_call

    @property
    def is_in_string(self) -> bool:
        """Whether the next character belongs to a string of this object: a marker there is text."""
        return self._object is not None and self._object.is_in_string

    def open(self) -> None:
        """The next character is an opening bracket."""
        self._object = CallObject(needs_arguments=self._needs_arguments, names=self._names)
        self._is_begun = False

    def feed(self, text: str, index: int) -> tuple[int, list[Part], bool]:
        """Read from `index` on; returns the index behind it, the parts, and whether it is still a call, or may be one.

        After an object that is none, all of it is in the parts.
        """
        call = self._object
        assert call is not None
        index, arguments = call.feed(text, index)
        parts: list[Part] = []
        if call.is_call and not self._is_begun:
            self._is_begun = True
            parts += self._answer.begin(str(call.name))
        parts += self._answer.arguments(arguments)
        if call.is_bad:
            parts += self.give_back()
            return index, parts, False
        if call.is_done:
            self._object, self.before = None, ""
        return index, parts, True

    def mark(self, mark: Mark) -> Iterator[Part]:
        """Take a marker that stands in a string."""
        assert self._object is not None
        yield from self._answer.arguments(self._object.mark(mark))

    def give_back(self) -> Iterator[Part]:
        """Give back what was read, as it is no call; a call that is known already stays."""
        call, self._object = self._object, None
        before, self.before = self.before, ""
        if call is None:
            yield from self._answer.text(before)
        elif not call.is_call:
            yield from self._answer.text(before + call.raw)

    def drop(self) -> None:
        """Forget what was read."""
        self._object, self.before = None, ""


def shown_of(piece: Piece) -> str:
    """The text of a piece."""
    return piece.shown if isinstance(piece, Mark) else piece
