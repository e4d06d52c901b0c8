"""Calls of Qwen3-Coder, whose arguments are bare text between tags.

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>

A function without a tool_call around it is a call too, if it is one of the tools. A value is without the line breaks
beside its tags, and other tags within it are its text. What it is, the tool's schema says: a string is given on as it
comes, all else is a literal of JSON or of Python, or a string after all, as in vLLM's qwen3_coder parser
(https://docs.vllm.ai/en/latest/features/tool_calling.html).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
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

    def __init__(self, kinds: ArgumentKinds, names: Collection[str]) -> None:
        """names: of the tools, which alone are called without a marker."""
        self._kinds = kinds
        self._names = names
        self._answer = AnswerBuilder()
        self._at = _QwenCoderState.CONTENT
        self._buffer = ""
        """What has been read and is not certain."""
        self._raw = ""
        """What is given back if it is no call."""
        self._is_marked = False
        """Whether a marker has begun it."""
        self._name = ""
        self._num_arguments = 0
        self._of_value: Kinds = TEXT
        self._value: list[str] = []
        """Of a value that is given on at its end, what was read."""
        self._marked: list[Piece] | None = None
        """From a marker within a value on, what was read: if the value is never closed, it ended there."""
        self._before_mark = ""
        """What of that value has not been given on, to the marker."""
        self._can_hold = True
        """Whether a marker within a value may be its text."""
        self._literal = PythonArguments()
        self._is_literal = False
        """Whether it may still be a literal."""
        self._begins = False
        """Whether nothing of the value has been read."""
        self._is_closed = True
        """Whether the last call has had its closing marker."""

    def feed(self, piece: Piece) -> Iterator[Part]:
        """As CallParser."""
        is_mark = isinstance(piece, Mark) and piece.role in (Role.CALL, Role.CALL_END)
        is_value = self._at in (_QwenCoderState.TEXT, _QwenCoderState.LITERAL)
        if isinstance(piece, Mark) and is_mark and not (is_value and self._can_hold):
            yield from self._mark(piece)
            return
        if is_mark and self._marked is None:
            self._marked, self._before_mark = [], "".join(self._value) + self._buffer
        if self._marked is not None:
            self._marked.append(piece)
        self._buffer += piece.written if isinstance(piece, Mark) and is_value else shown_of(piece)
        yield from self._read()

    def finish(self, *, is_cut: bool) -> Iterator[Part]:
        """As CallParser."""
        if is_cut and self._marked is not None and self._of_value == TEXT:
            yield from self._answer.arguments(_escaped("".join(self._value)))
        if not is_cut:
            yield from self._end_at_mark()
            yield from self._end()
        elif self._at is _QwenCoderState.CONTENT:
            yield from self._answer.text(self._buffer)
        yield from self._answer.finish()

    def _end_at_mark(self) -> Iterator[Part]:
        """Read again from the first marker within a value on that was never closed: it was none of its text."""
        pieces, self._marked, self._can_hold = self._marked or (), None, False
        if pieces:
            self._value, self._buffer = [self._before_mark], ""
        for piece in pieces:
            yield from self.feed(piece)

    def _mark(self, mark: Mark) -> Iterator[Part]:
        yield from self._end()
        if mark.role is Role.CALL:
            self._at, self._raw, self._is_marked = _QwenCoderState.OPENED, mark.shown, True
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
                    yield from self._content()
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

    def _content(self) -> Iterator[Part]:
        start = self._buffer.find(FUNCTION)
        if start >= 0:
            self._at, self._is_marked = _QwenCoderState.OPENED, False
        else:
            start = len(self._buffer) - num_begun(self._buffer, (FUNCTION,))
        text, self._buffer = self._buffer[:start], self._buffer[start:]
        yield from self._answer.text(text)

    def _is_name(self, name: str, *, is_whole: bool) -> bool:
        """Whether this is the name of a call, or may begin one."""
        if self._is_marked:
            return is_whole <= len(name) <= MAX_NAME and (name.isprintable() or not is_whole)
        return name in self._names or (not is_whole and any(each.startswith(name) for each in self._names))

    def _opened(self) -> Iterator[Part]:
        text = self._buffer.lstrip()
        name, closing, rest = text.removeprefix(FUNCTION).partition(">")
        if text.startswith(FUNCTION) and closing and self._is_name(name, is_whole=True):
            self._buffer, self._raw = rest, ""
            self._at, self._name, self._num_arguments, self._is_closed = _QwenCoderState.BODY, name, 0, False
            yield from self._answer.begin(name)
            yield from self._answer.arguments("{")
        elif not (
            FUNCTION.startswith(text)
            or (text.startswith(FUNCTION) and not closing and self._is_name(name, is_whole=False))
        ):
            num = len(self._buffer) - len(text) + (len(FUNCTION) if text.startswith(FUNCTION) else 0)
            text, self._raw, self._buffer = self._raw + self._buffer[:num], "", self._buffer[num:]
            self._at = _QwenCoderState.CONTENT
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
        self._literal = _begun_literal()
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
        if self._of_value == TEXT and self._marked is None:
            yield from self._answer.arguments(_escaped(value))
        else:
            self._value.append(value)

    def _end_text(self, rest: str) -> Iterator[Part]:
        """A value ends that may be a string; of several types, it is the one that JSON says."""
        text = ("".join(self._value) + rest).removesuffix("\n")
        self._at, self._marked = _QwenCoderState.BODY, None
        if self._of_value == TEXT:
            yield from self._answer.arguments(_escaped(text) + '"')
            return
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
        self._at, self._marked = _QwenCoderState.BODY, None
        text = "".join(self._value).removeprefix("\n").removesuffix("\n")
        yield from self._answer.arguments(_json_of(_literal_json(text), text, self._of_value))


def _begun_literal() -> PythonArguments:
    literal = PythonArguments()
    literal.feed("value=", 0)
    return literal


def _literal_json(text: str) -> str:
    """A literal as JSON; nothing: it is none."""
    literal = _begun_literal()
    literal.feed(text, 0)
    if literal.is_bad or literal.is_done:  # done: by a bracket too many
        return ""
    literal.feed(")", 0)
    return literal.json[len('{"value": ') : -1]


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
