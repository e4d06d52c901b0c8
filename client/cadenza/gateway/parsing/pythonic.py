"""Calls of Llama 3.2 and 4: an answer that is [name(key=value, …), …], or stands behind their marker."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum

from cadenza.gateway.parsing.calls import Answer, shown_of
from cadenza.gateway.parsing.parts import Mark, Part, Piece, Role
from cadenza.gateway.parsing.python_call import MAX_CHARS, NAME, CallEnd, arguments_of

_BREAKS = {"\n": "\\n", "\r": "\\r"}


class _At(Enum):
    START = "the beginning, or behind the marker"
    CONTENT = "content"
    NAME = "before a call, or in its name"
    CALL = "in its brackets"
    BETWEEN = "behind a call"
    END = "behind the list"


class PythonicParser:
    """Reads one answer. A call is known by the name of a tool alone, and is given when it ends."""

    def __init__(self, names: Collection[str]) -> None:
        self._answer = Answer()
        self._names = names
        self._at = _At.START
        self._is_marked = False
        self._raw = ""
        """What is given back if it is no call."""
        self._name = ""
        self._brackets = ""
        self._end = CallEnd()

    def feed(self, piece: Piece) -> Iterator[Part]:
        """As CallParser."""
        if not isinstance(piece, Mark) or self._at is _At.CALL:
            text = shown_of(piece)
            for index, char in enumerate(text):
                if self._at is _At.CONTENT:
                    yield from self._answer.text(text[index:])
                    return
                yield from self._take(char)
        elif piece.role is Role.CALL:
            yield from self._give_back()
            self._at, self._is_marked, self._raw = _At.START, True, piece.shown
        elif self._at is not _At.END:
            yield from self._give_back(piece.shown)

    def finish(self, *, is_cut: bool) -> Iterator[Part]:
        """As CallParser."""
        if self._at is _At.BETWEEN or (is_cut and (self._is_marked or self._answer.num_calls or self._at is _At.CALL)):
            self._raw = ""
        yield from self._give_back()
        yield from self._answer.finish()

    def _take(self, char: str) -> Iterator[Part]:
        match self._at:
            case _At.CALL:
                yield from self._in_call(char)
            case _At.START if char == "[":
                self._raw += char
                self._at, self._name = _At.NAME, ""
            case _At.BETWEEN if char == ",":
                self._raw += char
                self._at, self._name = _At.NAME, ""
            case _At.BETWEEN if char == "]":
                self._at, self._raw = _At.END, ""
            case _At.NAME:
                yield from self._in_name(char)
            case _ if char.isspace():
                self._raw += char
            case _:
                yield from self._give_back(char)

    def _in_name(self, char: str) -> Iterator[Part]:
        if char == "(" and self._name in self._names:
            self._raw += char
            self._at, self._brackets, self._end = _At.CALL, char, CallEnd()
            self._end.is_last(char)
        elif char.isspace() and not self._name:
            self._raw += char
        elif any(name.startswith(self._name + char) for name in self._names) and NAME.fullmatch(self._name + char):
            self._raw += char
            self._name += char
        elif char == "]" and not self._name and self._answer.num_calls:  # behind a comma
            self._at, self._raw = _At.END, ""
        else:
            yield from self._give_back(char)

    def _in_call(self, char: str) -> Iterator[Part]:
        self._raw += char
        # A line may go on in a string here, which Python does not allow.
        self._brackets += _BREAKS.get(char, char) if self._end.is_string else char
        if len(self._brackets) > MAX_CHARS:
            yield from self._give_back()
        elif self._end.is_last(char):
            arguments = arguments_of(self._brackets)
            if arguments is None:
                yield from self._give_back()
                return
            yield from self._answer.begin(self._name)
            yield from self._answer.arguments(arguments)
            self._at, self._raw, self._brackets = _At.BETWEEN, "", ""

    def _give_back(self, more: str = "") -> Iterator[Part]:
        """What was read is no call; text follows."""
        raw, self._raw = self._raw, ""
        self._at = _At.CONTENT
        yield from self._answer.text(raw + more)
