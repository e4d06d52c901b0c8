"""Cursors over a live request: what one reader has not sent yet. A reader's lag is an index, never a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.types import Finish, TokenLogprobs
from scheduler_svc.live_request import LiveRequest, LiveSample

MAX_CHUNK_BYTES = 1 << 20
"""About the largest response: a reader that is far behind gets several."""
PROMPT_TOKEN_BYTES = 3
"""A prompt's token id in the first response, if asked for."""
_SAMPLE_BYTES = 64
_TOKEN_BYTES = 8
_CHAR_BYTES = 3
_LOGPROB_BYTES = 24
_TOP_LOGPROB_BYTES = 20


@dataclass(slots=True)
class SampleChunk:
    """New output of one sample; see SampleOutput in generation.proto."""

    sample_index: int
    first_token_index: int
    token_ids: list[int]
    text: str
    text_offset: int
    logprobs: Sequence[TokenLogprobs]
    finish: Finish | None
    num_bytes: int
    """About the size on the wire."""
    is_whole: bool
    """Nothing more of this sample can be taken now."""


@dataclass(slots=True)
class Chunk:
    """All that is new of one request, as far as it fits one response."""

    samples: list[SampleChunk]
    is_first: bool
    is_last: bool
    is_whole: bool
    """Nothing more can be taken now."""
    num_bytes: int


class _Cursor:
    """How far one sample has been sent."""

    __slots__ = ("done", "text", "token")

    def __init__(self) -> None:
        self.token = 0
        self.text = 0
        self.done = False


class RequestReader:
    """Reads one live request from its beginning to its end; any number of readers may do so at once."""

    __slots__ = ("_cursors", "_final_only", "_is_first", "done", "live")

    def __init__(self, live: LiveRequest, *, final_only: bool = False) -> None:
        self.live = live
        self.done = False
        """Everything has been taken, and nothing more will come."""
        self._final_only = final_only
        self._is_first = True
        self._cursors = [_Cursor() for _ in live.samples]

    def take(self, max_bytes: int = MAX_CHUNK_BYTES) -> Chunk | None:
        """What is new, at most about `max_bytes` (but a token at least); None: nothing yet, or the end was taken."""
        if self.done:
            return None
        samples: list[SampleChunk] = []
        num_bytes = 0
        is_whole, ended = True, False
        for index, (sample, cursor) in enumerate(zip(self.live.samples, self._cursors, strict=True)):
            if cursor.done or (self._final_only and sample.finish is None):
                continue
            if num_bytes >= max_bytes:
                is_whole = False
                break
            chunk = _advance(index, sample, cursor, max_bytes - num_bytes)
            if chunk is not None:
                samples.append(chunk)
                num_bytes += chunk.num_bytes
                is_whole = is_whole and chunk.is_whole
                ended = ended or cursor.done
        if not samples:
            return None
        self.done = ended and all(cursor.done for cursor in self._cursors)
        is_first, self._is_first = self._is_first, False
        return Chunk(samples, is_first, self.done, is_whole, num_bytes)


def _advance(index: int, sample: LiveSample, cursor: _Cursor, max_bytes: int) -> SampleChunk | None:
    """Take what is new of one sample and move its cursor."""
    num_tokens, text = len(sample.token_ids), "" if sample.text is None else sample.text.text
    start, text_start, num_chars = cursor.token, cursor.text, len(text)
    if start == num_tokens and text_start == num_chars and sample.finish is None:
        return None
    token_end, text_end, num_bytes = _fit(sample, cursor, num_tokens, num_chars, max_bytes)
    is_whole = token_end == num_tokens and text_end == num_chars
    finish = sample.finish if is_whole else None
    cursor.token, cursor.text, cursor.done = token_end, text_end, finish is not None
    return SampleChunk(
        sample_index=index,
        first_token_index=start,
        token_ids=sample.token_ids[start:token_end],
        text=text[text_start:text_end],
        text_offset=text_start,
        logprobs=sample.logprobs[start:token_end] if sample.logprobs else (),
        finish=finish,
        num_bytes=num_bytes,
        is_whole=is_whole,
    )


def _fit(sample: LiveSample, cursor: _Cursor, num_tokens: int, num_chars: int, max_bytes: int) -> tuple[int, int, int]:
    """Up to which token and which character a chunk of this size may go, and how large it is then."""
    token_end, text_end = num_tokens, num_chars
    num_bytes = _num_bytes(sample, token_end - cursor.token, text_end - cursor.text)
    while num_bytes > max_bytes and token_end - cursor.token > 1:
        token_end = cursor.token + (token_end - cursor.token) // 2
        text_end = sample.text.text_ends[token_end - 1] if sample.text is not None else 0
        num_bytes = _num_bytes(sample, token_end - cursor.token, text_end - cursor.text)
    return token_end, text_end, num_bytes


def _num_bytes(sample: LiveSample, num_tokens: int, num_chars: int) -> int:
    per_token = _TOKEN_BYTES
    if sample.logprobs:
        per_token += _LOGPROB_BYTES + _TOP_LOGPROB_BYTES * len(sample.logprobs[0].top_token_ids)
    return _SAMPLE_BYTES + num_tokens * per_token + num_chars * _CHAR_BYTES
