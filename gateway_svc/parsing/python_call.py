"""Reads the arguments of a tool call that is written as Python: key=value, …), with literals as values.

Values are written as in Python, or as in JSON if a grammar forces it. Both have strings, numbers, lists and
dictionaries; words and escapes differ.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from enum import Enum

KEY = re.compile(r"[A-Za-z_][\w.-]*")
"""The name of an argument. Python's may not have dots and hyphens, but schemas do."""
MAX_CHARS = 1 << 20
"""Of one call: more is no call, as nothing of it is given on before its end."""
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
"""Words of Python and of JSON, as JSON has them."""
_WORD = re.compile(r"[\w.+-]+")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_OCTAL = re.compile(r"[+-]?0\d+")
"""Python 2 had such numbers, Python 3 does not."""
_MAX_NUMBER = 64
"""Characters of a number that only Python has."""
_JSON_STRING = re.compile(r'(?:[^"\\\x00-\x1f\ud800-\udfff]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_ESCAPE = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))", re.DOTALL
)
_SIMPLE = {
    "n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "/": "/", "\\": "\\",
    "'": "'", '"': '"',
}  # fmt: skip
_BARE_KEY = re.compile(r"[^:,{}\[\]\ud800-\udfff]+")
"""Where keys have no quotes in dictionaries either."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_STRING_ENDS = {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class _PythonCallState(Enum):
    """What comes next."""

    KEY = "a key, or the end"
    EQUALS = "what stands between a key and its value"
    VALUE = "a value"
    FIRST = "a value, or the end"
    COMMA = "a comma, or the end"


@dataclass(slots=True)
class _OpenBracket:
    """A bracket that has not been closed."""

    bracket: str
    place: int
    """Of its text in the JSON."""
    num_values: int = 0
    has_comma: bool = False


class PythonArguments:
    """The arguments of one call, from its opening bracket on. They come in pieces.

    With a mark, as Gemma 4 writes them: in braces, each key bare and with a colon, strings between two marks.
    """

    def __init__(self, mark: str = "") -> None:
        """mark: the character around strings, which have no escapes then."""
        self._mark = mark
        self._at = _PythonCallState.KEY
        self._json = ["{"]
        """The pieces of the arguments as JSON."""
        self._open = [_OpenBracket("call", 0)]
        self._keys = set[str]()
        self._word = ""
        """The number, word or key at hand."""
        self._quote = ""
        """Of the string at hand."""
        self._string: list[str] = []
        self._is_escaped = False
        self._num_chars = 0
        self.is_done = False
        self.is_bad = False
        """These are no arguments."""

    @property
    def is_in_string(self) -> bool:
        """Whether the next character belongs to a string."""
        return bool(self._quote)

    @property
    def json(self) -> str:
        """All arguments as the text of a JSON object, once they are done."""
        return "".join(self._json)

    def feed(self, text: str, start: int) -> int:
        """Read from `start` on; returns the index behind what was used."""
        index = start
        while index < len(text) and not (self.is_done or self.is_bad):
            if self._quote:
                index = self._in_string(text, index)
            elif (found := self._words().match(text, index)) is not None:
                self._word += found.group()
                index = found.end()
                self.is_bad = len(self._word) > MAX_CHARS
            else:
                if self._word:
                    self._end_word()
                if not self.is_bad:
                    self._take(text[index])
                    index += 1
        self._num_chars += index - start
        self.is_bad = not self.is_done and (self.is_bad or self._num_chars > MAX_CHARS)
        return index

    def _words(self) -> re.Pattern[str]:
        return _BARE_KEY if self._mark and self._at is _PythonCallState.KEY else _WORD

    def _in_string(self, text: str, index: int) -> int:
        if self._quote == self._mark:
            end = text.find(self._mark, index)
            self._string.append(text[index:] if end < 0 else text[index:end])
            if end >= 0:
                self._end_string()
            return len(text) if end < 0 else end + 1
        if self._is_escaped:
            end, self._is_escaped = index + 1, False
        else:
            found = _STRING_ENDS[self._quote].search(text, index)
            end = len(text) if found is None else found.end()
            if found is not None and found.group() == self._quote:
                self._string.append(text[index : end - 1])
                self._end_string()
                return end
            self._is_escaped = found is not None
        self._string.append(text[index:end])
        return end

    def _end_string(self) -> None:
        text, quote = "".join(self._string), self._quote
        self._quote, self._string = "", []
        if quote == self._mark:
            self._put(json_string(text), is_string=True)
        elif quote == '"' and _JSON_STRING.fullmatch(text):
            self._put(f'"{text}"', is_string=True)  # as it is: JSON may have what UTF-8 has not
        else:
            self._put(json_string(_ESCAPE.sub(_unescaped, text)), is_string=True)

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if self._at is _PythonCallState.KEY:
            word = word.strip()
            if len(self._open) == 1:
                self.is_bad = (not self._mark and KEY.fullmatch(word) is None) or word in self._keys
                self._keys.add(word)
            else:
                self.is_bad = not self._mark
            self._json.append(f"{json_string(word)}: ")
            self._at = _PythonCallState.EQUALS
            return
        value = WORDS.get(word) or _number(word)
        if value is None:
            self.is_bad = True
        else:
            self._put(value)

    def _put(self, value: str, *, is_string: bool = False) -> None:
        """A value has ended that is no list; or a key of a dictionary."""
        top = self._open[-1]
        if self._at is _PythonCallState.KEY and top.bracket == "{":
            self.is_bad = not is_string
            self._json.append(f"{value}: ")
            self._at = _PythonCallState.EQUALS
        elif self._at in (_PythonCallState.VALUE, _PythonCallState.FIRST):
            self._json.append(value)
            self._value_ends()
        else:
            self.is_bad = True

    def _value_ends(self) -> None:
        self._open[-1].num_values += 1
        self._at = _PythonCallState.COMMA

    def _take(self, char: str) -> None:
        """Take a character that is no part of a word; one that opens a string, too."""
        top = self._open[-1]
        can_begin = self._at in (_PythonCallState.VALUE, _PythonCallState.FIRST)
        if char.isspace():
            return
        if char == ":" and self._mark and self._at is _PythonCallState.KEY:
            self._json.append('"": ')
            self._at = _PythonCallState.VALUE
        elif char in (self._mark or "'\"") and (can_begin or (self._at is _PythonCallState.KEY and top.bracket == "{")):
            self._quote = char
        elif char in _CLOSING and can_begin:
            self._open.append(_OpenBracket(char, len(self._json)))
            self._json.append("{" if char == "{" else "[")
            self._at = _PythonCallState.KEY if char == "{" else _PythonCallState.FIRST
        elif self._at is _PythonCallState.EQUALS and char == ("=" if top.bracket == "call" and not self._mark else ":"):
            self._at = _PythonCallState.VALUE
        elif self._at is _PythonCallState.COMMA and char == ",":
            top.has_comma = True
            self._json.append(", ")
            self._at = _PythonCallState.KEY if top.bracket in ("call", "{") else _PythonCallState.FIRST
        elif self._at in (
            _PythonCallState.COMMA,
            _PythonCallState.FIRST,
            _PythonCallState.KEY,
        ) and char == _CLOSING.get(top.bracket, "}" if self._mark else ")"):
            self._close()
        else:
            self.is_bad = True

    def _close(self) -> None:
        """A bracket is closed, perhaps behind a comma."""
        top = self._open.pop()
        if self._at is not _PythonCallState.COMMA and top.has_comma:
            self._json.pop()
        if top.bracket == "(" and top.num_values == 1 and not top.has_comma:  # one value in brackets
            self._json[top.place] = ""
        else:
            self._json.append("]" if top.bracket in "([" else "}")
        if self._open:
            self._value_ends()
        else:
            self.is_done = True


def _number(word: str) -> str | None:
    """A number as JSON; None for what is none. One of JSON stays as it is, whatever its size."""
    if _JSON_NUMBER.fullmatch(word):
        return word
    if len(word) > _MAX_NUMBER or not any(char.isdigit() for char in word) or _OCTAL.fullmatch(word):
        return None
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        value = float(word)
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None


def _unescaped(found: re.Match[str]) -> str:
    """What an escape stands for; one that neither Python nor JSON knows is two characters, as in Python."""
    octal, *others, char = found.groups()
    if octal:
        return chr(int(octal, 8))
    code = next(filter(None, others), None)
    return chr(int(code, 16)) if code else _SIMPLE.get(char, f"\\{char}")


def json_string(text: str) -> str:
    """A string as JSON; halves of pairs of UTF-16, which UTF-8 cannot have, as escapes."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half.group()):04x}", json.dumps(text, ensure_ascii=False))
