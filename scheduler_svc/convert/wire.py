"""Reads messages without protobuf: the sizes of their parts before they are parsed, and what is wrong with others.

Of a message that protobuf rejects it finds the string that is not UTF-8, and the request id. Protobuf reports neither.
The encoding: `cadenza_common.serving.wire`. Too many fields count as bytes that cannot be read.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from cadenza_common.serving.wire import UnparsableError, after_number, varint

_MAX_FIELDS = 1000
"""Limit on the number of fields read, because the search runs on the event loop: 2 ms at most (measured)."""
_MAX_SIZED = 4096
"""Limit on the number of fields whose sizes are read: 2.5 ms (measured). A request with 512 messages and 512 tools has
some 3,600, most of them roles, texts, ids and calls; one that has more, and over 192 KiB beyond these, is refused."""
_MIN_NESTED_BYTES = 64
"""A shorter message within a message is not looked into: it counts as small fields."""
_TEXT, _LIST = "text", "list"
_Kinds = dict[int, Any]
"""By field number: _TEXT, _LIST, or the kinds of a nested message."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a message by the time that parsing them takes."""

    texts: int
    lists: int
    """Packed lists of numbers."""
    others: int


def sizes_of(raw: bytes, message: type[Message]) -> Sizes:
    """The sizes of a message's parts, without parsing it. What cannot be read, or is too much, counts as others."""
    reader = _SizeReader(raw)
    with contextlib.suppress(UnparsableError, IndexError):
        reader.read(0, len(raw), _kinds(message.DESCRIPTOR))
    return Sizes(reader.texts, reader.lists, len(raw) - reader.texts - reader.lists)


@functools.cache
def _kinds(descriptor: Any) -> _Kinds:
    kinds: _Kinds = {}
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            kinds[field.number] = _TEXT
        elif field.message_type is not None:
            kinds[field.number] = _kinds(field.message_type)
        elif field.is_repeated:
            kinds[field.number] = _LIST
    return kinds


class _SizeReader:
    """Adds up the sizes of at most _MAX_SIZED fields."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._num_left = _MAX_SIZED
        self.texts = 0
        self.lists = 0

    def read(self, at: int, end: int, kinds: _Kinds) -> None:
        """Add the fields from one offset to another; raises UnparsableError, IndexError."""
        raw = self._raw
        while at < end:
            self._num_left -= 1
            if self._num_left < 0:
                raise UnparsableError
            tag, at = (raw[at], at + 1) if raw[at] < 0x80 else varint(raw, at)
            if tag & 7 != 2:
                at = after_number(raw, at, tag & 7)
                continue
            length, at = (raw[at], at + 1) if raw[at] < 0x80 else varint(raw, at)
            if length > end - at:
                raise UnparsableError
            kind = kinds.get(tag >> 3)
            if kind is _TEXT:
                self.texts += length
            elif kind is _LIST:
                self.lists += length
            elif kind is not None and length >= _MIN_NESTED_BYTES:
                self.read(at, at + length, kind)
            at += length


def largest_field(raw: bytes, message: type[Message]) -> str:
    """Path of the field that has most of a message's bytes, as far as they can be read; "message" if none can.

    Parts of a session are looked into: paths are those of the request.
    """
    path, descriptor = "", message.DESCRIPTOR
    while True:
        sizes, contents = Counter[int](), dict[int, bytes]()
        with contextlib.suppress(UnparsableError, IndexError):
            for number, content in _FieldReader(_MAX_SIZED).fields(raw):
                sizes[number] += len(content) + 2
                contents[number] = content
        field = next((descriptor.fields_by_number.get(number) for number, _ in sizes.most_common(1)), None)
        if field is None:
            return path.rstrip(".") or "message"
        if field.message_type is None or field.is_repeated:
            return path + field.name
        raw, descriptor = contents[field.number], field.message_type
        path = "" if message.DESCRIPTOR.name == "SessionRequest" and not path else f"{path}{field.name}."


def path_of_bad_string(raw: bytes, message: type[Message]) -> str:
    """Path of the first string that is not UTF-8 in a message of this type; empty if none is found."""
    try:
        return _FieldReader().bad_string(raw, message.DESCRIPTOR, "")
    except UnparsableError:
        return ""


def string_at(raw: bytes, *numbers: int) -> str:
    """The string at a path of field numbers; empty if it cannot be read."""
    reader, content = _FieldReader(), raw
    try:
        for number in numbers:
            content = next((content for found, content in reader.fields(content) if found == number), b"")
        return content.decode()
    except (UnparsableError, UnicodeDecodeError):
        return ""


class _FieldReader:
    """Reads some fields from bytes."""

    def __init__(self, most: int = _MAX_FIELDS) -> None:
        self._num_left = most

    def bad_string(self, raw: bytes, descriptor: Any, path: str) -> str:
        seen: Counter[int] = Counter()
        for number, content in self.fields(raw):
            field = descriptor.fields_by_number.get(number)
            if field is None:
                continue
            field_path = f"{path}{field.name}[{seen[number]}]" if field.is_repeated else path + field.name
            seen[number] += 1
            if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(content):
                return field_path
            if field.message_type is not None and (
                found := self.bad_string(content, field.message_type, f"{field_path}.")
            ):
                return found
        return ""

    def fields(self, raw: bytes) -> Iterator[tuple[int, bytes]]:
        """(number, content) of each length-prefixed field."""
        at = 0
        while at < len(raw):
            self._num_left -= 1
            if self._num_left < 0:
                raise UnparsableError
            tag, at = varint(raw, at)
            if tag & 7 != 2:
                at = after_number(raw, at, tag & 7)
                continue
            length, at = varint(raw, at)
            if length > len(raw) - at:
                raise UnparsableError
            yield tag >> 3, raw[at : at + length]
            at += length


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
