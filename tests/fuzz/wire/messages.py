"""Strategies for messages on the wire, drawn from descriptors: right ones, wrong ones, and bytes that are none.

They are made by an encoder of their own, since protobuf's refuses what a hostile peer may send: invalid UTF-8, wrong
wire types, several fields of a oneof, map entries without a key, unknown fields, lengths beyond the end
(https://protobuf.dev/programming-guides/encoding/).
"""

from __future__ import annotations

import math
import struct
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

Bytes = st.SearchStrategy[bytes]
T = TypeVar("T")

MAX_DEPTH = 4
"""Of messages in messages."""
_VARINT, _FIXED64, _LENGTH, _GROUP, _END_GROUP, _FIXED32 = range(6)
_FLOATS = [0.0, -0.0, 0.5, 1.0, 2.0, -1.0, math.nan, math.inf, -math.inf, 1e-45, 1e-300, 3.4e38, 1e300]
_TEXTS = ["", "a", "Hello", "\0", "\n", "é" * 3, "😀", "\u202e", "x" * 300, "<s>", "../..", "{{ 1/0 }}"]
_NOT_UTF8 = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"a\x80b", b"\xf5\x80\x80\x80"]


def mixed(*weighted: tuple[int, st.SearchStrategy[T]]) -> st.SearchStrategy[T]:
    """One of the strategies, each as often as its weight says; `|` drops strategies that are named twice."""
    return st.sampled_from([each for weight, each in weighted for _ in range(weight)]).flatmap(lambda each: each)


