"""Calls of Llama 3.2 and 4: an answer that is [name(key=value, …), …], or stands behind their marker."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum

from gateway_svc.parsing.calls import AnswerBuilder, shown_of
from gateway_svc.parsing.parts import Mark, Part, Piece, Role
from gateway_svc.parsing.python_call import PythonArguments

_ROLES = (Role.CALL, Role.CALL_END)


class _PythonicState(Enum):
    START = "the beginning, or behind the marker"
    CONTENT = "content"
    NAME = "before a call, or in its name"
    CALL = "in its brackets"
    BETWEEN = "behind a call"
    END = "behind the list"


class PythonicParser:
    """Reads one answer. A call is known by the name of a tool alone, and is given when it ends."""

    def __init__(self, names: Collection[str]) -> None:
        self._answer = AnswerBuilder()
        self._names = names
        self._at = _PythonicState.START
        self._is_marked = False
        self._raw: list[str] = []
        """What is given back if it is no call."""
        self._name = ""
        self._arguments = PythonArguments()

    def feed(self, piece: Piece) -> Iterator[Part]:
        """As CallParser."""
        if isinstance(piece, Mark) and self._at is _PythonicState.CALL and self._arguments.is_in_string:
            self._arguments.feed(piece.written, 0)
            self._raw.append(piece.shown)
            yield from self._after_arguments()
        elif not isinstance(piece, Mark) or self._at is _PythonicState.CALL or piece.role not in _ROLES:
            yield from self._text(shown_of(piece))
        elif piece.role is Role.CALL:
            yield from self._give_back()
            self._at, self._is_marked, self._raw = _PythonicState.START, True, [piece.shown]
        elif self._at is not _PythonicState.END:
            yield from self._give_back(piece.shown)

    def finish(self, *, is_cut: bool) -> Iterator[Part]:
        """As CallParser."""
        if self._at is _PythonicState.BETWEEN or (
            is_cut and (self._is_marked or self._answer.num_calls or self._at is _PythonicState.CALL)
        ):
            self._raw = []
        yield from self._give_back()
        yield from self._answer.finish()

    def _text(self, text: str) -> Iterator[Part]:
        index = 0
        while index < len(text):
            if self._at is _PythonicState.CONTENT:
                yield from self._answer.text(text[index:])
                return
            if self._at is _PythonicState.CALL:
                before, index = index, self._arguments.feed(text, index)
                self._raw.append(text[before:index])
                yield from self._after_arguments()
            else:
                yield from self._take(text[index])
                index += 1

    def _take(self, char: str) -> Iterator[Part]:
        match self._at:
            case _PythonicState.START if char == "[":
                self._raw.append(char)
                self._at, self._name = _PythonicState.NAME, ""
            case _PythonicState.BETWEEN if char == ",":
                self._raw.append(char)
                self._at, self._name = _PythonicState.NAME, ""
            case _PythonicState.BETWEEN if char == "]":
                self._at, self._raw = _PythonicState.END, []
            case _PythonicState.NAME:
                yield from self._in_name(char)
            case _ if char.isspace():
                self._raw.append(char)
            case _:
                yield from self._give_back(char)

    def _in_name(self, char: str) -> Iterator[Part]:
        if char == "(" and self._name in self._names:
            self._raw.append(char)
            self._at, self._arguments = _PythonicState.CALL, PythonArguments()
        elif char.isspace() and not self._name:
            self._raw.append(char)
        elif any(name.startswith(self._name + char) for name in self._names):
            self._raw.append(char)
            self._name += char
        elif char == "]" and not self._name and self._answer.num_calls:  # behind a comma
            self._at, self._raw = _PythonicState.END, []
        else:
            yield from self._give_back(char)

    def _after_arguments(self) -> Iterator[Part]:
        """Arguments may have ended."""
        if self._arguments.is_bad:
            yield from self._give_back()
        elif self._arguments.is_done:
            yield from self._answer.begin(self._name)
            yield from self._answer.arguments(self._arguments.json)
            self._at, self._raw = _PythonicState.BETWEEN, []

    def _give_back(self, more: str = "") -> Iterator[Part]:
        """What was read is no call; text follows."""
        raw, self._raw = "".join(self._raw), []
        self._at = _PythonicState.CONTENT
        yield from self._answer.text(raw + more)
