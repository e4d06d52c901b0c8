"""Diagnoses a message that protobuf rejects: finds the string that is not UTF-8, and the request id.

Protobuf reports neither. Format: https://protobuf.dev/programming-guides/encoding/. A field is a varint of number and
wire type, then its content; strings, bytes and messages have a length prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_MAX_FIELDS = 10_000
"""Limit on the number of fields read, because the search runs on the event loop."""


class _UnparsableError(Exception):
    """The bytes are not a protocol buffer, or have too many fields."""


def path_of_bad_string(raw: bytes, message: type[Message]) -> str:
    """Path of the first string that is not UTF-8 in a message of this type; empty if none is found."""
    try:
        return _Reader().bad_string(raw, message.DESCRIPTOR, "")
    except _UnparsableError:
        return ""


def string_at(raw: bytes, *numbers: int) -> str:
    """The string at a path of field numbers; empty if it cannot be read."""
    reader, content = _Reader(), raw
    try:
        for number in numbers:
            content = next((content for found, content in reader.fields(content) if found == number), b"")
        return content.decode()
    except (_UnparsableError, UnicodeDecodeError):
        return ""


class _Reader:
    """Reads at most _MAX_FIELDS fields from bytes."""

    def __init__(self) -> None:
        self._num_left = _MAX_FIELDS

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
                raise _UnparsableError
            tag, at = _varint(raw, at)
            match tag & 7:
                case 0:  # a varint
                    _, at = _varint(raw, at)
                case 1:  # 64 bits
                    at += 8
                case 5:  # 32 bits
                    at += 4
                case 2:  # a length and as many bytes
                    length, at = _varint(raw, at)
                    if length > len(raw) - at:
                        raise _UnparsableError
                    yield tag >> 3, raw[at : at + length]
                    at += length
                case _:
                    raise _UnparsableError


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The varint at this offset, and the offset after it."""
    value = 0
    for index, byte in enumerate(raw[at : at + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise _UnparsableError


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