def varint(value: int) -> bytes:
    """A varint of 64 bits; a negative value is encoded as protobuf does."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def tag(number: int, wire_type: int) -> bytes:
    """What a field begins with."""
    return varint(number << 3 | wire_type)


def with_length(payload: bytes) -> bytes:
    """A string, a message or packed numbers."""
    return varint(len(payload)) + payload


def _integers(bits: int, *, signed: bool) -> st.SearchStrategy[int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    edges = [low, high, low + 1, high - 1, 255, 256, 4095, 4096, 2**31 - 1, 2**31 - 2]
    small = st.integers(max(low, -2), 40)
    near = st.sampled_from([each for each in edges if low <= each <= high])
    return mixed((4, small), (1, near), (1, st.integers(low, high)))


def _fixed(layout: str, values: st.SearchStrategy[float]) -> Bytes:
    def pack(value: float) -> bytes:
        try:
            return struct.pack(layout, value)
        except OverflowError:
            return struct.pack(layout, math.inf)

    return values.map(pack)


_FLOAT_VALUES = st.sampled_from(_FLOATS) | st.floats(0, 1) | st.floats()
_STRINGS = (st.sampled_from(_TEXTS) | st.text(max_size=20)).map(lambda text: text.encode("utf-8", "ignore"))
_SCALARS: dict[int, tuple[int, Bytes]] = {
    FieldDescriptor.TYPE_DOUBLE: (_FIXED64, _fixed("<d", _FLOAT_VALUES)),
    FieldDescriptor.TYPE_FLOAT: (_FIXED32, _fixed("<f", _FLOAT_VALUES)),
    FieldDescriptor.TYPE_FIXED64: (_FIXED64, _integers(64, signed=False).map(lambda value: struct.pack("<Q", value))),
    FieldDescriptor.TYPE_BOOL: (_VARINT, st.sampled_from([b"\0", b"\1", b"\1", varint(2**40)])),
    FieldDescriptor.TYPE_INT32: (_VARINT, _integers(32, signed=True).map(varint)),
    FieldDescriptor.TYPE_INT64: (_VARINT, _integers(64, signed=True).map(varint)),
    FieldDescriptor.TYPE_UINT32: (_VARINT, _integers(32, signed=False).map(varint)),
    FieldDescriptor.TYPE_UINT64: (_VARINT, _integers(64, signed=False).map(varint)),
    FieldDescriptor.TYPE_ENUM: (_VARINT, st.sampled_from([0, 1, 2, 3, 4, 5, 99, -1, 2**31 - 1, 2**63]).map(varint)),
    FieldDescriptor.TYPE_STRING: (_LENGTH, mixed((9, _STRINGS), (1, st.sampled_from(_NOT_UTF8))).map(with_length)),
    FieldDescriptor.TYPE_BYTES: (_LENGTH, st.binary(max_size=40).map(with_length)),
}


def any_message(descriptor: Descriptor, depth: int = MAX_DEPTH) -> Bytes:
    """A message with some of its fields, each with any value of its type, perhaps several times."""
    fields = [field for field in descriptor.fields if depth or field.message_type is None]
    if not fields:
        return st.just(b"")
    one = st.sampled_from(fields).flatmap(lambda field: _field(field, depth))
    return st.lists(one, max_size=5).map(b"".join)


def _field(field: FieldDescriptor, depth: int) -> Bytes:
    if field.message_type is not None:
        inner = st.deferred(lambda: any_message(field.message_type, depth - 1)).map(with_length)
        return inner.map(lambda payload: tag(field.number, _LENGTH) + payload)
    wire_type, values = _SCALARS[field.type]
    one = values.map(lambda value: tag(field.number, wire_type) + value)
    if not field.is_repeated:
        return one
    several = st.lists(values, max_size=8)
    unpacked = several.map(lambda each: b"".join(tag(field.number, wire_type) + value for value in each))
    if wire_type == _LENGTH:
        return unpacked
    packed = several.map(lambda each: tag(field.number, _LENGTH) + with_length(b"".join(each)))
    return mixed((3, packed), (1, unpacked))


_UNKNOWN = st.tuples(st.integers(1, 2**29 - 1), st.integers(0, 5), st.binary(max_size=12)).map(
    lambda drawn: tag(drawn[0], drawn[1]) + drawn[2]
)
"""A field that no message has, with a payload that may not be one of its wire type."""
_HUGE_LENGTH = st.tuples(st.integers(1, 20), st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1])).map(
    lambda drawn: tag(drawn[0], _LENGTH) + varint(drawn[1])
)


def _nested(number: int) -> bytes:
    """A message in a message, more often than parsers allow (100 times)."""
    payload = b""
    for _ in range(120):
        payload = tag(number, _LENGTH) + with_length(payload)
    return payload


def _cut(payload: bytes, place: float) -> bytes:
    return payload[: int(place * len(payload))]


def _flip(payload: bytes, flips: list[tuple[float, int]]) -> bytes:
    changed = bytearray(payload)
    for place, mask in flips:
        if changed:
            changed[int(place * (len(changed) - 1))] ^= mask
    return bytes(changed)


def _splice(payload: bytes, place: float, inserted: bytes, num_lost: int) -> bytes:
    at = int(place * len(payload))
    return payload[:at] + inserted + payload[at + num_lost :]


_PLACES = st.floats(0, 1)


def damaged(payloads: Bytes) -> Bytes:
    """The same, cut, with bits flipped, with bytes inserted or lost, or with fields that do not exist."""
    flips = st.lists(st.tuples(_PLACES, st.integers(1, 255)), min_size=1, max_size=3)
    appended = _UNKNOWN | _HUGE_LENGTH | st.integers(1, 20).map(_nested)
    return (
        st.builds(_cut, payloads, _PLACES)
        | st.builds(_flip, payloads, flips)
        | st.builds(_splice, payloads, _PLACES, st.binary(max_size=4), st.integers(0, 4))
        | st.builds(lambda payload, more: payload + more, payloads, appended)
    )


def near(base: bytes, descriptor: Descriptor) -> Bytes:
    """A right message with some fields set anew: fields that come later win, messages are merged, lists go on."""
    return any_message(descriptor).map(lambda changes: base + changes)


def hostile(descriptor: Descriptor, bases: list[bytes]) -> Bytes:
    """All that a peer may send where this message is expected, from nearly right to arbitrary bytes."""
    drawn = any_message(descriptor)
    if bases:
        changed = st.sampled_from(bases).flatmap(lambda base: near(base, descriptor))
        drawn = mixed((3, changed), (1, drawn))
    return mixed((6, drawn), (2, damaged(drawn)), (1, st.binary(max_size=40)))
