"""Parses a long plan in pieces, so that an event loop runs its other callbacks in between (docs/decisions/0025).

protobuf parses a message in one call. It also merges: parsing a message's fields in several calls gives the same
message. So a long message is cut between its fields, and a long field is cut in itself: a message likewise, a packed
list between its numbers, with a header for each part.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from cadenza.v1 import execution_pb2 as pb
from cadenza_common.serving.slices import Work
from cadenza_common.serving.wire import LENGTH_PREFIXED, UnparsableError, after_number, varint
from cadenza_common.wire.transport import MAX_SHORT_BYTES

PIECE_BYTES = 256 * 1024
"""Most bytes that one call parses: 2 ms at the measured 4 to 7.5 ns a byte of small fields."""
_SLICE_FIELDS = 1024
"""Most fields that one slice walks: 0.7 ms."""
_MAX_FIELDS = 65_536
"""Most fields of one long message: a plan has few besides its sequences, and freeing a million takes 8 ms."""
_VARINTS = frozenset(
    {FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_ENUM}
)


def request_in_slices(raw: bytes) -> Work[pb.ExecuteRequest]:
    """Parse a message of the plan stream, with a pause after each piece of a long one.

    Only a plan may be long: raises DecodeError for another message, and for one that cannot be parsed.
    """
    if len(raw) <= MAX_SHORT_BYTES:
        return pb.ExecuteRequest.FromString(raw)
    try:
        start = _start_of_plan(raw)
        request = pb.ExecuteRequest()
        request.plan.SetInParent()
        yield
        yield from _merge(request.plan, raw, start, len(raw))
    except (UnparsableError, IndexError) as exc:
        raise DecodeError("Error parsing message") from exc
    return request


def _start_of_plan(raw: bytes) -> int:
    """The offset of the plan of a message that holds one and nothing else."""
    length, start = varint(raw, 1)
    if raw[0] != pb.ExecuteRequest.PLAN_FIELD_NUMBER << 3 | LENGTH_PREFIXED or start + length != len(raw):
        raise DecodeError(f"it has {len(raw)} bytes and is no plan; at most {MAX_SHORT_BYTES} are allowed")
    return start


def _merge(message: Any, raw: bytes, at: int, end: int) -> Work[None]:
    """Parse the fields from one offset to another into a message, in pieces."""
    start, num_fields, num_left = at, 0, _MAX_FIELDS  # of the next piece, and of all
    while at < end:
        begin = at
        tag, content = varint(raw, at)
        if tag & 7 == LENGTH_PREFIXED:
            length, content = varint(raw, content)
            at = content + length
        else:
            at = after_number(raw, content, tag & 7)
        if at > end:
            raise UnparsableError
        num_fields += 1
        num_left -= 1
        if num_left < 0:
            raise DecodeError(f"it has over {_MAX_FIELDS} fields")
        if at - start > PIECE_BYTES or num_fields == _SLICE_FIELDS:
            message.MergeFromString(raw[start:begin])
            yield
            start, num_fields = begin, 0
            if at - begin > PIECE_BYTES:
                yield from _merge_long(message, tag, raw, begin, content, at)
                start = at
    message.MergeFromString(raw[start:end])
    yield


def _merge_long(message: Any, tag: int, raw: bytes, begin: int, content: int, end: int) -> Work[None]:
    """Parse one long field, from its tag at `begin`; what it holds is from `content` to `end`."""
    field = message.DESCRIPTOR.fields_by_number.get(tag >> 3)
    if field is not None and field.message_type is not None:
        part = getattr(message, field.name)
        if field.is_repeated:
            part = part.add()
        else:
            part.SetInParent()
        yield from _merge(part, raw, content, end)
    elif field is not None and field.type in _VARINTS:
        while content < end:
            cut = _last_cut(raw, content, min(content + PIECE_BYTES, end))
            message.MergeFromString(_varint_bytes(tag) + _varint_bytes(cut - content) + raw[content:cut])
            content = cut
            yield
    else:
        # Texts, bytes and numbers of fixed width are copied, unknown fields skipped: 0.5 ns a byte.
        message.MergeFromString(raw[begin:end])
        yield


def _last_cut(raw: bytes, start: int, end: int) -> int:
    """The last offset up to `end` at which a number ends; raises UnparsableError for a number of over 10 bytes."""
    for cut in range(end, max(start, end - 10), -1):
        if raw[cut - 1] < 0x80:
            return cut
    raise UnparsableError


def _varint_bytes(value: int) -> bytes:
    """The varint of a number."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
