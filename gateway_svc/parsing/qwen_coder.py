"""Calls of Qwen3-Coder, whose arguments are bare text between tags.

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>

A value is without the line breaks beside its tags. What it is, the tool's schema says: a string is given on as it
comes, all else is a literal of JSON or of Python, or a string after all, as in vLLM's qwen3_coder parser
(https://docs.vllm.ai/en/latest/features/tool_calling.html).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum

from gateway_svc.parsing.argument_kinds import TEXT, Kinds, fits
from gateway_svc.parsing.call_json import MAX_NAME
from gateway_svc.parsing.calls import AnswerBuilder, shown_of
from gateway_svc.parsing.parts import Mark, Part, Piece, Role
from gateway_svc.parsing.pieces import num_begun
from gateway_svc.parsing.python_call import WORDS, PythonArguments, json_string

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_TAG = re.compile(rf"{FUNCTION_END}|{PARAMETER}|<[a-z/]{{0,10}}\Z")
"""Between arguments; at the end of what there is, it may be the beginning of one."""
ArgumentKinds = Mapping[str, Mapping[str, Kinds]]
"""By the name of a tool and that of its argument."""


class _QwenCoderState(Enum):
    CONTENT = "content"
    OPENED = "behind the marker, before the name"
    BODY = "between arguments"
    TEXT = "in a value that is a string"
    LITERAL = "in another value"
    BEHIND = "behind a call"


class QwenCoderParser:
    """Reads one answer."""

    def __init__(self, kinds: ArgumentKinds) -> None:
        self._kinds = kinds
        self._answer = AnswerBuilder()
        self._at = _QwenCoderState.CONTENT
        self._buffer = ""
        """What has been read and is not certain."""
        self._raw = ""
        """What is given back if it is no call."""
        self._name = ""
        self._num_arguments = 0
        self._of_value: Kinds = TEXT
        self._value: list[str] = []
        """Of a value that is given on at its end, what was read."""
        self._literal = PythonArguments()
        self._is_literal = False
        """Whether it may still be a literal."""
        self._begins = False
        """Whether nothing of the value has been read."""
        self._is_closed = True
        """Whether the last call has had its closing marker."""

    def feed(self, piece: Piece) -> Iterator[Part]:
        """As CallParser."""
        if isinstance(piece, Mark) and piece.role in (Role.CALL, Role.CALL_END):
            yield from self._mark(piece)
        else:
            self._buffer += shown_of(piece)
            yield from self._read()

    def finish(self, *, is_cut: bool) -> Iterator[Part]:
        """As CallParser."""
        if not is_cut:
            yield from self._end()
        yield from self._answer.finish()

    def _mark(self, mark: Mark) -> Iterator[Part]:
        yield from self._end()
        if mark.role is Role.CALL:
            self._at, self._raw = _QwenCoderState.OPENED, mark.shown
        elif self._is_closed:
            yield from self._answer.text(mark.shown)
        self._is_closed = True

    def _end(self) -> Iterator[Part]:
        """What has begun ends here: a call that is known is completed, all else is given back."""
        if self._at is _QwenCoderState.TEXT:
            yield from self._end_text(self._buffer)
        elif self._at is _QwenCoderState.LITERAL:
            self._value.append(self._buffer)
            yield from self._end_literal()
        if self._at is _QwenCoderState.BODY:
            yield from self._answer.arguments("}")
        elif self._at in (_QwenCoderState.CONTENT, _QwenCoderState.OPENED):
            yield from self._answer.text(self._raw + self._buffer)
        self._at, self._raw, self._buffer = _QwenCoderState.CONTENT, "", ""

    def _read(self) -> Iterator[Part]:
        """Read as far as it is certain."""
        before = None
        while self._buffer and before != (self._at, len(self._buffer)):
            before = self._at, len(self._buffer)
            match self._at:
                case _QwenCoderState.CONTENT:
                    text, self._buffer = self._buffer, ""
                    yield from self._answer.text(text)
                case _QwenCoderState.OPENED:
                    yield from self._opened()
                case _QwenCoderState.BODY:
                    yield from self._body()
                case _QwenCoderState.TEXT:
                    yield from self._text()
                case _QwenCoderState.LITERAL:
                    yield from self._in_literal()
                case _QwenCoderState.BEHIND:
                    self._buffer = self._buffer.lstrip()
                    if self._buffer:
                        self._at = _QwenCoderState.CONTENT

    def _opened(self) -> Iterator[Part]:
        text = self._buffer.lstrip()
        name, closing, rest = text.removeprefix(FUNCTION).partition(">")
        if text.startswith(FUNCTION) and closing and 0 < len(name) <= MAX_NAME and name.isprintable():
            self._buffer, self._raw = rest, ""
            self._at, self._name, self._num_arguments, self._is_closed = _QwenCoderState.BODY, name, 0, False
            yield from self._answer.begin(name)
            yield from self._answer.arguments("{")
        elif not (FUNCTION.startswith(text) or (text.startswith(FUNCTION) and not closing and len(name) <= MAX_NAME)):
            text, self._raw, self._buffer, self._at = self._raw + self._buffer, "", "", _QwenCoderState.CONTENT
            yield from self._answer.text(text)

    def _body(self) -> Iterator[Part]:
        """Between arguments, where other text than tags is nothing."""
        found = _TAG.search(self._buffer)
        text = self._buffer = "" if found is None else self._buffer[found.start() :]
        key, closing, rest = text.removeprefix(PARAMETER).partition(">")
        if text.startswith(FUNCTION_END):
            self._buffer, self._at = text.removeprefix(FUNCTION_END), _QwenCoderState.BEHIND
            yield from self._answer.arguments("}")
        elif text.startswith(PARAMETER) and closing:
            self._buffer = rest
            yield from self._begin_value(key)

    def _begin_value(self, key: str) -> Iterator[Part]:
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        yield from self._answer.arguments(f"{comma}{json_string(key)}: ")
        self._of_value = self._kinds.get(self._name, {}).get(key, frozenset()) or TEXT
        self._begins, self._value = True, []
        self._at = _QwenCoderState.TEXT if "string" in self._of_value else _QwenCoderState.LITERAL
        if self._of_value == TEXT:
            yield from self._answer.arguments('"')
        self._literal = PythonArguments()
        self._literal.feed("value=", 0)
        self._is_literal = True

    def _text(self) -> Iterator[Part]:
        if self._begins:
            self._buffer, self._begins = self._buffer.removeprefix("\n"), False
        end = self._buffer.find(PARAMETER_END)
        if end >= 0:
            value, self._buffer = self._buffer[:end], self._buffer[end + len(PARAMETER_END) :]
            yield from self._end_text(value)
            return
        held = num_begun(self._buffer, (PARAMETER_END, "\n" + PARAMETER_END))
        value, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
        if self._of_value == TEXT:
            yield from self._answer.arguments(_escaped(value))
        else:
            self._value.append(value)

    def _end_text(self, rest: str) -> Iterator[Part]:
        """A value ends that may be a string; of several types, it is the one that JSON says."""
        rest = rest.removesuffix("\n")
        self._at = _QwenCoderState.BODY
        if self._of_value == TEXT:
            yield from self._answer.arguments(_escaped(rest) + '"')
            return
        text = "".join(self._value) + rest
        yield from self._answer.arguments(_json_of(WORDS.get(text, text), text, self._of_value))

    def _in_literal(self) -> Iterator[Part]:
        """A value that is no string: a tag within a string in it is text."""
        text, index = self._buffer, 0
        while index < len(text):
            is_string = self._is_literal and self._literal.is_in_string
            if text[index] == "<" and not is_string:
                if text.startswith(PARAMETER_END, index):
                    self._buffer = text[index + len(PARAMETER_END) :]
                    yield from self._end_literal()
                    return
                if len(text) - index < len(PARAMETER_END) and PARAMETER_END.startswith(text[index:]):
                    break
            end = text.find("<", index + 1)
            piece = text[index:] if end < 0 else text[index:end]
            self._literal.feed(piece, 0)
            self._is_literal = not (self._literal.is_bad or self._literal.is_done)  # done: by a bracket too many
            self._value.append(piece)
            index += len(piece)
        self._buffer = text[index:]

    def _end_literal(self) -> Iterator[Part]:
        self._at = _QwenCoderState.BODY
        text = "".join(self._value).removeprefix("\n").removesuffix("\n")
        found = ""
        if self._is_literal:
            self._literal.feed(")", 0)
            found = self._literal.json[len('{"value": ') : -1]
        yield from self._answer.arguments(_json_of(found, text, self._of_value))


def _json_of(found: str, text: str, kinds: Kinds) -> str:
    """What is found as JSON, if it is of one of these types; else the text as a string."""
    try:
        value = json.loads(found)
    except (ValueError, RecursionError):
        return json_string(text)
    return found.strip() if fits(value, kinds - TEXT) else json_string(text)


def _escaped(text: str) -> str:
    """A piece of a string as JSON, without its quotes."""
    return json_string(text)[1:-1]
