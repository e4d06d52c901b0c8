"""Reads a tool call that is a JSON object, {"name": …, "arguments": {…}}, as it comes."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")
_SCALAR_STARTS = "-0123456789tfn"
MAX_NAME = 256
"""Most characters of a function's name."""


class ValueEnd:
    """Finds the end of a JSON object, list or string, whose characters come one by one."""

    __slots__ = ("_depth", "_is_escaped", "_is_string")

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def is_last(self, char: str) -> bool:
        """Take the next character; whether the value ends with it."""
        if self._is_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_string = False
                return self._depth == 0
            return False
        if char == '"':
            self._is_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class _At(Enum):
    """What comes next in the object."""

    KEY = "a key, or the end"
    IN_KEY = "the rest of a key"
    COLON = "a colon"
    VALUE = "a value"
    IN_VALUE = "the rest of an object, list or string"
    IN_SCALAR = "the rest of a number or word"
    COMMA = "a comma, or the end"


class CallObject:
    """One object, from its opening bracket on.

    It is a call as soon as its name is known, and with `needs_arguments` these have begun; from then on it stays one,
    whatever follows. Until then `raw` is what was read.
    """

    def __init__(self, *, needs_arguments: bool, names: Collection[str] | None) -> None:
        """names: those of the tools, of which the call's must be one; None: any."""
        self._needs_arguments = needs_arguments
        self._names = names
        self._at = _At.KEY
        self._key = ""
        self._value = ""
        self._end = ValueEnd()
        self._streams = False
        """Whether the value at hand is the arguments of a call that is known."""
        self._has_arguments = False
        self._arguments = ""
        """Those that have not been given on."""
        self.raw = ""
        self.name: str | None = None
        self.is_call = False
        self.is_done = False
        self.is_bad = False
        """It is no call; or it is one, and ends with an error."""

    def feed(self, text: str, start: int) -> tuple[int, str]:
        """Read from `start` on; returns the index behind what was used, and new text of the arguments.

        The first character of all is the opening bracket.
        """
        index = start
        if not self.raw and not self.is_call:
            self.raw, index = text[index], index + 1
        while index < len(text) and not (self.is_done or self.is_bad):
            char = text[index]
            if self._take(char):
                if not self.is_call:
                    self.raw += char
                index += 1
        if self.is_bad and self.is_call:
            self._complete()
        arguments = ""
        if self.is_call:
            arguments, self._arguments = self._arguments, ""
        return index, arguments

    def _take(self, char: str) -> bool:
        """Take a character; whether it is used: an error is not, nor the one behind a number."""
        match self._at:
            case _At.IN_VALUE:
                self._in_value(char)
            case _At.IN_KEY | _At.KEY:
                self._in_key(char)
            case _At.IN_SCALAR:
                if char in _SPACE or char in ",}":
                    self._value_ends()
                    return False
                self._value += char
            case _ if char in _SPACE:
                pass
            case _At.COLON:
                self._at = _At.VALUE
                self.is_bad = char != ":"
            case _At.VALUE:
                self._begin_value(char)
            case _At.COMMA:
                self._at = _At.KEY
                self._close_on(char)
        return not self.is_bad

    def _in_key(self, char: str) -> None:
        if self._at is _At.KEY:
            if char in _SPACE:
                return
            if char == '"':
                self._at, self._key, self._end = _At.IN_KEY, char, ValueEnd()
                self._end.is_last(char)
            else:
                self._close_on(char, allowed="}")
            return
        self._key += char
        if self._end.is_last(char):
            key = _decoded(self._key)
            self._key, self._at = str(key), _At.COLON
            self.is_bad = key is None

    def _close_on(self, char: str, allowed: str = ",}") -> None:
        if char not in allowed:
            self.is_bad = True
        elif char == "}":
            self.is_bad = self.name is None or (self._needs_arguments and not self._has_arguments)
            if not self.is_bad:
                self.is_call = True
                self._complete()

    def _complete(self) -> None:
        """The call has ended."""
        if not self._has_arguments:
            self._arguments, self._has_arguments = "{}", True
        self.is_done, self.is_bad = True, False

    def _begin_value(self, char: str) -> None:
        self._value = char
        if char in '{["':
            self._at, self._end = _At.IN_VALUE, ValueEnd()
            self._end.is_last(char)
            if self._key in _ARGUMENT_KEYS and char == "{" and not self._has_arguments:
                self._streams = self._has_arguments = True
                self._arguments, self._value = char, ""
                self._know()
        elif char in _SCALAR_STARTS:
            self._at = _At.IN_SCALAR
        else:
            self.is_bad = True

    def _in_value(self, char: str) -> None:
        if self._streams:
            self._arguments += char
        else:
            self._value += char
        if self._end.is_last(char):
            self._value_ends()

    def _value_ends(self) -> None:
        self._at = _At.COMMA
        if self._streams:
            self._streams = False
            return
        value = _decoded(self._value)
        if self._key == "name" and self.name is None:
            self.is_bad = not self._is_name(value)
            self.name = None if self.is_bad else str(value)
            self._know()
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._take_arguments(value)

    def _take_arguments(self, value: object) -> None:
        """Arguments that are no object: a text that holds one, or null."""
        text = "{}" if self._value == "null" else value
        self.is_bad = not isinstance(text, str) or not _is_utf8(text) or not isinstance(_decoded(text), dict)
        if not self.is_bad:
            self._arguments, self._has_arguments = str(text), True
            self._know()

    def _is_name(self, value: object) -> bool:
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
            return False
        return self._names is None or value in self._names

    def _know(self) -> None:
        self.is_call = self.name is not None and (self._has_arguments or not self._needs_arguments)


def _decoded(text: str) -> object:
    """The value of a JSON text; None for one that is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _is_utf8(text: str) -> bool:
    """Whether a text has no lone surrogates, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
