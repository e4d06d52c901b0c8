"""Reads a tool call that is a JSON object, {"name": …, "arguments": {…}}, as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum
from typing import NoReturn

_SPACE = " \t\r\n"
ARGUMENT_KEYS = ("arguments", "parameters")
_SCALAR_STARTS = "-0123456789tfn"
_IN_STRING = re.compile(r'["\\]')
_TO_NEXT = re.compile(r'["{}\[\]]')
MAX_NAME = 256
"""Most characters of a function's name."""


class ValueEnd:
    """Finds the end of a JSON object, list or string that comes in pieces."""

    __slots__ = ("_depth", "_is_escaped", "_is_string")

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    @property
    def is_in_string(self) -> bool:
        """Whether the next character belongs to a string."""
        return self._is_string

    def find(self, text: str, start: int) -> tuple[int, bool]:
        """Read on from `start`; returns the index behind what belongs to the value, and whether it has ended."""
        index = start
        while index < len(text):
            if self._is_escaped:
                self._is_escaped, index = False, index + 1
                continue
            found = (_IN_STRING if self._is_string else _TO_NEXT).search(text, index)
            if found is None:
                break
            index = found.end()
            match found.group():
                case "\\":
                    self._is_escaped = True
                case '"':
                    self._is_string = not self._is_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if not self._depth and not self._is_string:
                return index, True
        return len(text), False


class _CallJsonState(Enum):
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

    It is a call as soon as its name is known and its arguments have begun, which are an object, or at its end; from
    then on it stays one, whatever follows.
    """

    def __init__(
        self,
        *,
        needs_arguments: bool,
        names: Collection[str] | None,
        name_key: str = "name",
        argument_keys: Collection[str] = ARGUMENT_KEYS,
    ) -> None:
        """needs_arguments: whether an object without them is no call; names: of the tools; None: any."""
        self._name_key, self._argument_keys = name_key, argument_keys
        self._needs_arguments = needs_arguments
        self._names = names
        self._at = _CallJsonState.KEY
        self._key = ""
        self._value: list[str] = []
        """The pieces of the key or value at hand."""
        self._end = ValueEnd()
        self._streams = False
        """Whether the value at hand is the arguments of a call."""
        self._has_arguments = False
        self._arguments: list[str] = []
        """Pieces of the arguments that have not been passed on yet."""
        self._is_begun = False
        self.name: str | None = None
        self.is_call = False
        self.is_done = False
        self.is_bad = False
        """It is no call; or it is one, and ends with an error."""

    @property
    def is_in_string(self) -> bool:
        """Whether the next character belongs to a string, of a key or a value."""
        return self._at in (_CallJsonState.IN_KEY, _CallJsonState.IN_VALUE) and self._end.is_in_string

    def feed(self, text: str, start: int) -> tuple[int, str]:
        """Read from `start` on; returns the index behind what was used, and new text of the arguments.

        The first character of all is the opening bracket.
        """
        index = start
        if not self._is_begun:
            self._is_begun = True
            index += 1
        while index < len(text) and not (self.is_done or self.is_bad):
            if self._at in (_CallJsonState.IN_KEY, _CallJsonState.IN_VALUE):
                index = self._in_value(text, index)
            elif self._take(text[index]):
                index += 1
        if self.is_bad and self.is_call:
            self._complete()
        arguments = ""
        if self.is_call:
            arguments = "".join(self._arguments)
            self._arguments.clear()
        return index, arguments

    def _in_value(self, text: str, index: int) -> int:
        """Read on in an object, list or string, or in a key; returns the index behind what was used."""
        end, is_last = self._end.find(text, index)
        (self._arguments if self._streams else self._value).append(text[index:end])
        if is_last and self._at is _CallJsonState.IN_KEY:
            key = _decoded("".join(self._value))
            self._key, self._at = str(key), _CallJsonState.COLON
            self.is_bad = key is None
        elif is_last:
            self._value_ends()
        return end

    def _take(self, char: str) -> bool:
        """Take a character; whether it is used: an error is not, nor the one behind a number."""
        match self._at:
            case _CallJsonState.IN_SCALAR:
                if char in _SPACE or char in ",}":
                    self._value_ends()
                    return False
                self._value.append(char)
            case _ if char in _SPACE:
                pass
            case _CallJsonState.KEY if char == '"':
                self._at = _CallJsonState.IN_KEY
                self._open(char)
            case _CallJsonState.KEY:
                self._close_on(char, allowed="}")
            case _CallJsonState.COLON:
                self._at = _CallJsonState.VALUE
                self.is_bad = char != ":"
            case _CallJsonState.VALUE:
                self._begin_value(char)
            case _CallJsonState.COMMA:
                self._at = _CallJsonState.KEY
                self._close_on(char)
        return not self.is_bad

    def _open(self, char: str) -> None:
        """An object, list or string begins."""
        self._value, self._end = [char], ValueEnd()
        self._end.find(char, 0)

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
            self._arguments, self._has_arguments = ["{}"], True
        self.is_done, self.is_bad = True, False

    def _begin_value(self, char: str) -> None:
        if char in '{["':
            self._at = _CallJsonState.IN_VALUE
            self._open(char)
            if self._key in self._argument_keys and char == "{" and not self._has_arguments:
                self._streams = self._has_arguments = True
                self._arguments = [char]
                self._know()
        elif char in _SCALAR_STARTS:
            self._at, self._value = _CallJsonState.IN_SCALAR, [char]
        else:
            self.is_bad = True

    def _value_ends(self) -> None:
        self._at = _CallJsonState.COMMA
        if self._streams:
            self._streams = False
            return
        text = "".join(self._value)
        value = _decoded(text)
        self.is_bad = value is None and text != "null"
        if self._key == self._name_key and self.name is None:
            self.is_bad = not self._is_name(value) or not self._fits_before()
            self.name = None if self.is_bad else str(value)
            self._know()
        elif self._key in self._argument_keys and not self._has_arguments:
            self._take_arguments("{}" if text == "null" else value)

    def _fits_before(self) -> bool:
        """Whether arguments that stand before the name are an object."""
        return not self._has_arguments or isinstance(_decoded("".join(self._arguments)), dict)

    def _take_arguments(self, text: object) -> None:
        """Take arguments that are not an object: a text with an object in it, or null."""
        self.is_bad = not isinstance(text, str) or not _is_utf8(text) or not isinstance(_decoded(text), dict)
        if not self.is_bad:
            self._arguments, self._has_arguments = [str(text)], True
            self._know()

    def _is_name(self, value: object) -> bool:
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
            return False
        return self._names is None or value in self._names

    def _know(self) -> None:
        self.is_call = self.name is not None and self._has_arguments


def _decoded(text: str) -> object:
    """Return the value of a JSON text; None if the text is not JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _is_utf8(text: str) -> bool:
    """Whether a text has no lone surrogates, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
