"""Responses that hold tokens and text only, as bytes: what nearly every message of a running request is.

Building protobuf objects for them would take ten times as long as the wire form itself (decision 0024). The bytes are
those of the messages that `fill_response` makes. Format: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from functools import lru_cache

from cadenza.v1 import generation_pb2 as pb
from scheduler_svc.engine.reader import Cursor, RequestReader

_VARINT, _LENGTH_PREFIXED = 0, 2
_MAX_TOKENS = 64
_MAX_CHARS = 1024
"""More output of a request at once is left to the plain form, which keeps to the limits of a message."""
_MAX_HEADS = 8
"""Outputs without text have three sizes or so."""


def varint(value: int) -> bytes:
    """Return the wire form of an unsigned integer."""
    # Token ids are below 2**21, where no loop is needed.
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((0x80 | (value & 0x7F), value >> 7))
    if value < 0x200000:
        return bytes((0x80 | (value & 0x7F), 0x80 | (value >> 7 & 0x7F), value >> 14))
    found = bytearray()
    while value > 0x7F:
        found.append(0x80 | (value & 0x7F))
        value >>= 7
    found.append(value)
    return bytes(found)


def _tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


_FIRST_TOKEN_INDEX = _tag(pb.SampleOutput.FIRST_TOKEN_INDEX_FIELD_NUMBER, _VARINT)
_TOKEN_IDS = _tag(pb.SampleOutput.TOKEN_IDS_FIELD_NUMBER, _LENGTH_PREFIXED)
_ONE_TOKEN = tuple(_TOKEN_IDS + varint(size) for size in range(11))
"""What precedes a single token id, by the size of its wire form."""
_TEXT = _tag(pb.SampleOutput.TEXT_FIELD_NUMBER, _LENGTH_PREFIXED)
_TEXT_ENDS = _tag(pb.SampleOutput.TEXT_ENDS_FIELD_NUMBER, _LENGTH_PREFIXED)
_TEXT_OFFSET = _tag(pb.SampleOutput.TEXT_OFFSET_FIELD_NUMBER, _VARINT)
_REQUEST_ID = _tag(pb.GenerateResponse.REQUEST_ID_FIELD_NUMBER, _LENGTH_PREFIXED)
_OUTPUTS = _tag(pb.GenerateResponse.OUTPUTS_FIELD_NUMBER, _LENGTH_PREFIXED)
_EVENT_ID = _tag(pb.SessionEvent.REQUEST_ID_FIELD_NUMBER, _LENGTH_PREFIXED)
_RESPONSE = _tag(pb.SessionEvent.RESPONSE_FIELD_NUMBER, _LENGTH_PREFIXED)
_EVENTS = _tag(pb.SessionResponse.EVENTS_FIELD_NUMBER, _LENGTH_PREFIXED)


@lru_cache(maxsize=1 << 16)
def _first_token_index(value: int) -> bytes:
    return _FIRST_TOKEN_INDEX + varint(value)


@lru_cache(maxsize=1 << 18)
def _one_token(token_id: int) -> bytes:
    found = varint(token_id)
    return _ONE_TOKEN[len(found)] + found


@lru_cache(maxsize=1 << 12)
def _length(value: int) -> bytes:
    return varint(value)


@lru_cache(maxsize=1 << 16)
def _text_offset(value: int) -> bytes:
    return _TEXT_OFFSET + varint(value)


@lru_cache(maxsize=1 << 12)
def _lengths(id_size: int, output_size: int) -> tuple[bytes, bytes, bytes]:
    """Return the bytes before the two request ids of an event, and before its output."""
    outputs = _OUTPUTS + varint(output_size)
    response_size = id_size + len(outputs) + output_size
    response = _RESPONSE + varint(response_size)
    return _EVENTS + varint(id_size + len(response) + response_size), response, outputs


class PlainOutput:
    """Takes the new output of a request with one sample that has neither logprobs nor beams, after its first response.

    It moves the reader's own position, so that both may be used in turns.
    """

    __slots__ = ("_event_id", "_heads", "_live", "_position", "_request_id", "_sample", "_with_text_ends")

    def __init__(self, reader: RequestReader, position: Cursor) -> None:
        """`position`: the reader's own, from `plain_position`."""
        request_id = reader.live.request_id.encode()
        self._live = reader.live
        self._sample = reader.live.samples[0]
        self._position = position
        self._with_text_ends = reader.with_text_ends
        self._request_id = _REQUEST_ID + varint(len(request_id)) + request_id
        self._event_id = _EVENT_ID + varint(len(request_id)) + request_id
        self._heads: dict[int, bytes] = {}
        """By the size of an output: the bytes of an event before it."""

    @classmethod
    def of(cls, reader: RequestReader) -> PlainOutput | None:
        """Return the plain output of a reader; None for a request or a mode that it does not serve."""
        position = reader.plain_position
        return None if position is None else cls(reader, position)

    def take_response(self) -> bytes | None:
        """Return new output as a GenerateResponse; None: see `take_event`."""
        output = self._take_output()
        return None if output is None else b"".join((self._request_id, _OUTPUTS, _length(len(output)), output))

    def take_event(self) -> bytes | None:
        """Return new output as the field of a SessionResponse that holds it in a SessionEvent.

        None, and nothing is taken, unless there are tokens or text and nothing else, and not too much of them.
        """
        output = self._take_output()
        if output is None:
            return None
        head = self._heads.get(len(output))
        return (self._event_head(len(output)) if head is None else head) + output

    def _event_head(self, output_size: int) -> bytes:
        """Return the bytes of an event before an output of this size, and keep them for the next such output."""
        event, response, outputs = _lengths(len(self._event_id), output_size)
        head = b"".join((event, self._event_id, response, self._request_id, outputs))
        if len(self._heads) == _MAX_HEADS:
            self._heads.clear()
        self._heads[output_size] = head
        return head

    def _take_output(self) -> bytes | None:
        sample, position, live = self._sample, self._position, self._live
        text, text_start = sample.text, position.text
        if sample.finish is not None or live.hidden or live.error is not None or text_start is None:
            return None
        ids, start = sample.token_ids, position.token
        if text is None and sample.max_shown_tokens is None:
            end = len(ids)
            if end - start == 1 and not text_start:
                # Most outputs by far are one token without text.
                position.token = end
                return _first_token_index(start) + _one_token(ids[start]) if start else _one_token(ids[start])
            chars, text_end = "", 0
        else:
            chars = "" if text is None else text.text
            end, text_end = (len(ids), len(chars)) if sample.max_shown_tokens is None else sample.shown_ends()
        if not 0 < end - start <= _MAX_TOKENS or not 0 <= text_end - text_start <= _MAX_CHARS:
            return None
        position.token, position.text = end, text_end
        if end - start == 1:
            tokens = _one_token(ids[start])
        else:
            packed = b"".join(map(varint, ids[start:end]))
            tokens = _TOKEN_IDS + _length(len(packed)) + packed
        if start:
            tokens = _first_token_index(start) + tokens
        if text_end > text_start:
            tokens += _text(chars[text_start:text_end])
        if text_start:
            tokens += _text_offset(text_start)
        if self._with_text_ends and text is not None:
            packed = b"".join(map(varint, text.token_ends[start:end]))
            tokens += _TEXT_ENDS + _length(len(packed)) + packed
        return tokens


def _text(text: str) -> bytes:
    found = text.encode()
    return _TEXT + _length(len(found)) + found
