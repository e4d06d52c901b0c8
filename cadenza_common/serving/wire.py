"""Reads the encoding of protobuf without protobuf: varints, and where a field ends.

Format: https://protobuf.dev/programming-guides/encoding/. A field is a varint of number and wire type, then its
content; strings, bytes, messages and packed lists have a length prefix: wire type 2.
"""

from __future__ import annotations

LENGTH_PREFIXED = 2
"""The wire type of strings, bytes, messages and packed lists."""


class UnparsableError(Exception):
    """The bytes are not a protocol buffer."""


def varint(raw: bytes, at: int) -> tuple[int, int]:
    """The varint at this offset, and the offset after it; raises UnparsableError."""
    value = 0
    for index, byte in enumerate(raw[at : at + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise UnparsableError


def after_number(raw: bytes, at: int, wire_type: int) -> int:
    """The offset after a number of this wire type; raises UnparsableError for other types."""
    if wire_type == 0:
        return varint(raw, at)[1]
    if wire_type in (1, 5):
        return at + (8 if wire_type == 1 else 4)
    raise UnparsableError
